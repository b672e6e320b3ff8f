"""Expert parallelism: each rank of a group holds some experts, and tokens travel to the experts they chose.

The ranks of a pipeline stage are looked at a second time. Dense layers see data x context x tensor; experts see

    rank of the stage = ((expert_replicate * S + expert_shard) * E + expert) * F + expert_tensor

so `expert * expert_tensor` neighbours make a group that shares out the experts, and the ranks at the same place of
different groups hold copies or shards of the same ones. `expert_tensor` cuts the width F of each expert.

    rows sorted by expert  --all-to-all-->  rows of all ranks  --one permutation-->  each expert's rows together
                                                                                           |  experts
    rows sorted by expert  <--all-to-all--  rows of all ranks  <--the same, back---  rows ----+

Nothing is dropped and nothing padded: counts are exchanged first, and rows in uneven portions. A layer waits for the
device once, for the number of rows from and to each rank (2 numbers a rank). The way back is the transpose of the way
there, so each is the other's backward pass. With `expert_tensor` a row goes to every rank that holds a part of its
expert, and the partial sums that come back are added.

Every rank of a stage must hold different tokens (with tensor parallelism: sequence parallelism). Gradients of experts
are then sums over all tokens of a group already, and are only added over groups.

Source: GShard (Lepikhin et al. 2020), section 3.2; Megatron-Core (Liu et al. 2025, "MoE parallel folding"), section 3.

M rows of this rank, R rows received, D hidden, F expert width, E experts, G ranks of the group, L experts of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright.engines.native.parallel.mesh import PIPELINE, MeshCoordinates, state_axes
from meshwright.specs.plan import Plan, Sharding
from meshwright.training.models.experts import RoutedExperts, run_experts, unsort

REPLICATE, SHARD, EXPERT, TENSOR = "expert_replicate", "expert_shard", "expert", "expert_tensor"
WIDTH = {"gate": Shard(1), "up": Shard(1), "down": Shard(2)}
"""Where a stack [E, out, in] has its F."""

Way = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertMesh:
    """The ranks as experts see them: their mesh, and the group that shares out the experts of this process."""

    mesh: DeviceMesh
    group: dist.ProcessGroup | None  # None: every rank has all experts
    num_copies: int  # ranks that hold a part of the same expert: expert_tensor

    def state_mesh(self) -> DeviceMesh:
        """The part of the mesh over which states of the same experts are copied and sharded."""
        return self.mesh[REPLICATE, SHARD] if self.mesh[REPLICATE].size() > 1 else self.mesh[SHARD]

    def shard_dim(self, stack: nn.Parameter) -> Shard | None:
        """Along which dimension FSDP divides a stack; None: as it likes.

        One that no other axis divides, so that what a rank holds is one slice of the stack; and one that divides
        evenly, so that no rank is without a part.
        """
        divided = (
            [p.dim for p in stack.placements if isinstance(p, Shard)] if isinstance(stack, DTensor) else []
        )
        shape, num_shards = _local(stack).shape, self.mesh[SHARD].size()
        dims = sorted(range(len(shape)), key=divided.count)
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
    """How experts see the ranks; None where they are divided like all other layers. All processes call it."""
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
    """Leave this rank its experts of every layer of `model`, in place, and send rows to where their experts are."""
    if experts.group is None:
        return
    mesh = experts.mesh[EXPERT, TENSOR] if experts.num_copies > 1 else experts.mesh[EXPERT]
    for module in experts_of(model):
        for name, stack in list(module.named_parameters()):
            placements = [Shard(0), WIDTH[name]][: mesh.ndim]
            divided = distribute_tensor(stack.detach(), mesh, placements, src_data_rank=None)
            setattr(module, name, nn.Parameter(divided, requires_grad=stack.requires_grad))
        module.forward = partial(_forward, module, group=experts.group, num_copies=experts.num_copies)


def experts_of(module: nn.Module) -> Iterator[RoutedExperts]:
    """The stacks of experts in `module`."""
    return (part for part in module.modules() if isinstance(part, RoutedExperts))


def _forward(
    module: RoutedExperts, rows_MD: Tensor, counts_E: Tensor, *, group: dist.ProcessGroup, num_copies: int
) -> Tensor:
    """What `RoutedExperts.forward` gives, with the experts of all ranks of the group."""
    route, counts_L = plan_dispatch(counts_E, group=group, num_copies=num_copies)
    rows_RD = _Travel.apply(rows_MD, route.there, route.back)
    stacks = {name: _local(stack) for name, stack in module.named_parameters()}
    rows_RD = run_experts(rows_RD, counts_L, **stacks, activation=module.activation)
    return _Travel.apply(rows_RD, route.back, route.there)


def _local(stack: Tensor) -> Tensor:
    return stack.to_local() if isinstance(stack, DTensor) else stack


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenDispatch:
    """Which rows go where."""

    group: dist.ProcessGroup
    num_copies: int  # ranks that every row goes to
    sent: list[int]  # rows for each rank
    received: list[int]  # rows from each rank
    order_R: Tensor  # brings received rows together by expert

    def there(self, rows_MD: Tensor) -> Tensor:
        """[R, D]: rows for the experts of this rank, sorted by expert."""
        if self.num_copies > 1:
            blocks = rows_MD.split(self.sent[:: self.num_copies])
            rows_MD = torch.cat([block for block in blocks for _ in range(self.num_copies)])
        return self._exchange(rows_MD, self.sent, self.received)[self.order_R]

    def back(self, rows_RD: Tensor) -> Tensor:
        """[M, D]: each row where it came from; the sum of its copies."""
        rows_MD = self._exchange(unsort(rows_RD, self.order_R), self.received, self.sent)
        if self.num_copies > 1:
            blocks, num = rows_MD.split(self.sent), self.num_copies
            rows_MD = torch.cat(
                [torch.stack(blocks[i : i + num]).sum(dim=0) for i in range(0, len(blocks), num)]
            )
        return rows_MD

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out


@torch.no_grad()
def plan_dispatch(
    counts_E: Tensor, *, group: dist.ProcessGroup, num_copies: int
) -> tuple[TokenDispatch, Tensor]:
    """The route of rows sorted by expert, `counts_E[e]` of them for expert e; and the rows of each local expert [L]."""
    num_ranks = group.size()
    sent_GL = counts_E.view(num_ranks // num_copies, -1).repeat_interleave(num_copies, dim=0)
    received_GL = torch.empty_like(sent_GL)
    dist.all_to_all_single(received_GL, sent_GL, group=group)
    sent, received = torch.stack(
        [sent_GL.sum(dim=1), received_GL.sum(dim=1)]
    ).tolist()  # waits for the device
    experts_L = torch.arange(sent_GL.shape[1], device=counts_E.device)
    experts_R = experts_L.repeat(num_ranks).repeat_interleave(
        received_GL.flatten(), output_size=sum(received)
    )
    route = TokenDispatch(
        group=group,
        num_copies=num_copies,
        sent=sent,
        received=received,
        order_R=experts_R.argsort(stable=True),
    )
    return route, received_GL.sum(dim=0)


class _Travel(torch.autograd.Function):
    """Rows go one `way`, and their gradients the `opposite` one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way, opposite: Way) -> Tensor:
        ctx.opposite = opposite
        return way(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.opposite(grads[0]), None, None
