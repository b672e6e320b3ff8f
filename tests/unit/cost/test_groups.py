"""Position of the communicators of a plan on the cluster."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from meshwright.catalog import lookup as catalog
from meshwright.cost.collectives import Network, constants_for, network_row
from meshwright.cost.groups import Groups, groups_of
from meshwright.cost.tables import PlanTable, plan_row
from meshwright.specs.plan import AxisOrder, Plan


def network(name: str) -> Network:
    cluster = catalog.cluster(name)
    return network_row(cluster.fabric, constants_for(cluster.fabric), devices_per_node=cluster.devices_per_node)


def groups(cluster: str, **plan: Any) -> Groups:
    return groups_of(plan_row(Plan(**plan)), network(cluster))


def spans(group) -> tuple[float, float]:
    """(ranks in each domain, domains)."""
    return float(group.inner), float(group.outer)


@pytest.mark.parametrize(
    ("plan", "name", "expected"),
    [
        ({"tensor": 8, "data_shard": 8}, "tensor", (8, 1)),
        ({"tensor": 8, "data_shard": 8}, "shard", (1, 8)),  # one rank of each node
        ({"tensor": 2, "data_shard": 32}, "shard", (4, 8)),
        ({"tensor": 2, "context": 4, "data_shard": 8}, "context", (4, 1)),
        ({"tensor": 2, "context": 4, "data_shard": 8}, "shard", (4, 8)),  # context ranks share the shards
        ({"tensor": 4, "context": 4, "data_shard": 4}, "context", (2, 2)),
        ({"data_shard": 8, "data_replicate": 8}, "shard", (8, 1)),
        ({"data_shard": 8, "data_replicate": 8}, "replicate", (1, 8)),
        ({"data_shard": 8, "data_replicate": 8}, "whole", (8, 8)),
        ({"expert": 8, "data_shard": 64}, "expert", (8, 1)),
        ({"expert": 16, "data_shard": 64}, "expert", (8, 2)),
        ({"expert": 8, "data_shard": 64}, "expert_shard", (1, 8)),
        ({"expert": 4, "expert_tensor": 2, "tensor": 2, "data_shard": 32}, "expert", (4, 1)),
        ({"pipeline": 8, "data_shard": 8}, "neighbours", (1, 8)),
        ({"pipeline": 4, "tensor": 2, "data_shard": 8}, "neighbours", (1, 4)),
    ],
)
def test_on_8_nodes_of_8(plan, name, expected):
    assert spans(getattr(groups("h100-8x8", **plan), name)) == expected


@pytest.mark.parametrize(
    ("plan", "name", "expected"),
    [
        ({"pipeline": 8, "data_shard": 8}, "neighbours", (8, 1)),  # a pipeline in each node
        ({"pipeline": 8, "data_shard": 8}, "shard", (1, 8)),
        ({"pipeline": 4, "data_shard": 16}, "shard", (2, 8)),
        ({"pipeline": 2, "tensor": 2, "context": 2, "data_shard": 8}, "shard", (2, 8)),  # both context ranks
        ({"pipeline": 2, "tensor": 2, "context": 2, "data_shard": 8}, "neighbours", (2, 1)),
        ({"pipeline": 2, "tensor": 4, "context": 4, "data_shard": 2}, "shard", (2, 4)),
        ({"pipeline": 4, "data_shard": 4, "data_replicate": 4}, "replicate", (1, 4)),
        ({"pipeline": 2, "data_shard": 32}, "expert_shard", (4, 8)),
    ],
)
def test_pipelines_inside_of_data_parallelism(plan, name, expected):
    found = groups("h100-8x8", axis_order=AxisOrder.DATA_OUTERMOST, **plan)
    assert spans(getattr(found, name)) == expected


def test_plans_of_both_orders_in_one_table():
    plans = [Plan(tensor=2, context=3, pipeline=2, data_shard=4, axis_order=order) for order in reversed(AxisOrder)]
    rows = [plan_row(plan) for plan in plans]
    table = PlanTable(**{f.name: np.array([getattr(r, f.name) for r in rows]) for f in fields(PlanTable)})
    both = groups_of(table, network("h100-8x6"))
    for i, row in enumerate(rows):
        for f in fields(Groups):
            single = getattr(groups_of(row, network("h100-8x6")), f.name)
            for part in ("inner", "outer", "out_s_per_byte", "far_s_per_byte"):
                found = np.broadcast_to(getattr(getattr(both, f.name), part), 2)[i]
                assert found == pytest.approx(float(getattr(single, part))), (f.name, part)


def test_a_rack_holds_all_of_them_in_one_domain():
    rack = groups("gb200-4x18", tensor=4, expert=18, expert_tensor=4, pipeline=1, data_shard=18)
    for name in ("tensor", "shard", "expert"):
        assert spans(getattr(rack, name))[1] == 1, name


def test_experts_with_replicas_shard_over_what_a_replica_has():
    hybrid = groups("h100-8x8", expert=8, data_shard=16, data_replicate=4)
    assert float(hybrid.expert_shard.size) == 2
    assert float(hybrid.expert_whole.size) == 8


def test_every_rank_is_in_one_shard_and_one_replica():
    plan = {"tensor": 2, "context": 2, "data_shard": 4, "data_replicate": 2, "pipeline": 2}
    g = groups("h100-8x8", **plan)
    assert float(g.shard.size * g.replicate.size) == float(g.whole.size) == 2 * 4 * 2
    assert float(g.tensor.size * g.whole.size * g.neighbours.size) == 64
