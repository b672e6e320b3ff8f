"""Muon: momentum, orthogonalized. The update of a matrix needs the whole of it.

    B <- mu B + (1 - mu) G                        momentum, of each value by itself
    U  = (1 - mu) G + mu B   or   B               with or without Nesterov's look-ahead
    O  = Newton-Schulz(U)                         in bf16: singular values near 1
    W <- (1 - lr decay) W - lr s(A, B) O          s: `LearningRateAdjustment`

A stack of experts [E, A, B] is E matrices. Momentum and weights of a sharded matrix (FSDP, ZeRO, tensor
parallelism) stay sharded; U is gathered in bf16, in which Newton-Schulz begins, every rank orthogonalizes all
of U and keeps its shard. Stacks sharded by experts are gathered only over the other ranks with the same
experts.

Orthogonalization and adjustment follow `torch.optim.Muon`, which takes whole matrices only: the steps here
equal its steps bit for bit. Source: Jordan 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv
2502.16982.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import _muon

from meshwright.specs.run import Optimizer as Settings
from meshwright.training.distributed_tensors import is_distributed
from meshwright.training.masters import Master, local_part
from meshwright.training.optimizer_updates import States, copy_states, scale_gradients

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

COEFFICIENTS = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """True of the weights that Muon updates: matrices, and stacks of them, but embedding and head."""
    is_stack_of_biases = name.endswith("_bias")  # of experts
    return parameter.ndim >= 2 and not is_stack_of_biases and not name.startswith(("embedding.", "head."))


@dataclass(frozen=True, kw_only=True, eq=False)
class MomentumBuffer:
    """A master, perhaps an empty shard, and its momentum."""

    master: Master
    momentum: Tensor


class Muon:
    """Muon of the masters of hidden matrices. All ranks that hold shards of a matrix call `step` together."""

    def __init__(self, masters: list[Master], *, settings: Settings) -> None:
        self.settings = settings
        self.buffers = [MomentumBuffer(master=m, momentum=torch.zeros_like(m.local)) for m in masters]

    @torch.no_grad()
    def step(self, *, learning_rate: float, gradient_scale: Tensor | None = None) -> None:
        """See `Update`."""
        s = self.settings
        scale_gradients([buffer.master.local for buffer in self.buffers], gradient_scale)
        for buffer in self.buffers:
            master, local = buffer.master, buffer.master.local
            gradient = local.grad
            if gradient is None:
                if not _is_sharded(master):
                    continue
                gradient = torch.zeros_like(local)  # other ranks wait for this shard
            buffer.momentum.lerp_(gradient, 1 - s.momentum)
            update = gradient.lerp(buffer.momentum, s.momentum) if s.nesterov else buffer.momentum
            update = _orthogonalized(update, master, num_steps=s.newton_schulz_steps)
            adjustment = _muon._adjust_lr(
                learning_rate,
                s.adjust_learning_rate.value,
                master.parameter.shape[-2:],  # ty: ignore[invalid-argument-type]
            )
            local.mul_(1 - learning_rate * s.weight_decay)
            local.add_(update, alpha=-adjustment)

    def stored(self) -> Iterator[tuple[Tensor, States]]:
        """See `Update`. Empty shards have no states to store."""
        for buffer in self.buffers:
            if buffer.momentum.numel():
                yield buffer.master.local, {"momentum_buffer": buffer.momentum}

    def restore(self, states: Mapping[Tensor, States], *, num_steps: int) -> None:
        """See `Update`. Muon counts no steps."""
        for local, own in self.stored():
            copy_states(own, states[local])


def _is_sharded(master: Master) -> bool:
    """True if other ranks hold parts of the same matrices."""
    return is_distributed(master.parameter) and _gathered(master.parameter) != tuple(master.parameter.placements)


def _gathered(parameter: DTensor) -> tuple[Placement, ...]:
    """Placements under which every rank holds whole matrices. Experts of other ranks stay there."""
    from torch.distributed.tensor import Replicate

    is_stack = parameter.ndim > 2
    return tuple(
        p if p.is_replicate() or parameter.device_mesh.size(i) == 1 or (is_stack and p.is_shard(0)) else Replicate()
        for i, p in enumerate(parameter.placements)
    )


def _orthogonalized(update: Tensor, master: Master, *, num_steps: int) -> Tensor:
    """The orthogonalized update of this process's part, in bf16."""
    if not is_distributed(master.parameter) or not _is_sharded(master):
        return _of_matrices(update, num_steps)
    from torch.distributed.tensor import DTensor

    parameter, placements = master.parameter, _gathered(master.parameter)
    sharded = master.like(update.bfloat16())
    assert is_distributed(sharded)
    whole = sharded.redistribute(placements=placements)
    found = DTensor.from_local(
        _of_matrices(local_part(whole), num_steps), parameter.device_mesh, placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
    return local_part(found.redistribute(placements=parameter.placements))


def _of_matrices(update: Tensor, num_steps: int) -> Tensor:
    if update.ndim == 2:
        return _muon._zeropower_via_newtonschulz(update, COEFFICIENTS, num_steps, _muon.EPS)
    return torch.stack([_of_matrices(matrix, num_steps) for matrix in update]) if len(update) else update
