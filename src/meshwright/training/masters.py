"""Master weights: the fp32 tensors that an optimizer updates.

A master is

    the parameter itself       fp32 without sharded states: one process, or pipeline stages and tensor parallelism only
    a copy of the parameter    bf16 without sharded states: gradients are accumulated in fp32 after each backward pass
    this process's shard       sharded states: FSDP keeps the shard in fp32 and computes in bf16

A copy may lie in host memory. In its place is then a tensor of its shape, of 4 bytes, that carries the gradient.

Optimizers run on the plain local tensors, so that they have no dispatch of distributed tensors and fused kernels serve
every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils import swap_tensors

from meshwright.training.distributed_tensors import is_distributed, is_fsdp, own_part
from meshwright.training.host_memory import host_zeros

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, kw_only=True, eq=False)
class Master:
    """One trained tensor: the parameter that computes and the local fp32 tensor that the optimizer updates."""

    name: str
    parameter: nn.Parameter
    local: Tensor
    host: Tensor | None = None
    """The values, where they lie in host memory: `local` then has none, and carries the gradient."""
    layout: list[Placement] = field(default_factory=list)
    """Placements of a distributed parameter's accumulated gradient. A replicated parameter may have a partial one."""

    @property
    def values(self) -> Tensor:
        """The live values: in host memory, or on the device."""
        return self.local if self.host is None else self.host

    @property
    def is_matrix(self) -> bool:
        """True for matrices, which have weight decay; False for vectors and the biases of a stack of experts."""
        return self.parameter.ndim > 1 and not self.name.endswith("_bias")

    @property
    def is_copy(self) -> bool:
        """True if the parameter must be refreshed from the master after a step."""
        return self.local.dtype != self.parameter.dtype

    @property
    def gradient(self) -> Tensor | None:
        """The gradient accumulated so far, distributed as the parameter is, perhaps as a partial sum."""
        if not self.is_copy:
            if self.parameter.grad is not None:
                self.parameter.grad = distributed_like(self.parameter.grad, like=self.parameter)
            return self.parameter.grad
        self.add()  # passes of the weights alone call no hook
        local, p = self.local.grad, self.parameter
        if local is None or not is_distributed(p):
            return local
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, p.device_mesh, self.layout, run_check=False, shape=p.shape, stride=p.stride())

    def forget_gradient(self) -> None:
        """Free the accumulated gradient."""
        self.local.grad = self.parameter.grad = None

    def add(self) -> None:
        """Move the gradient of a parameter that computes in a narrow format into the fp32 sum, and free it."""
        gradient = self.parameter.grad
        if gradient is None:
            return
        gradient = distributed_like(gradient, like=self.parameter)
        if is_distributed(gradient):
            self.layout[:] = gradient.placements
        if self.local.grad is None:
            self.local.grad = local_part(gradient).float()
        else:
            self.local.grad.add_(local_part(gradient))
        self.parameter.grad = None

    @property
    def copied_along(self) -> tuple[str, ...]:
        """Axes of its mesh along which processes hold the same shard."""
        if not is_distributed(self.parameter):
            return ()
        mesh, placements = self.parameter.device_mesh, self.parameter.placements
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        return tuple(n for n, p in zip(names, placements, strict=True) if p.is_replicate())

    @property
    def copies(self) -> int:
        """Number of processes of its mesh that hold the same shard."""
        if not is_distributed(self.parameter):
            return 1
        mesh, placements = self.parameter.device_mesh, self.parameter.placements
        return math.prod(mesh.size(i) for i, placement in enumerate(placements) if placement.is_replicate())

    def like(self, local: Tensor) -> Tensor:
        """`local`, shaped as this process's shard, as the (distributed) tensor that a checkpoint stores."""
        return distributed(local, like=self.parameter)


def masters_of(modules: Iterable[nn.Module], *, compute: torch.dtype, on_host: bool = False) -> list[Master]:
    """The masters of all parameters that are trained, in the order of the modules.

    Parameters come in fp32. FSDP rounds its shards to `compute` as it gathers them; all others are rounded here, and
    the copies are kept in host memory if `on_host`.
    """
    masters = []
    for module in modules:
        rounded = torch.float32 if is_fsdp(module) else compute
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                masters.append(_master(name, parameter, rounded, on_host=on_host))
    return masters


def _master(name: str, parameter: nn.Parameter, compute: torch.dtype, *, on_host: bool) -> Master:
    assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}"
    local, host = local_part(parameter.detach()), None
    if on_host and compute != torch.float32:
        host = host_zeros(local.numel(), dtype=local.dtype, device=local.device).view(local.shape).copy_(local)
        local = local.new_full((), math.nan).expand(local.shape)
    master = Master(name=name, parameter=parameter, local=local, host=host)
    if compute != torch.float32:
        rounded = parameter.detach().to(compute)
        if is_distributed(parameter):  # `data` does not reach the local tensor
            swap_tensors(parameter, nn.Parameter(rounded))
        else:
            parameter.data = rounded
        parameter.register_post_accumulate_grad_hook(_adding(ref(master)))
    return master


def _adding(reference: ref[Master]) -> Callable[[Tensor], None]:
    """The hook of a parameter that its master accumulates.

    Autograd holds the hook where the garbage collector does not look. A strong reference to the master, which
    holds the parameter, would keep both forever.
    """

    def add(_: Tensor) -> None:
        master = reference()
        if master is not None:
            master.add()

    return add


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of `tensor`, after its collective has completed."""
    here = own_part(tensor)
    return here.wait() if isinstance(here, AsyncCollectiveTensor) else here


def distributed(local: Tensor, *, like: Tensor) -> Tensor:
    """Return `local` as the shard of a tensor that is distributed as `like`, if that is.

    `local` may lie in host memory: `DTensor.from_local` would copy it to the device of the mesh.
    """
    if not is_distributed(like):
        return local
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    meta = TensorMeta(shape=like.shape, stride=like.stride(), dtype=local.dtype)
    return DTensor(local, replace(like._spec, tensor_meta=meta), requires_grad=False)


def is_partial(gradient: Tensor) -> bool:
    """Return True if each process of a mesh has the sum over its own tokens or heads only."""
    return is_distributed(gradient) and [p.is_partial("sum") for p in gradient.placements] == [True]


def distributed_like(gradient: Tensor, *, like: Tensor) -> Tensor:
    """Distribute `gradient` like its parameter. The gradient of a replicated parameter may stay partial:
    it is reduced once a step."""
    if not is_distributed(gradient) or not is_distributed(like):
        return gradient
    if is_partial(gradient) and [p.is_replicate() for p in like.placements] == [True]:
        return gradient
    return gradient.redistribute(placements=like.placements)
