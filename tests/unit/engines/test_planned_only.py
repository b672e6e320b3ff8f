"""`engine: any` plans with every choice and trains nothing."""

from __future__ import annotations

import pytest

from meshwright.catalog import lookup as catalog
from meshwright.catalog.engines import ANY, engine_names, planning_names
from meshwright.catalog.stacks import stack_for_engine
from meshwright.engines.base import TrainOptions, check_export, find_engine
from meshwright.errors import InputError
from meshwright.planner.engines import engine_facts
from meshwright.planner.request import PlanRequest, request_for
from meshwright.planner.search import search
from meshwright.runfile import from_options
from meshwright.specs.plan import Schedule
from meshwright.specs.precision import PRECISIONS


def any_run():
    return from_options(model="llama3.1-8b", cluster="h100-8x2", global_batch=64, sequence_length=4096, engine=ANY)


def test_a_run_may_name_it_and_no_package_does():
    assert any_run().engine == ANY
    assert ANY not in engine_names()
    assert ANY in planning_names()


@pytest.mark.parametrize("name", engine_names())
def test_it_has_the_schedules_and_shardings_of_every_engine(name):
    every, one = engine_facts(ANY), engine_facts(name)
    assert set(one.schedules) <= set(every.schedules)
    assert set(one.shardings) <= set(every.shardings)
    assert set(one.recomputes) <= set(every.recomputes)


@pytest.mark.parametrize("schedule", [Schedule.DUALPIPE, Schedule.DUALPIPE_V, Schedule.ZBV])
def test_it_plans_what_no_engine_runs_and_keeps_the_pipeline(schedule):
    best = search(request_for(any_run()).fixing(schedule=schedule), top=1).best
    assert best is not None
    assert best.plan.schedule is schedule
    assert best.plan.pipeline > 1
    assert best.is_simulated


def test_no_engine_is_slower_than_it_on_the_same_stack():
    """It may choose whatever they may."""

    def fastest(engine: str) -> float:
        request = PlanRequest(
            model=catalog.model("mixtral-8x7b"), cluster=catalog.cluster("h100-8x2"), seq_len=4096,
            global_batch=64, precision=PRECISIONS["bf16"], stack=stack_for_engine(ANY), engine=engine,
        )  # fmt: skip
        best = search(request, top=1).best
        assert best is not None
        return best.closed_form_s

    assert fastest(ANY) <= min(fastest("native"), fastest("megatron")) * 1.02  # ranked by the event graph


def test_export_and_training_are_refused_with_the_way_on(tmp_path):
    run, engine = any_run(), find_engine(ANY)
    (problem,) = check_export(run)
    assert "native" in (problem.hint or "")
    with pytest.raises(InputError, match="any engine cannot do this run"):
        engine.prepare(run, options=TrainOptions(folder=tmp_path))
