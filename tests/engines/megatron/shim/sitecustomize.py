"""Lets megatron-core 0.16 run on a CPU: for tests, through PYTHONPATH, and nowhere else.

What it asks of CUDA is answered by the CPU, from the moment that it is imported:

    torch.cuda             devices, streams and events that do nothing
    tensors on "cuda"      lie in memory; their type is the word that Megatron's optimizers compare
    random states          one, PyTorch's
    all_to_all_single      sizes as numbers: gloo takes no tensors for them
"""

from __future__ import annotations

import importlib.abc
import sys

FIRST, LAST = "megatron.core", "megatron.core.tensor_parallel.random"


class Supplier(importlib.abc.MetaPathFinder):
    """Supplies as Megatron is imported; finds nothing itself."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == FIRST:
            sys.meta_path.remove(self)
            supply_devices()
            supply_tensors()
            supply_all_to_all()
            sys.meta_path.insert(0, Random())
        return None


class Random(importlib.abc.MetaPathFinder):
    """Replaces the methods of the tracker of random states when it was imported."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != LAST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            supply_random(module)

        spec.loader.exec_module = exec_module
        return spec


class Nothing:
    """A stream, an event: every method does nothing."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: Nothing()


def supply_devices():
    import contextlib
    import os

    import torch

    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: os.cpu_count() or 1
    cuda.get_device_name = lambda *_: "cpu"
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.Stream = cuda.Event = Nothing
    cuda.current_stream = lambda *_: Nothing()
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda *_, **__: None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None


def supply_tensors():
    import functools

    import torch

    def in_memory(make):
        @functools.wraps(make)
        def made(*args, **kwargs):
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = torch.device("cpu")
            return make(*args, **kwargs)

        return made

    makers = "tensor zeros ones empty full arange zeros_like ones_like empty_like rand randn randint as_tensor"
    for name in makers.split():
        setattr(torch, name, in_memory(getattr(torch, name)))
    type_of = torch.Tensor.type

    def type_on_cuda(self, *args, **kwargs):
        found = type_of(self, *args, **kwargs)
        return found if args or kwargs else found.replace("torch.", "torch.cuda.")

    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.type = type_on_cuda
    torch.nn.Module.cuda = lambda self, *_: self


def supply_all_to_all():
    import torch.distributed as dist

    all_to_all = dist.all_to_all_single

    def sizes(given):
        return None if given is None else [int(size) for size in given]

    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, **others):
        return all_to_all(output, input, sizes(output_split_sizes), sizes(input_split_sizes), **others)

    dist.all_to_all_single = all_to_all_single


def supply_random(module):
    import contextlib

    tracker = module.CudaRNGStatesTracker
    tracker.fork = lambda self, *_: contextlib.nullcontext()
    tracker.is_initialized = lambda self: True
    tracker.get_states = lambda self: {}
    tracker.set_states = tracker.add = lambda self, *_: None
    module._set_cuda_rng_state = lambda *_, **__: None


sys.meta_path.insert(0, Supplier())
