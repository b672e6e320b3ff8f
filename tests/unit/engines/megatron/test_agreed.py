"""Switches of a recipe that do not run together: DeepEP and experts that are padded to a capacity."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.catalog.stacks import switches_of
from meshwright.engines.base import check_export
from meshwright.engines.choice import not_run
from meshwright.planner.parts import notes_on_parts
from meshwright.planner.request import request_for
from meshwright.planner.switches import software_lines
from meshwright.runfile import from_options, load
from meshwright.specs.plan import Plan

ASKED = {"model": "mixtral-8x7b", "cluster": "h100-8x4", "global_batch": 64, "sequence_length": 4096}
RELEASE_25_09 = "stack.vintage=2025.7"
EXAMPLES = Path(__file__).parents[4] / "examples" / "runs"
PLAN = Plan(data_shard=4, expert=8, pipeline=8)


@pytest.mark.parametrize(
    ("stated", "dispatcher", "has_capacity", "note"),
    [
        ((), "deepep", False, "stack.drops_tokens=false: the recipe of megatron-bridge has true"),
        (("stack.dispatcher=deepep",), "deepep", False, "stack.drops_tokens=false"),
        (("stack.capacity_factor=1.5",), "all-to-all", True, "stack.dispatcher=all-to-all: the recipe of"),
        (("stack.drops_tokens=true",), "all-to-all", True, "stack.dispatcher=all-to-all"),
        (("stack.drops_tokens=false",), "deepep", False, ""),
        (("stack.dispatcher=all-to-all",), "all-to-all", True, ""),
    ],
)
def test_the_release_runs_what_a_recipe_and_a_run_state_together(stated, dispatcher, has_capacity, note):
    run = from_options(**ASKED, engine="megatron", overrides=[RELEASE_25_09, *stated])
    known = switches_of(run)
    assert (known.dispatcher, known.has_capacity) == (dispatcher, has_capacity)
    assert not_run(run) == []
    request = request_for(run)
    notes = [line for line in notes_on_parts(request, PLAN) if line.startswith("stack.")]
    assert [line[: len(note)] for line in notes] == ([note] if note else [])
    assert software_lines(request, PLAN) == []


def test_what_a_run_states_itself_is_refused():
    both = [RELEASE_25_09, "stack.dispatcher=deepep", "stack.capacity_factor=1.0"]
    (problem,) = not_run(from_options(**ASKED, engine="megatron", overrides=both))
    assert problem.key == "stack.dispatcher"


def test_the_engine_s_own_switches_and_any_are_as_before():
    for engine, capacity in (("megatron", False), ("any", True)):
        overrides = [RELEASE_25_09, *(["stack.preset=engine"] if engine == "megatron" else [])]
        run = from_options(**ASKED, engine=engine, overrides=overrides)
        assert switches_of(run).has_capacity == capacity
        assert not [line for line in notes_on_parts(request_for(run), PLAN) if line.startswith("stack.")]


@pytest.mark.parametrize("name", ["moe-2t-mi300x", "moe-2t-mi355x"])
def test_examples_are_runs_that_their_engine_exports(name):
    assert check_export(load(EXAMPLES / f"{name}.yaml", overrides=["train.steps=10"])) == ()
