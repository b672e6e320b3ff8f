"""AdamW on fp32 master weights, the learning rate of a step, and clipping by the global norm.

A master is the fp32 tensor that the optimizer updates. It is

    the parameter itself       fp32 without sharded states: one process, or pipeline stages and tensor parallelism only
    a copy of the parameter    bf16 without sharded states: gradients are accumulated in fp32 after each backward pass
    this process's shard       sharded states: FSDP keeps the shard in fp32 and computes in bf16

AdamW runs on the plain local tensors, so that it has no dispatch of distributed tensors and the fused kernel serves
every device. Its states are fp32, or narrower (`optimizer_states`). Source of the update: Loshchilov and Hutter 2019,
algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate
from torch.utils import swap_tensors

from meshwright.specs.run import LearningRateSchedule, StateFormat
from meshwright.specs.run import Optimizer as Settings
from meshwright.training.optimizer_states import NarrowAdamW

STATE_NAMES = ("exp_avg", "exp_avg_sq")

# One kernel for all tensors of a list; `torch.optim` is built on them.
foreach_copy = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
foreach_mul = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]


def learning_rate(settings: Settings, *, step: int, num_steps: int) -> float:
    """The rate of step `step` (0 is the first) of `num_steps`.

    Linear warm-up from peak / warmup_steps to the peak; then by schedule down to peak x final_ratio, which the last
    step has. WSD stays at the peak until the last `decay_ratio` of all steps, at least one, and falls linearly.

    >>> s = Settings(learning_rate=1.0, warmup_steps=2, final_ratio=0.0, schedule=LearningRateSchedule.LINEAR)
    >>> [learning_rate(s, step=i, num_steps=6) for i in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    peak, taken = settings.learning_rate, step + 1
    if taken <= settings.warmup_steps:
        return peak * taken / settings.warmup_steps
    start = settings.warmup_steps
    if settings.schedule is LearningRateSchedule.WSD:
        falling = max(1, round(settings.decay_ratio * num_steps)) if settings.decay_ratio else 0
        start = max(start, num_steps - falling)
    elapsed = min(1.0, max(0.0, (taken - start) / max(1, num_steps - start)))
    if settings.schedule is LearningRateSchedule.CONSTANT:
        fallen = 0.0
    elif settings.schedule is LearningRateSchedule.COSINE:
        fallen = 0.5 * (1 - math.cos(math.pi * elapsed))
    else:
        fallen = elapsed
    return peak * (1 - (1 - settings.final_ratio) * fallen)


@dataclass(frozen=True, kw_only=True, eq=False)
class Master:
    """One trained tensor: the parameter that computes and the local fp32 tensor that the optimizer updates."""

    name: str
    parameter: nn.Parameter
    local: Tensor
    layout: list[Placement] = field(default_factory=list)
    """Placements of the accumulated gradient of a distributed parameter: that of a replicated one may be partial."""

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
        if local is None or not isinstance(p, DTensor):
            return local
        return DTensor.from_local(
            local, p.device_mesh, self.layout, run_check=False, shape=p.shape, stride=p.stride()
        )

    def forget_gradient(self) -> None:
        """Free the accumulated gradient."""
        self.local.grad = self.parameter.grad = None

    def add(self) -> None:
        """Move the gradient of a parameter that computes in a narrow format into the fp32 sum, and free it."""
        gradient = self.parameter.grad
        if gradient is None:
            return
        gradient = distributed_like(gradient, like=self.parameter)
        if isinstance(gradient, DTensor):
            self.layout[:] = gradient.placements
        if self.local.grad is None:
            self.local.grad = local_part(gradient).float()
        else:
            self.local.grad.add_(local_part(gradient))
        self.parameter.grad = None

    @property
    def copied_along(self) -> tuple[str, ...]:
        """Axes of its mesh along which processes hold the same shard."""
        if not isinstance(self.parameter, DTensor):
            return ()
        mesh, placements = self.parameter.device_mesh, self.parameter.placements
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        return tuple(n for n, p in zip(names, placements, strict=True) if isinstance(p, Replicate))

    @property
    def copies(self) -> int:
        """Number of processes of its mesh that hold the same shard."""
        if not isinstance(self.parameter, DTensor):
            return 1
        mesh, placements = self.parameter.device_mesh, self.parameter.placements
        return math.prod(
            mesh.size(i) for i, placement in enumerate(placements) if isinstance(placement, Replicate)
        )

    def like(self, local: Tensor) -> Tensor:
        """`local`, shaped as this process's shard, as the (distributed) tensor that a checkpoint stores."""
        if not isinstance(self.parameter, DTensor):
            return local
        p = self.parameter
        return DTensor.from_local(
            local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )


def masters_of(modules: Iterable[nn.Module], *, compute: torch.dtype) -> list[Master]:
    """The masters of all parameters that are trained, in the order of the modules.

    Parameters come in fp32. FSDP rounds its shards to `compute` as it gathers them; all others are rounded here.
    """
    masters = []
    for module in modules:
        rounded = torch.float32 if isinstance(module, FSDPModule) else compute
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                masters.append(_master(name, parameter, rounded))
    return masters


def _master(name: str, parameter: nn.Parameter, compute: torch.dtype) -> Master:
    assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}"
    master = Master(name=name, parameter=parameter, local=local_part(parameter.detach()))
    if compute != torch.float32:
        rounded = parameter.detach().to(compute)
        if isinstance(parameter, DTensor):  # `data` does not reach the local tensor
            swap_tensors(parameter, nn.Parameter(rounded))
        else:
            parameter.data = rounded
        parameter.register_post_accumulate_grad_hook(lambda _: master.add())
    return master


class Update(Protocol):
    """AdamW's update of some masters, with their optimizer states."""

    def step(self, *, learning_rate: float) -> None:
        """Update every tensor that has a gradient."""
        ...

    def stored(self) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        """Every tensor with its first and second state, as a checkpoint stores them."""
        ...

    def restore(self, states: Mapping[Tensor, tuple[Tensor, Tensor]], *, num_steps: int) -> None:
        """Continue from `states` (by tensor) after `num_steps` steps."""
        ...


class FusedAdamW:
    """AdamW with states in fp32: PyTorch's own, one kernel for all tensors."""

    def __init__(self, tensors: list[Tensor], *, settings: Settings, weight_decay: float) -> None:
        self.tensors = tensors
        self.adamw = torch.optim.AdamW(
            tensors,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=weight_decay,
            fused=True,
        )

    def step(self, *, learning_rate: float) -> None:
        """See `Update`."""
        self.adamw.param_groups[0]["lr"] = learning_rate
        self.adamw.step()

    def stored(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """See `Update`. The live states, created here before the first step."""
        for tensor in self.tensors:
            if not self.adamw.state[tensor]:
                self.adamw.state[tensor] = {
                    "step": torch.zeros((), dtype=torch.float32, device=tensor.device)
                } | {name: torch.zeros_like(tensor) for name in STATE_NAMES}
            first, second = (self.adamw.state[tensor][name] for name in STATE_NAMES)
            yield tensor, first, second

    def restore(self, states: Mapping[Tensor, tuple[Tensor, Tensor]], *, num_steps: int) -> None:
        """See `Update`."""
        for tensor, *own in self.stored():
            self.adamw.state[tensor]["step"].fill_(num_steps)
            foreach_copy(own, list(states[tensor]))


class AdamW:
    """The optimizer of this process's masters. `is_single_process`: no other process holds parts of the model.

    `after_update` is called whenever masters have changed, to refresh other copies of them.
    """

    def __init__(
        self,
        masters: list[Master],
        *,
        settings: Settings,
        is_single_process: bool,
        seed: int = 0,
        after_update: Callable[[], None] | None = None,
    ) -> None:
        self.masters = [m for m in masters if m.local.numel()]  # a small tensor leaves some shards empty
        self.settings = settings
        self.is_single_process = is_single_process
        self.after_update = after_update
        self.updates = list(_updates(self.masters, settings=settings, seed=seed))

    def step(self, *, learning_rate: float, accepts: Callable[[float], bool] = math.isfinite) -> float:
        """Clip, update the masters, refresh the parameters, free the gradients. Returns the norm before clipping.

        Where `accepts` refuses the norm nothing is updated.
        """
        self._take_gradients()
        norm = self._clip()
        if accepts(norm):
            for update in self.updates:
                update.step(learning_rate=learning_rate)
            self.refresh()
        for master in self.masters:
            master.forget_gradient()
        return norm

    def refresh(self) -> None:
        """Round the masters into the parameters that compute."""
        copies = [m for m in self.masters if m.is_copy]
        if copies:
            foreach_copy([local_part(m.parameter.detach()) for m in copies], [m.local for m in copies])
        if self.after_update is not None:
            self.after_update()

    def _take_gradients(self) -> None:
        in_parts: dict[DeviceMesh, list[Tensor]] = {}
        for master in self.masters:
            gradient = master.gradient
            if gradient is None:
                master.local.grad = None
                continue
            master.local.grad = local_part(gradient)
            if isinstance(gradient, DTensor) and is_partial(gradient):
                in_parts.setdefault(gradient.device_mesh, []).append(master.local.grad)
        for mesh, sums in in_parts.items():
            _all_reduce(sums, group=mesh.get_group())

    def _clip(self) -> float:
        """The norm of all gradients of all processes; scales them down to `gradient_clip` if it is larger."""
        gradients = [m.local.grad for m in self.masters if m.local.grad is not None]
        copies = [m.copies for m in self.masters if m.local.grad is not None]
        device = gradients[0].device if gradients else torch.device("cpu")
        squares = torch.zeros((), dtype=torch.float32, device=device)
        if gradients:
            norms = torch.stack(foreach_norm(gradients)).float()
            squares = (norms.square() / torch.tensor(copies, device=device)).sum()
        if not self.is_single_process:
            dist.all_reduce(squares)
        norm = squares.sqrt().item()
        limit = self.settings.gradient_clip
        if limit is not None and norm > limit:
            foreach_mul(gradients, limit / (norm + 1e-6))
        return norm

    def state(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint, by name: `weights.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`.

        Weights are the live ones. The others may be copies: after loading into them, call `restore`.
        """
        names = {m.local: m for m in self.masters}
        state = {f"weights.{m.name}": m.like(m.local) for m in self.masters}
        for update in self.updates:
            for local, *states in update.stored():
                master = names[local]
                for name, tensor in zip(STATE_NAMES, states, strict=True):
                    state[f"{name}.{master.name}"] = master.like(tensor)
        return state

    def restore(self, state: Mapping[str, Tensor], *, step: int) -> None:
        """Continue from a loaded `state` after `step` steps."""
        states = {m.local: _pair(*(state[f"{name}.{m.name}"] for name in STATE_NAMES)) for m in self.masters}
        for update in self.updates:
            update.restore(states, num_steps=step)
        self.refresh()


def _pair(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return local_part(first), local_part(second)


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of `tensor`, after its collective has completed."""
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return here.wait() if isinstance(here, AsyncCollectiveTensor) else here


def is_partial(gradient: Tensor) -> bool:
    """Return True if each process of a mesh has the sum over its own tokens or heads only."""
    return isinstance(gradient, DTensor) and gradient.placements == (Partial(),)


def distributed_like(gradient: Tensor, *, like: Tensor) -> Tensor:
    """`gradient` distributed like its parameter. That of a replicated parameter may stay partial: it is reduced once a
    step."""
    if not isinstance(gradient, DTensor) or not isinstance(like, DTensor):
        return gradient
    if is_partial(gradient) and like.placements == (Replicate(),):
        return gradient
    return gradient.redistribute(placements=like.placements)


def _all_reduce(sums: list[Tensor], *, group: dist.ProcessGroup) -> None:
    """All-reduce all tensors in one collective."""
    whole = torch.cat([s.flatten() for s in sums])
    dist.all_reduce(whole, group=group)
    parts = whole.split([s.numel() for s in sums])
    foreach_copy(sums, [part.view_as(s) for part, s in zip(parts, sums, strict=True)])


def _updates(masters: list[Master], *, settings: Settings, seed: int) -> Iterator[Update]:
    """Group masters: matrices have weight decay, vectors do not. Masters with copies on the same processes share a flat
    space of narrow states, so that all copies are rounded with the same noise."""
    groups: dict[tuple[bool, tuple[str, ...]], list[Tensor]] = {}
    for m in masters:
        along = () if settings.states is StateFormat.FP32 else m.copied_along
        groups.setdefault((m.parameter.ndim > 1, along), []).append(m.local)
    for (is_matrix, _), tensors in groups.items():
        decay = settings.weight_decay if is_matrix else 0.0
        if settings.states is StateFormat.FP32:
            yield FusedAdamW(tensors, settings=settings, weight_decay=decay)
        else:
            yield NarrowAdamW(tensors, settings=settings, weight_decay=decay, seed=seed)
