"""Profiles of some training steps, alike for every engine: a trace, and its time by category of kernel.

steps        which steps are profiled, and how processes learn of them
profiler     `torch.profiler` around these steps, in engines on PyTorch
shares       time by category, read from a trace in Chrome's format; xla: read from a trace of JAX's profiler
categories   categories of kernels and operators by name; hlo: categories of XLA's instructions by a module's text
"""
