"""Training kernels: one operation, several routes (plain PyTorch, Triton, libraries), chosen by data and recorded.

Each operation has a module with the reference in plain PyTorch, which is its specification, and its other routes.
"""
