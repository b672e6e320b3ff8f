"""DualPipe's overlap of one micro-batch's all-to-alls with another's kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.catalog import lookup as catalog
from meshwright.planner.estimate import PlanEstimate, estimate_plan
from meshwright.planner.request import PlanRequest
from meshwright.specs.features import Dispatcher, Features
from meshwright.specs.hardware import Stack
from meshwright.specs.plan import Plan, Recompute, Schedule
from meshwright.specs.precision import PRECISIONS

# DeepSeek-V3 on 2,048 H800: arXiv 2412.19437, sections 3.2 and 4.2.
PUBLISHED = Plan(
    pipeline=16, expert=64, data_shard=128, schedule=Schedule.DUALPIPE, layers_per_stage=(4,) * 15 + (1,),
    recompute=Recompute.SELECTIVE, recompute_modules=("norm", "activation", "mla_up_projection"),
)  # fmt: skip


def request(*, dispatcher: Dispatcher = Dispatcher.DEEPEP) -> PlanRequest:
    return PlanRequest(
        model=catalog.model("deepseek-v3"),
        cluster=catalog.cluster("h800-8x256"),
        seq_len=4096,
        global_batch=15_360,
        precision=PRECISIONS["fp8_blockwise"],
        stack=Stack(framework="megatron-bridge", features=Features(dispatcher=dispatcher, overlaps_experts=False)),
    )


def estimate(plan: Plan, **changes: Dispatcher) -> PlanEstimate:
    return estimate_plan(request(**changes), plan)


def test_the_published_layout_is_near_its_published_rate():
    """180 K GPU hours per trillion tokens are 1,543 tokens/s/device."""
    rate = estimate(PUBLISHED).step.tokens_per_s_per_device
    assert rate.low < 1543 < rate.high
    assert rate.value == pytest.approx(1543, rel=0.2)


def test_the_all_to_all_is_hidden_and_the_kernels_are_slower():
    pairs = estimate(PUBLISHED).step.components_s
    alone = estimate(replace(PUBLISHED, schedule=Schedule.ONE_F_ONE_B)).step.components_s
    assert pairs["expert_parallel"] < 0.3 * alone["expert_parallel"]
    assert pairs["expert_parallel"] > 0  # multiprocessors that send do not compute


def test_more_than_the_kernels_take_is_not_hidden():
    """Without a copy for each node the all-to-alls take longer than all kernels."""
    slow = estimate(PUBLISHED, dispatcher=Dispatcher.ALL_TO_ALL).step.components_s
    fast = estimate(PUBLISHED).step.components_s
    assert slow["expert_parallel"] > 2 * fast["expert_parallel"]


def test_without_expert_parallelism_nothing_is_saved():
    plan = replace(PUBLISHED, expert=1)
    assert estimate(plan).steps.stages.rank_saving_s == 0


def test_the_event_graph_agrees_with_the_closed_form():
    found = estimate(replace(PUBLISHED, layers_per_stage=None))
    assert found.step.step.value == pytest.approx(np.ravel(found.steps.step_s)[0], rel=0.1)
