"""Profiles of some training steps, the same for every engine: a trace, and its time by category of kernel.

steps        which steps are profiled, and how processes learn of them
profiler     `torch.profiler` around these steps, in engines on PyTorch
shares       time by category from a trace in Chrome's format; xla: from one of JAX's profiler
categories   categories of kernels and operators by name; hlo: of XLA's instructions by the text of a module
"""
