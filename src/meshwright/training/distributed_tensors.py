"""Tensors that are spread over processes, told apart without importing `torch.distributed.tensor`.

That import takes half as long as PyTorch's own, most of it SymPy, and a process that shards nothing has no such tensor.
What makes them imports it where it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_distributed(tensor: Tensor) -> TypeIs[DTensor]:
    """Return True for a tensor with a mesh and placements."""
    return hasattr(tensor, "device_mesh")


def is_fsdp(module: object) -> TypeIs[FSDPModule]:
    """Return True for a module that `fully_shard` was applied to."""
    return hasattr(module, "set_requires_gradient_sync")


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's part, a plain tensor."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor. All processes of its mesh call it."""
    return tensor.full_tensor() if is_distributed(tensor) else tensor
