"""The device mesh of a plan, and the coordinates of a process in it.

Axes from the outside in: pipeline, data_replicate, data_shard, context, tensor. Ranks along the last axis communicate
most, so they are neighbours (on the same node under every launcher).

    rank = (((pipeline * R + data_replicate) * S + data_shard) * C + context) * T + tensor

Context ranks hold the same parameters and different tokens, as data ranks do. So states are sharded over data_shard x
context together, and the mesh has one axis for both; `data_rank` and `context_rank` are the coordinates along it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.cost.pipeline.schedules import SCHEDULE_RECORDS, Placement
from meshwright.specs.plan import Plan, Sharding

if TYPE_CHECKING:
    from torch.distributed.tensor import placement_types as tensors

PIPELINE, REPLICATE, SHARD, TENSOR = "pipeline", "replicate", "shard", "tensor"


@dataclass(frozen=True, kw_only=True)
class MeshCoordinates:
    """Coordinates of this process in the mesh. `mesh` is None for a single process: nothing is wrapped or sent then."""

    plan: Plan
    device: torch.device
    rank: int = 0
    num_ranks: int = 1
    mesh: DeviceMesh | None = None
    pipeline_rank: int = 0
    data_rank: int = 0  # index of its part of the global batch
    context_rank: int = 0  # index of its part of every sequence
    tensor_rank: int = 0

    @property
    def is_main(self) -> bool:
        """True for the process that writes logs and records."""
        return self.rank == 0

    @property
    def is_first_stage(self) -> bool:
        """True if this process holds the first stage, with the embedding."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this process holds the last stage, with the loss."""
        return self.pipeline_rank == last_pipeline_rank(self.plan)

    @property
    def num_copies(self) -> int:
        """Processes that see the same tokens."""
        return self.num_ranks // (self.plan.data * self.plan.context)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Run the context once all processes have come to it, and go on once it is behind all of them."""
        if self.num_ranks > 1:
            dist.barrier()
        yield
        if self.num_ranks > 1:
            dist.barrier()

    @cached_property
    def context_mesh(self) -> DeviceMesh | None:
        """The processes that hold the other parts of this one's sequences; None when it holds them whole.

        Created at the first access, which is collective.
        """
        if self.plan.context == 1:
            return None
        group = self._group(self._ranks().transpose(3, 4).flatten(0, 3))
        assert group is not None  # a plan with context ranks has a mesh
        return DeviceMesh.from_group(group, self.device.type)

    def sequence_group(self) -> dist.ProcessGroup | None:
        """The processes that hold parts of the same sequences: context and tensor ranks."""
        width = self.plan.context * self.plan.tensor
        return None if width == 1 else self._group(torch.arange(self.num_ranks).view(-1, width))

    def data_group(self) -> dist.ProcessGroup | None:
        """The processes that hold the same parts of the model and of other sequences."""
        members = self._ranks().flatten(1, 2).movedim(1, 3).flatten(0, 2)
        return None if self.plan.data == 1 else self._group(members)

    def stage_group(self) -> dist.ProcessGroup | None:
        """The processes that hold the same layers, or shards of them."""
        return self._group(torch.arange(self.num_ranks).view(self.plan.pipeline, -1))

    def expert_group(self) -> dist.ProcessGroup | None:
        """The neighbours that shard the experts of a layer; None when every rank has all of them."""
        width = self.plan.expert * self.plan.expert_tensor
        return None if width == 1 else self._group(torch.arange(self.num_ranks).view(-1, width))

    def _ranks(self) -> torch.Tensor:
        """Ranks of all processes by pipeline, data_replicate, data_shard, context, tensor."""
        p = self.plan
        return torch.arange(self.num_ranks).view(p.pipeline, p.data_replicate, p.data_shard, p.context, p.tensor)

    def _group(self, members_GN: torch.Tensor) -> dist.ProcessGroup | None:
        """The group of this process among G groups of N; all processes create all of them."""
        if self.mesh is None:
            return None
        group, _ = dist.new_subgroups_by_enumeration(members_GN.tolist())
        assert isinstance(group, dist.ProcessGroup)
        return group

    def axes(self, *names: str) -> DeviceMesh:
        """The part of the mesh along these axes."""
        assert self.mesh is not None
        return self.mesh[names]


def last_pipeline_rank(plan: Plan) -> int:
    """Return the pipeline rank with the last stage: the first rank in a V schedule."""
    return 0 if SCHEDULE_RECORDS[plan.schedule].placement is Placement.V else plan.pipeline - 1


def state_axes(plan: Plan) -> tuple[int, int]:
    """(replicas, shards) of the states over data and context ranks. Without sharding all of them are replicas.

    The cost model counts the same (`cost.memory.states`).
    """
    if plan.sharding is Sharding.NONE:
        return plan.data * plan.context, 1
    return plan.data_replicate, plan.data_shard * plan.context


def mesh_coordinates(*, plan: Plan, device: torch.device, rank: int, num_ranks: int) -> MeshCoordinates:
    """Coordinates of process `rank` of `num_ranks`. With more than one, the process group must exist."""
    assert num_ranks == plan.num_devices, f"{num_ranks} processes for a plan of {plan.num_devices}"
    if num_ranks == 1:
        return MeshCoordinates(plan=plan, device=device)
    replicas, shards = state_axes(plan)
    mesh = init_device_mesh(
        device.type, (plan.pipeline, replicas, shards, plan.tensor), mesh_dim_names=(PIPELINE, REPLICATE, SHARD, TENSOR)
    )
    tokens_rank = mesh.get_local_rank(REPLICATE) * shards + mesh.get_local_rank(SHARD)
    return MeshCoordinates(
        plan=plan,
        device=device,
        rank=rank,
        num_ranks=num_ranks,
        mesh=mesh,
        pipeline_rank=mesh.get_local_rank(PIPELINE),
        data_rank=tokens_rank // plan.context,
        context_rank=tokens_rank % plan.context,
        tensor_rank=mesh.get_local_rank(TENSOR),
    )


def sharded(parameter: Tensor, mesh: DeviceMesh, *placements: tensors.Placement) -> nn.Parameter:
    """Return this rank's part of a parameter of which every rank has the whole, distributed."""
    from torch.distributed.tensor import distribute_tensor

    part = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
