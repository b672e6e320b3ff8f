"""The device of the encoder."""

from __future__ import annotations

import torch

from meshwright.errors import MissingDependencyError


def named_device(name: str) -> torch.device:
    """The device called `cpu` or `cuda`. Raises MissingDependencyError if it is absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise MissingDependencyError(
            "--device cuda: PyTorch finds no GPU here", hint="a GPU, its driver and a build of PyTorch for it"
        )
    return torch.device(name)


def cpu_threads() -> int:
    """Threads that PyTorch uses on the CPU."""
    return torch.get_num_threads()
