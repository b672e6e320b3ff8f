"""Expert parallelism: each rank of a group holds some experts, and tokens travel to the experts they chose.

The ranks of a pipeline stage form a second mesh. Dense layers use data x context x tensor; experts use

    rank of the stage = ((expert_replicate * S + expert_shard) * E + expert) * F + expert_tensor

so `expert * expert_tensor` neighbours are a group over which the experts are sharded, and ranks with the same
coordinates in different groups hold copies or shards of the same experts. `expert_tensor` shards the width F of each
expert.

    rows sorted by expert  --all-to-all-->  rows of all ranks  --one permutation-->  each expert's rows together
                                                                                           |  experts
    rows sorted by expert  <--all-to-all--  rows of all ranks  <--the same, back---  rows ----+

Source: GShard (Lepikhin et al. 2020), section 3.2; Megatron-Core (Liu et al. 2025, "MoE parallel folding"), section 3.

M rows of this rank, R rows received, P those and rows of zeros (`fp8.aligned_rows`), D hidden, F expert width,
E experts, G ranks of the group, L experts of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.engines.native.parallel.mesh import PIPELINE, MeshCoordinates, sharded, state_axes
from meshwright.kernels.experts.permutation import permute, unsort
from meshwright.kernels.fp8.aligned_rows import AlignedRows
from meshwright.specs.plan import Plan, Sharding
from meshwright.training.distributed_tensors import is_distributed, own_part
from meshwright.training.models.experts import RoutedExperts

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard

REPLICATE, SHARD, EXPERT, TENSOR = "expert_replicate", "expert_shard", "expert", "expert_tensor"
WIDTH = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1}
"""Number of dimension F of a stack [E, out, in], or of its biases [E, out]."""

MoveRows = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertMesh:
    """The mesh of expert parallelism, and the group over which the experts of this process are sharded."""

    mesh: DeviceMesh
    group: dist.ProcessGroup | None  # None: every rank has all experts
    num_copies: int  # ranks that hold a part of the same expert: expert_tensor

    def state_mesh(self) -> DeviceMesh:
        """The part of the mesh over which states of the same experts are replicated and sharded."""
        return self.mesh[REPLICATE, SHARD] if self.mesh[REPLICATE].size() > 1 else self.mesh[SHARD]

    def shard_dim(self, stack: nn.Parameter) -> Shard | None:
        """The dimension along which FSDP shards a stack; None: FSDP's default.

        Prefer one that no other axis shards, so that a rank holds one slice of the stack, and one that divides
        evenly, so that no rank is without a part.
        """
        from torch.distributed.tensor import Shard

        taken = [p.dim for p in stack.placements if isinstance(p, Shard)] if is_distributed(stack) else []
        shape, num_shards = own_part(stack).shape, self.mesh[SHARD].size()
        dims = sorted(range(len(shape)), key=taken.count)
        return next((Shard(dim) for dim in dims if shape[dim] % num_shards == 0), None)


def expert_axes(plan: Plan) -> tuple[int, int]:
    """(replicas, shards) of the experts' states over the groups. Shards stay within a replica where groups do.

    >>> expert_axes(Plan(data_replicate=2, data_shard=4, tensor=2, expert=4))
    (2, 2)
    """
    if plan.sharding is Sharding.NONE:
        return plan.expert_data, 1
    replicas, shards = state_axes(plan)
    in_replica, width = shards * plan.tensor, plan.expert * plan.expert_tensor
    return (1, plan.expert_data) if in_replica % width else (replicas, in_replica // width)


def expert_mesh(coordinates: MeshCoordinates) -> ExpertMesh | None:
    """The mesh of experts; None where they are sharded like all other layers. All processes call it."""
    plan = coordinates.plan
    if coordinates.mesh is None or plan.expert * plan.expert_tensor * plan.tensor == 1:
        return None
    mesh = init_device_mesh(
        coordinates.device.type,
        (plan.pipeline, *expert_axes(plan), plan.expert, plan.expert_tensor),
        mesh_dim_names=(PIPELINE, REPLICATE, SHARD, EXPERT, TENSOR),
    )
    return ExpertMesh(mesh=mesh, group=coordinates.expert_group(), num_copies=plan.expert_tensor)


def shard_experts(model: nn.Module, *, experts: ExpertMesh) -> None:
    """Keep this rank's experts of every layer of `model`, in place, and dispatch rows to the ranks of their experts."""
    if experts.group is None:
        return
    from torch.distributed.tensor import Replicate, Shard

    mesh = experts.mesh[EXPERT, TENSOR] if experts.num_copies > 1 else experts.mesh[EXPERT]
    for module in experts_of(model):
        for name, stack in list(module.named_parameters()):
            width = Shard(WIDTH[name]) if name in WIDTH else Replicate()
            setattr(module, name, sharded(stack, mesh, *(Shard(0), width)[: mesh.ndim]))
        module.forward = partial(_forward, module, group=experts.group, num_copies=experts.num_copies)
        module.align = _unaligned


def experts_of(module: nn.Module) -> Iterator[RoutedExperts]:
    """The stacks of experts in `module`."""
    return (part for part in module.modules() if isinstance(part, RoutedExperts))


def _unaligned(*_: Tensor) -> None:
    """`RoutedExperts.align` of rows that leave this rank: the ranks that receive them align."""


def _forward(
    module: RoutedExperts,
    rows_MD: Tensor,
    counts_E: Tensor,
    _: AlignedRows | None,
    *,
    group: dist.ProcessGroup,
    num_copies: int,
) -> Tensor:
    """`RoutedExperts.forward` with the experts of all ranks of the group."""
    dispatch, counts_L = plan_dispatch(counts_E, group=group, num_copies=num_copies)
    aligned = RoutedExperts.align(module, dispatch.order_P, counts_L)
    if aligned is not None:
        dispatch = replace(dispatch, order_P=aligned.order_P)
    rows_PD = _Move.apply(rows_MD, dispatch.dispatch, dispatch.combine)
    stacks = {name: own_part(stack) for name, stack in module.named_parameters()}
    rows_PD = module.run(rows_PD, counts_L, aligned, stacks)
    return _Move.apply(rows_PD, dispatch.combine, dispatch.dispatch)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenDispatch:
    """The all-to-all of one layer: rows to and from each rank, and the order of received rows."""

    group: dist.ProcessGroup
    num_copies: int  # ranks that every row goes to
    sent: list[int]  # rows for each rank
    received: list[int]  # rows from each rank
    order_P: Tensor  # sorts received rows by expert; -1 is a row of zeros

    def dispatch(self, rows_MD: Tensor) -> Tensor:
        """[P, D]: rows for the experts of this rank, sorted by expert."""
        if self.num_copies > 1:
            blocks = rows_MD.split(self.sent[:: self.num_copies])
            rows_MD = torch.cat([block for block in blocks for _ in range(self.num_copies)])
        return permute(self._all_to_all(rows_MD, self.sent, self.received), self.order_P, top_k=1)

    def combine(self, rows_PD: Tensor) -> Tensor:
        """[M, D]: each row back on its rank, as the sum of its copies."""
        rows_RD = unsort(rows_PD, self.order_P, num_pairs=sum(self.received))
        rows_MD = self._all_to_all(rows_RD, self.received, self.sent)
        if self.num_copies > 1:
            blocks, num = rows_MD.split(self.sent), self.num_copies
            rows_MD = torch.cat([torch.stack(blocks[i : i + num]).sum(dim=0) for i in range(0, len(blocks), num)])
        return rows_MD

    def _all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out


@torch.no_grad()
def plan_dispatch(counts_E: Tensor, *, group: dist.ProcessGroup, num_copies: int) -> tuple[TokenDispatch, Tensor]:
    """Plan the dispatch of rows sorted by expert, `counts_E[e]` for expert e. Returns rows of local experts [L] too."""
    num_ranks = group.size()
    sent_GL = counts_E.view(num_ranks // num_copies, -1).repeat_interleave(num_copies, dim=0)
    received_GL = torch.empty_like(sent_GL)
    dist.all_to_all_single(received_GL, sent_GL, group=group)
    sent, received = torch.stack([sent_GL.sum(dim=1), received_GL.sum(dim=1)]).tolist()  # waits for the device
    experts_L = torch.arange(sent_GL.shape[1], device=counts_E.device)
    experts_R = experts_L.repeat(num_ranks).repeat_interleave(received_GL.flatten(), output_size=sum(received))
    dispatch = TokenDispatch(
        group=group, num_copies=num_copies, sent=sent, received=received, order_P=experts_R.argsort(stable=True)
    )
    return dispatch, received_GL.sum(dim=0)


class _Move(torch.autograd.Function):
    """Applies `move` to rows, and its transpose to their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, move: MoveRows, transpose: MoveRows) -> Tensor:
        ctx.transpose = transpose
        return move(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grads[0]), None, None
