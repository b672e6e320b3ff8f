"""A plan, its export and the import of that export are one run for torchtitan, too, whose package reads the export."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engines.torchtitan.test_importing import loaded, read
from tests.plan_questions import questions, questions_of_own_files, questions_of_software, stated_cluster

from meshwright.engines.base import find_engine
from meshwright.engines.choice import not_run
from meshwright.engines.local import write_files
from meshwright.engines.torchtitan.config_trees.run_content import import_tree
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.choice import best_plans, free_request, goal_of
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.fixed import fixed_fields
from meshwright.planner.request import request_for
from meshwright.runfile import loads, pinned_text
from meshwright.specs.run import Run

DRAWN = (questions, questions_of_own_files, questions_of_software)
QUESTIONS = st.one_of([drawn(engines=("torchtitan",)) for drawn in DRAWN])
ASKED = st.lists(QUESTIONS, min_size=25, max_size=25)
SUPPRESSED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.large_base_example]


def costs(run: Run) -> tuple[float, float]:
    """Seconds of a step and bytes of a device."""
    assert run.plan is not None
    step = estimate_plan(request_for(run), run.plan).step
    return step.step.value, step.memory.reserved_bytes


def pinned_run(run: Run, fixed: tuple[str, ...]) -> Run | None:
    """`run` with its first plan; None: the engine does not run it, fixed fields contradict each other, or none fits."""
    if not_run(run) or run.precision.matmul not in ("bf16", "fp32"):  # torchtitan builds fp8 where a GPU has it
        return None
    try:
        request = free_request(run).fixing(**fixed_fields(fixed))
        plan = best_plans(request, goal=goal_of(run)).plans[0].plan
    except (InputError, InfeasibleError):
        return None
    return loads(pinned_text(run, plan))


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=SUPPRESSED)
@given(asked=ASKED)
def test_imported_exports_are_estimated_as_their_plans(asked, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("exports")
    pinned = {f"q{n}": run for n, one in enumerate(asked) if (run := pinned_run(*one)) is not None}
    for name, run in pinned.items():
        write_files(find_engine("torchtitan").lower(run, folder=folder / name), folder / name)
    trees = read([f"{name}/meshwright_run.py:train" for name in pinned], folder=folder)
    for name, run in pinned.items():
        cluster = stated_cluster(asked[int(name[1:])][0])  # a pinned run has no overrides, which name a user's file
        again = loaded(import_tree(trees[f"{name}/meshwright_run.py:train"], cluster=cluster))
        assert costs(again) == pytest.approx(costs(run), rel=1e-9), run.text
