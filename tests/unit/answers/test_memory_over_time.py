"""Memory over one step: its largest moment is the estimate of the fullest rank, and each pass ends as it must."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.plan_requests import plan_request
from tests.unit.planner.test_rank_memory import PLANS

from meshwright.answers.memory_over_time import memory_over_time
from meshwright.cost.memory import memory_parts
from meshwright.planner.estimate import estimate_plan
from meshwright.specs.plan import Plan, Recompute, Schedule

MORE = PLANS | {
    "zero bubble": Plan(pipeline=4, data_shard=2, schedule=Schedule.ZERO_BUBBLE),
    "recomputed": replace(PLANS["1f1b"], recompute=Recompute.FULL),
}


@pytest.mark.parametrize("framework", ["megatron-lm", "torchtitan", "maxtext", "native"])
@pytest.mark.parametrize("name", MORE)
def test_the_largest_moment_is_the_estimate(name, framework):
    request = plan_request()
    request = replace(request, stack=replace(request.stack, framework=framework))
    estimate = estimate_plan(request, MORE[name])
    found, memory = memory_over_time(request, estimate), estimate.step.memory
    assert found is not None
    total = np.sum(list(found.parts_bytes.values()), axis=0)
    assert total.max() == pytest.approx(memory.reserved_bytes)
    assert found.peak.parts_bytes == pytest.approx(memory_parts(memory))
    assert np.all(np.diff(found.times_s) >= 0)
    assert found.parts_bytes["activations"][[0, -1]] == pytest.approx([0, 0], abs=1)


def test_a_long_pipeline_has_no_timeline():
    request = replace(plan_request(), global_batch=2**20)
    plan = Plan(pipeline=4, data_shard=2)
    assert memory_over_time(request, estimate_plan(request, plan)) is None


def test_the_sentence_names_the_moment():
    request = plan_request()
    found = memory_over_time(request, estimate_plan(request, PLANS["1f1b"]))
    assert found is not None
    assert found.summary().endswith(
        "rank 0 keeps activations of 4 micro-batches and runs the backward pass of micro-batch 0."
    )
