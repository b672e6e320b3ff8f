"""Every communicator a rank takes part in, laid out on the cluster.

Ranks run tensor, context, data, pipeline, innermost first; expert layers fold over the first three:
expert_tensor, expert, expert_data. So tensor parallelism stays inside a node when it fits, and pipeline
neighbours are furthest apart. A plan may have data outside of the pipeline instead (`AxisOrder`): neighbours of a
pipeline are then near, and data-parallel ranks t c p devices apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.collectives import Group, Network, group
from meshwright.cost.tables import PlanTable


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Communicators by their traffic."""

    tensor: Group
    context: Group
    expert: Group
    expert_tensor: Group
    expert_parts: Group  # both together: all ranks that hold parts of different experts or the same
    shard: Group  # over which dense parameters or optimizer states are sharded: data_shard x context
    replicate: Group  # copies of those shards
    whole: Group  # both together: every rank with the same dense parameters
    expert_shard: Group
    expert_whole: Group
    neighbours: Group  # pipeline


def groups_of(plan: PlanTable, net: Network) -> Groups:
    """The groups of every plan on one network, or on one network per plan."""
    t, c = plan.tensor, plan.context
    expert_width = plan.expert * plan.expert_tensor
    expert_data = np.maximum(plan.expert_data, 1)
    inside = np.where(plan.data_outermost, plan.pipeline, 1)  # stages between data-parallel ranks
    far = t * c * inside  # devices between data-parallel ranks

    def over_data(size: Array) -> Group:
        """Data and context ranks together."""
        if not np.any(plan.data_outermost):
            return group(size=size, stride=t, net=net)
        # Blocks of all context ranks; where data lies inside, all of them are one block.
        block = np.where(plan.data_outermost, c, size)
        return group(
            size=size,
            stride=t,
            net=net,
            block=block,
            block_stride=np.where(plan.data_outermost, far, np.maximum(t, net.domain)),
        )

    return Groups(
        tensor=group(size=t, stride=1, net=net),
        context=group(size=c, stride=t, net=net),
        expert=group(size=plan.expert, stride=plan.expert_tensor, net=net),
        expert_tensor=group(size=plan.expert_tensor, stride=1, net=net),
        expert_parts=group(size=expert_width, stride=1, net=net),
        shard=over_data(plan.data_shard * c),
        replicate=group(size=plan.data_replicate, stride=far * plan.data_shard, net=net),
        whole=over_data(plan.data * c),
        expert_shard=group(
            size=np.maximum(expert_data // np.maximum(plan.data_replicate, 1), 1), stride=expert_width * inside, net=net
        ),
        expert_whole=group(size=expert_data, stride=expert_width * inside, net=net),
        neighbours=group(size=plan.pipeline, stride=np.where(plan.data_outermost, t * c, t * c * plan.data), net=net),
    )
