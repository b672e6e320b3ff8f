"""The device mesh of a plan: which axis a process stands on, and where.

Axes from the outside in: pipeline, data_replicate, data_shard, tensor. Neighbours in the last axis talk most, so
they get neighbouring ranks (the same node under every launcher).

    rank = ((pipeline * R + data_replicate) * S + data_shard) * T + tensor
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.specs.plan import Plan, Sharding

PIPELINE, REPLICATE, SHARD, TENSOR = "pipeline", "data_replicate", "data_shard", "tensor"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process stands. `mesh` is None when it is alone: then nothing is wrapped and nothing is sent."""

    plan: Plan
    device: torch.device
    rank: int = 0
    num_ranks: int = 1
    mesh: DeviceMesh | None = None
    pipeline_rank: int = 0
    data_rank: int = 0  # which part of the global batch it reads
    tensor_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process reports."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this process holds the end of the model, where the loss is."""
        return self.pipeline_rank == self.plan.pipeline - 1

    @property
    def num_copies(self) -> int:
        """Processes that read the same part of the batch."""
        return self.num_ranks // self.plan.data

    def data_group(self) -> dist.ProcessGroup | None:
        """The processes that differ from this one only in the data they read; None when it is alone."""
        if self.mesh is None:
            return None
        along = (self.pipeline_rank, slice(None), slice(None), self.tensor_rank)
        ranks_by_group = self.mesh.mesh.permute(0, 3, 1, 2).flatten(2).flatten(0, 1).tolist()
        mine = self.mesh.mesh[along].flatten().tolist()
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in ranks_by_group}  # all make all of them
        group = groups[tuple(mine)]
        assert isinstance(group, dist.ProcessGroup)
        return group

    def axes(self, *names: str) -> DeviceMesh:
        """The part of the mesh along these axes."""
        assert self.mesh is not None
        return self.mesh[names]


def data_axes(plan: Plan) -> tuple[int, int]:
    """(replicas, shards) of the states over data-parallel ranks. Without sharding all of them are replicas."""
    if plan.sharding is Sharding.NONE:
        return plan.data, 1
    return plan.data_replicate, plan.data_shard


def place_process(*, plan: Plan, device: torch.device, rank: int, num_ranks: int) -> Place:
    """Where process `rank` of `num_ranks` stands. The process group exists when there is more than one."""
    assert num_ranks == plan.num_devices, f"{num_ranks} processes for a plan of {plan.num_devices}"
    if num_ranks == 1:
        return Place(plan=plan, device=device)
    replicas, shards = data_axes(plan)
    mesh = init_device_mesh(
        device.type,
        (plan.pipeline, replicas, shards, plan.tensor),
        mesh_dim_names=(PIPELINE, REPLICATE, SHARD, TENSOR),
    )
    return Place(
        plan=plan,
        device=device,
        rank=rank,
        num_ranks=num_ranks,
        mesh=mesh,
        pipeline_rank=mesh.get_local_rank(PIPELINE),
        data_rank=mesh.get_local_rank(REPLICATE) * shards + mesh.get_local_rank(SHARD),
        tensor_rank=mesh.get_local_rank(TENSOR),
    )
