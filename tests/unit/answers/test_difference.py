from dataclasses import replace

import pytest

from meshwright.answers.difference import changes, differ, memory_limit
from meshwright.planner import search
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.objective import Goal
from meshwright.specs.plan import Plan, Recompute


def test_components_explain_the_whole_difference(pipelined):
    request = pipelined.request
    other = estimate_plan(request, replace(pipelined.plan, tensor=4, data_shard=2))
    found = differ(pipelined.estimate, other, usable_bytes=request.usable_bytes)
    assert found.step_ms.delta == pytest.approx(1e3 * (other.step.step.value - pipelined.estimate.step.step.value))
    assert sum(d.delta for d in found.comparison.components_ms) == pytest.approx(found.step_ms.delta)
    assert found.decided_by is not None
    assert found.decided_by.delta * found.step_ms.delta > 0
    assert [str(c) for c in found.changes] == ["tensor 2 → 4", "data_shard 4 → 2"]


def test_a_plan_does_not_differ_from_itself(pipelined):
    found = differ(pipelined.estimate, pipelined.estimate, usable_bytes=1.0)
    assert found.changes == ()
    assert found.decided_by is None


def test_changes_speak_the_run_files_words():
    this = Plan(recompute=Recompute.SELECTIVE, recompute_modules=("norm", "mlp"))
    other = Plan(recompute=Recompute.FULL, recompute_layers=2, data_shard=4)
    assert [str(c) for c in changes(this, other)] == [
        "data_shard 1 → 4",
        "recompute norm+mlp → full in 2 layers of a rank",
    ]


def test_memory_binds_only_where_more_of_it_would_be_faster(flat):
    request, goal = flat.request, Goal(num_devices=flat.request.num_devices)
    small = replace(request.cluster.accelerator, memory_bytes=40 * 2**30)
    tight = replace(request, cluster=replace(request.cluster, accelerator=small))
    best = search(tight, top=1, goal=goal).best
    limit = memory_limit(tight, goal=goal, best=best)
    assert limit is not None
    assert limit.needed_gib > limit.available_gib
    assert limit.step_s < best.step_s
    large = replace(request.cluster.accelerator, memory_bytes=10**15)
    roomy = replace(request, cluster=replace(request.cluster, accelerator=large))
    assert memory_limit(roomy, goal=goal, best=search(roomy, top=1, goal=goal).best) is None
