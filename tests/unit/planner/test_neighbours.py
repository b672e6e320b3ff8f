"""Batch sizes and numbers of devices near a request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_runs import tiny_run

from meshwright.answers.plan_ranking import plan_run
from meshwright.planner import request_for
from meshwright.planner.choice import goal_of
from meshwright.planner.explain import explain_infeasible
from meshwright.planner.neighbours import LEAST_GAIN, REACH, neighbours, shares_few_divisors
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import search
from meshwright.specs.run import Costs
from meshwright.units import HOUR_S, JOULE_PER_KWH


def request(*, cluster: str, batch: int) -> PlanRequest:
    return request_for(tiny_run(f"cluster={cluster}", f"batch.global_sequences={batch}"))


def test_a_request_without_a_plan_has_neighbours_that_have_one():
    """72 devices and 64 sequences have a factor of 8 in common, and the model's 4 heads and 4 layers take none of 9."""
    without = request(cluster="h100-8x9", batch=64)
    result = search(without, top=1)
    assert result.best is None
    batch, devices = neighbours(without, best=None)
    assert (batch.global_batch, batch.num_idle, batch.gain) == (72, 0, None)
    assert (devices.global_batch, devices.gain) == (64, None)
    assert devices.num_idle > 0
    hint = "; ".join(explain_infeasible(result).suggestions)
    assert f"a global batch of 72 sequences: {batch.tokens_per_s:,.0f} tokens/s" in hint
    assert f"({devices.num_nodes} x 8), {devices.num_idle} idle: {devices.tokens_per_s:,.0f} tokens/s" in hint


def test_fewer_devices_of_one_node():
    batch, devices = neighbours(request(cluster="h100-7x1", batch=128), best=None)
    assert (batch.global_batch % 7, batch.num_idle) == (0, 0)
    assert (devices.global_batch, devices.num_nodes) == (128, 1)
    assert devices.devices_per_node in (4, 5, 6)


@pytest.mark.when_touched  # test_fewer_devices_of_one_node searches the same sizes
@settings(max_examples=10)
@given(nodes=st.integers(1, 6), per_node=st.sampled_from([1, 4, 7, 8]), batch=st.integers(8, 300))
def test_neighbours_are_near_legal_and_faster(nodes, per_node, batch):
    asked = request(cluster=f"h100-{per_node}x{nodes}", batch=batch)
    best = search(asked, top=1).best
    for near in neighbours(asked, best=best):
        assert abs(near.global_batch - batch) <= REACH * batch
        assert near.num_devices == near.plan.num_devices
        assert near.num_devices + near.num_idle == asked.num_devices
        assert near.global_batch % (near.plan.micro_batch * near.plan.data_shard * near.plan.data_replicate) == 0
        assert near.gain is None if best is None else near.gain >= LEAST_GAIN


@pytest.mark.parametrize(("objective", "unit"), [("energy", "tokens/J"), ("cost", "tokens/USD")])
def test_neighbours_follow_the_objective_and_count_idle_devices(objective, unit):
    asked = tiny_run("cluster=h100-8x3", "batch.global_sequences=44", f"objective={objective}")
    priced = replace(asked, costs=Costs(usd_per_device_hour=2.0, usd_per_kwh=0.5))
    goal, ranking = goal_of(priced), plan_run(priced, top=1, neighbours=True)
    assert goal.power is not None
    best, found = ranking.ranked[0], ranking.neighbours
    assert [near.num_idle for near in found or ()] == [0, 8]
    for near in found or ():
        own = replace(goal, num_devices=near.num_devices)
        plan = search(_resized(ranking.request, near), top=1, goal=goal.leaving_idle(near.num_idle)).best
        waiting_w = near.num_idle * (goal.power.idle_w + goal.power.node_w) * goal.power.pue_ratio
        waiting = {"energy": waiting_w, "cost": near.num_idle * 2.0 / HOUR_S + waiting_w / JOULE_PER_KWH * 0.5}
        value = float(np.ravel(own.value(plan.steps))[0]) * plan.step_s / plan.closed_form_s
        value += waiting[objective] * plan.step_s
        assert near.plan == plan.plan
        assert near.gain == pytest.approx(best.value / 44 / (value / near.global_batch))
        assert f"{near.gain - 1:+.0%} {unit}" in str(near)


def _resized(asked, near):
    cluster = replace(asked.cluster, num_nodes=near.num_nodes, devices_per_node=near.devices_per_node)
    return replace(asked, cluster=cluster, global_batch=near.global_batch)


@pytest.mark.parametrize(
    ("cluster", "batch", "few"),
    [
        ("h100-8x8", 120, True),
        ("h100-8x8", 128, False),
        ("h100-8x8", 96, False),
        ("h100-8x128", 512, False),
        ("h100-8x3", 128, True),
        ("h100-7x1", 128, True),
        ("h100-1x1", 7, False),
    ],
)
def test_few_divisors_in_common(cluster, batch, few):
    assert shares_few_divisors(request(cluster=cluster, batch=batch)) == few
