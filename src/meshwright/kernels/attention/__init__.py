"""Attention: the keys that a query sees, the specification, our Triton kernels, PyTorch's kernels, a CPU's own."""
