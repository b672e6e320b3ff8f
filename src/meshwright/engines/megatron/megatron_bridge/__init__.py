"""Write and read configurations of Megatron-Bridge. Imports no torch."""
