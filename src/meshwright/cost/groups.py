"""Every communicator a rank takes part in, laid out on the cluster.

Ranks run tensor, context, data, pipeline, innermost first; expert layers fold over the first three:
expert_tensor, expert, expert_data. So tensor parallelism stays inside a node when it fits, and pipeline
neighbours are furthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.collectives import Group, Network, group
from meshwright.cost.tables import PlanTable


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Communicators by what they carry."""

    tensor: Group
    context: Group
    expert: Group
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
    return Groups(
        tensor=group(size=t, stride=1, net=net),
        context=group(size=c, stride=t, net=net),
        expert=group(size=plan.expert, stride=plan.expert_tensor, net=net),
        shard=group(size=plan.data_shard * c, stride=t, net=net),
        replicate=group(size=plan.data_replicate, stride=t * c * plan.data_shard, net=net),
        whole=group(size=plan.data * c, stride=t, net=net),
        expert_shard=group(
            size=np.maximum(expert_data // np.maximum(plan.data_replicate, 1), 1),
            stride=expert_width,
            net=net,
        ),
        expert_whole=group(size=expert_data, stride=expert_width, net=net),
        neighbours=group(size=plan.pipeline, stride=t * c * plan.data, net=net),
    )
