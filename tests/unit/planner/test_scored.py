"""All scored plans: none of the best is left out, the front is one, intervals and times are those of one estimate."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.planner.estimate import estimate_plan
from meshwright.planner.objective import Goal
from meshwright.planner.request import PlanRequest, request_for
from meshwright.planner.scored import FRONT_SLACK, ScoredPlans, scored_plans
from meshwright.planner.search import search
from meshwright.runfile import from_options


@pytest.fixture(scope="module")
def wanted() -> PlanRequest:
    run = from_options(model="qwen3-0.6b", cluster="h100-2x1", global_batch=4, sequence_length=4096)
    return request_for(run, fixed={})


def listed(wanted: PlanRequest, most: int) -> ScoredPlans:
    return scored_plans(wanted, goal=Goal(num_devices=wanted.num_devices), most=most)


@pytest.fixture(scope="module")
def every(wanted) -> ScoredPlans:
    return listed(wanted, 10_000)


def test_every_plan_that_fits_is_listed_once(every):
    assert every.is_complete
    plans = [done.plan for done in every]
    assert len(set(plans)) == len(plans) == every.counts.fit > 100
    assert [done.value for done in every] == sorted(done.value for done in every)


def test_a_limit_keeps_the_best_and_the_front(wanted, every):
    few = listed(wanted, 50)
    assert not few.is_complete
    closed = [p for p in every if p.plan.pipeline == 1]  # their order does not depend on simulation
    best = [p.plan for p in closed[:10]]
    assert [p.plan for p in few if p.plan.pipeline == 1][:10] == best
    assert len(few) >= 50
    lowest = min(p.reserved_bytes for p in every if p.value <= every.plans[0].value * (1 + FRONT_SLACK))
    assert min(p.reserved_bytes for p in few) == lowest


@pytest.mark.when_touched  # test_all_scored_plans_in_every_form (unit/cli/test_plan.py) compares the first plans
def test_a_short_list_begins_with_the_plan_that_a_search_finds():
    run = from_options(model="llama3.1-70b", cluster="h100-8x8", global_batch=256, sequence_length=8192, engine="any")
    request = request_for(run, fixed={})
    goal = Goal(num_devices=request.num_devices)
    found = search(request, top=6, goal=goal).plans
    few = scored_plans(request, goal=goal, most=5, simulated=found)
    assert few.plans[0].value <= found[0].value
    assert {r.plan for r in found} <= {p.plan for p in few}


def test_the_front_is_what_no_plan_beats(every):
    value = np.array([p.value for p in every])
    size = np.array([p.reserved_bytes for p in every])
    beaten = [
        bool(np.any((value < v) & (size <= b) | (value <= v) & (size < b))) for v, b in zip(value, size, strict=True)
    ]
    points = {(v, b) for v, b, no in zip(value, size, beaten, strict=True) if not no}
    on_front = [(p.value, p.reserved_bytes) for p in every if p.on_front]
    assert len(on_front) == len(points) > 5  # of plans that are equal in both, one
    assert set(on_front) == points


def test_a_row_is_the_estimate_of_its_plan(wanted, every):
    piped = next(p for p in every if p.plan.pipeline > 1 and p.is_simulated)
    for done in (every.plans[0], piped, every.plans[-1]):
        alone = estimate_plan(wanted, done.plan)
        if done.is_simulated or done.plan.pipeline == 1:
            assert done.step_s == pytest.approx(alone.step.step.value)
            assert done.step_s * done.spread == pytest.approx(alone.step.step.high)
        assert done.reserved_bytes == pytest.approx(alone.step.memory.reserved_bytes)
        assert sum(done.components_s.values()) == pytest.approx(done.step_s)
        assert sum(done.memory_bytes.values()) == pytest.approx(done.reserved_bytes)


def test_nothing_fits():
    run = from_options(model="llama3.1-405b", cluster="h100-8x1", global_batch=8, sequence_length=4096)
    found = listed(request_for(run, fixed={}), 10)
    assert len(found) == 0
    assert found.is_complete


@pytest.mark.when_touched  # test_every_plan_that_fits_is_listed_once simulates some
def test_event_graphs_have_a_budget(monkeypatch, wanted, every):
    monkeypatch.setattr("meshwright.planner.scored.MOST_OPERATIONS", 0)
    found = listed(wanted, 10_000)
    assert not any(done.is_simulated for done in found)
    assert np.isclose(found.plans[0].step_s, every.plans[0].step_s, rtol=0.2)
