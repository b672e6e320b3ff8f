"""Code that runs in Megatron's processes and imports it."""
