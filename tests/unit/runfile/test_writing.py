"""Pinning a plan in a copy of the run file."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import runfile
from meshwright.errors import InputError
from meshwright.runfile import schema
from meshwright.runfile.pinned import plan_from_section, section_from_plan
from meshwright.runfile.validate import validated
from meshwright.specs.plan import RECOMPUTE_MODULES, AxisOrder, Offload, Plan, Recompute, Schedule, Sharding

TEXT = """\
# what this is for
model: llama3.1-8b # the small one
data: {sequence_length: 8192}
batch:
  global_tokens: 4_194_304 # tokens
  micro: auto
optimizer: {learning_rate: 3.0e-4}
cluster: h100-8x8
parallel: auto # not for long
# the end
"""
PLAN = Plan(tensor=4, pipeline=2, virtual_pipeline=2, schedule=Schedule.INTERLEAVED, data_shard=8, micro_batch=2)


def test_the_copy_says_the_plan_and_keeps_comments(tmp_path) -> None:
    out = tmp_path / "pinned.yaml"
    run = runfile.loads(TEXT, file="run.yaml")
    runfile.pin_plan(run, PLAN, out)
    again = runfile.load(out)
    assert again.plan == PLAN
    assert again.model == run.model
    text = out.read_text()
    assert [c for c in ("# what this is for", "# the small one", "# tokens", "# the end") if c not in text] == []
    assert "4_194_304" in text
    assert "3.0e-4" in text
    assert [p.name for p in tmp_path.iterdir()] == ["pinned.yaml"]


def test_overrides_are_in_the_copy() -> None:
    run = runfile.loads(TEXT, overrides=["optimizer.learning_rate=1e-3", "train.steps=7"])
    again = runfile.loads(runfile.pinned_text(run, PLAN))
    assert (again.optimizer.learning_rate, again.train.steps) == (1e-3, 7)


def test_a_stated_run_needs_no_overrides() -> None:
    run = runfile.loads(TEXT, overrides=["optimizer.learning_rate=1e-3", "train.steps=7", "engine=megatron"])
    text = runfile.stated_text(run)
    again = runfile.loads(text)
    assert (again.overrides, again.optimizer, again.train, again.engine) == ((), run.optimizer, run.train, "megatron")
    assert "# not for long" in text
    assert runfile.stated_text(again) == text


def test_options_can_be_pinned() -> None:
    run = runfile.from_options(
        model="llama3.1-8b", cluster="h100-8x8", global_batch=512, sequence_length=8192, overrides=["train.seed=3"]
    )
    again = runfile.loads(runfile.pinned_text(run, PLAN))
    assert (again.plan, again.model, again.train.seed) == (PLAN, run.model, 3)


def test_a_pinned_file_can_be_pinned_again() -> None:
    once = runfile.loads(runfile.pinned_text(runfile.loads(TEXT), PLAN))
    other = Plan(data_shard=64, sharding=Sharding.PARAMETERS, recompute=Recompute.FULL)
    assert runfile.loads(runfile.pinned_text(once, other)).plan == other


def test_a_plan_for_other_devices_is_refused() -> None:
    with pytest.raises(InputError, match="devices"):
        runfile.pinned_text(runfile.loads(TEXT), Plan(data_shard=3))


def test_aliases_survive() -> None:
    run = runfile.loads(TEXT.replace("parallel:", "train: {seed: &n 5, steps: *n}\nparallel:"))
    assert runfile.loads(runfile.pinned_text(run, PLAN)).train.steps == 5


def test_nothing_is_left_where_nothing_can_be_written(tmp_path) -> None:
    run = runfile.loads(TEXT)
    for out in (tmp_path / "no" / "folder.yaml", tmp_path, "null\0byte"):
        with pytest.raises(InputError, match="cannot write"):
            runfile.pin_plan(run, PLAN, out)
    assert list(tmp_path.iterdir()) == []


degrees = st.integers(1, 64)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    recompute = draw(st.sampled_from(Recompute))
    modules = draw(st.lists(st.sampled_from(RECOMPUTE_MODULES), min_size=1, unique=True))
    layers = draw(st.none() | st.integers(0, 9))
    return Plan(
        **{n: draw(degrees) for n in ("tensor", "context", "pipeline", "virtual_pipeline", "expert", "expert_tensor")},
        **{n: draw(degrees) for n in ("data_shard", "data_replicate", "micro_batch")},
        sequence_parallel=draw(st.booleans()),
        sharding=draw(st.sampled_from(Sharding)),
        schedule=draw(st.sampled_from(Schedule)),
        recompute=recompute,
        recompute_modules=tuple(modules) if recompute is Recompute.SELECTIVE else (),
        recompute_layers=layers if recompute is Recompute.FULL else None,
        layers_per_stage=draw(st.none() | st.lists(degrees, min_size=1, max_size=4).map(tuple)),
        offload=draw(st.sampled_from(Offload)),
        axis_order=draw(st.sampled_from(AxisOrder)),
    )


@settings(max_examples=100, deadline=None)
@given(plans())
def test_a_section_says_all_of_a_plan(plan: Plan) -> None:
    section = validated(schema.ParallelSection, section_from_plan(plan))
    assert isinstance(section, schema.ParallelSection)
    assert section.data_shard == plan.data_shard
    assert plan_from_section(section, data_shard=plan.data_shard, micro_batch=plan.micro_batch) == plan
