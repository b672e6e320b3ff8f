"""Memory of every pipeline rank: as much as the estimate of the fullest one says, and the model's parameters once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan_requests import plan_request

from meshwright.cost.memory import memory_parts
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.rank_memory import memory_of_ranks
from meshwright.specs.plan import Plan, Schedule, Sharding

PLANS = {
    "one rank": Plan(tensor=2, data_shard=4),
    "1f1b": Plan(pipeline=4, data_shard=2),
    "interleaved": Plan(pipeline=4, virtual_pipeline=2, data_shard=2, schedule=Schedule.INTERLEAVED),
    "v": Plan(pipeline=4, virtual_pipeline=2, data_shard=2, schedule=Schedule.ZBV),
    "mirrored": Plan(pipeline=4, data_shard=2, schedule=Schedule.DUALPIPE),
    "uneven": Plan(pipeline=4, data_shard=2, layers_per_stage=(7, 9, 9, 7)),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_fullest_rank_is_that_of_the_estimate(name):
    request, plan = plan_request(), PLANS[name]
    memory, ranks = estimate_plan(request, plan).step.memory, memory_of_ranks(request, plan)
    assert [row.rank for row in ranks] == list(range(plan.pipeline))
    fullest = max(ranks, key=lambda row: row.reserved_bytes)
    assert fullest.reserved_bytes == pytest.approx(memory.reserved_bytes)
    assert fullest.parts_bytes == pytest.approx(memory_parts(memory))
    assert all(sum(row.parts_bytes.values()) == pytest.approx(row.reserved_bytes) for row in ranks)
    copies = 2 if name == "mirrored" else 1
    assert sum(row.num_layers for row in ranks) == copies * request.model.num_layers


@pytest.mark.parametrize("name", PLANS)
def test_parameters_of_all_ranks_are_those_of_the_model(name):
    plan = replace(PLANS[name], sharding=Sharding.NONE)
    ranks = memory_of_ranks(plan_request(), plan)
    copies = 2 if name == "mirrored" else 1
    held = sum(row.parts_bytes["weights"] for row in ranks) * plan.tensor
    assert held == pytest.approx(copies * 2 * 8_030_261_248, rel=1e-4)  # norms lie on every tensor rank


def test_dense_layers_lie_on_the_ranks_that_have_them():
    """DeepSeek-V3 on 32 ranks: of its three dense layers two are on the second rank and one on the third."""
    request = plan_request("deepseek-v3", "h100-8x64", global_batch=512)
    ranks = memory_of_ranks(request, Plan(pipeline=32, expert=16, data_shard=16, sharding=Sharding.NONE))
    weights = [row.parts_bytes["weights"] for row in ranks]
    assert [row.num_layers for row in ranks[:4]] == [0, 2, 2, 2]
    assert weights[3] == weights[4]
    assert weights[3] - weights[2] == pytest.approx(weights[2] - weights[1])
    assert weights[1] < weights[2]
    assert sum(row.num_layers for row in ranks) == request.model.num_layers


def test_earlier_ranks_keep_more_micro_batches():
    ranks = memory_of_ranks(plan_request(), PLANS["1f1b"])
    kept = [row.parts_bytes["activations"] for row in ranks]
    assert kept == sorted(kept, reverse=True)
    assert kept[1] == pytest.approx(3 * kept[3], rel=0.1)
