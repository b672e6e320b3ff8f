"""A run as arguments of Megatron-Core's constructors, and names of its tensors. Imports no torch."""
