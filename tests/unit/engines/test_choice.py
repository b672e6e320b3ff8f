"""The plan that a run gets is the best one that its engine runs, whatever the planner's first is."""

from __future__ import annotations

import pytest

from meshwright import runfile
from meshwright.answers.plan_ranking import plan_run
from meshwright.answers.run_estimate import estimate_run
from meshwright.engines import choice
from meshwright.engines.base import find_engine, pinned_plan
from meshwright.engines.beginning import note_on_switches
from meshwright.engines.choice import planned, with_devices_here
from meshwright.errors import InputError
from meshwright.planner.choice import best_plans

LORA = """
model: llama3-8b
task: lora
data: {sequence_length: 2048}
batch: {global_sequences: 8}
cluster: h100-8x1
train: {steps: 10}
"""


def test_a_pinned_plan_stays(small_run):
    run = small_run("native", "plan: tensor: 2")
    assert planned(run) is run


@pytest.mark.parametrize("engine", ["native", "torchtitan"])
def test_the_plan_is_one_that_the_engine_runs(engine):
    run = planned(runfile.loads(LORA, overrides=[f"engine={engine}"]))
    assert run.plan is not None
    assert find_engine(engine).check(run) == ()


@pytest.mark.parametrize("base_format", ["int8", "nf4", "nf4_double"])
def test_a_quantised_base_has_a_plan_that_the_engine_runs(base_format):
    overrides = [f"lora.base_format={base_format}", "weights=base", "model=llama3.1-70b"]
    run = planned(runfile.loads(LORA, overrides=overrides))
    assert run.plan is not None
    assert find_engine("native").check(run) == ()


def test_a_quantised_base_is_planned_before_its_weights_are_named():
    """A search is about the model's shapes. Training refuses the run."""
    run = runfile.loads(LORA, overrides=["lora.base_format=nf4"])
    assert choice.with_planned_engine(run) is run
    (problem,) = find_engine("native").check(run)
    assert problem.key == "weights"
    assert "--set weights=FOLDER" in problem.hint


def test_what_is_refused_under_every_plan_does_not_choose_the_plan(monkeypatch):
    """Nor are all plans ranked for it: the first fifty do."""
    ranked = []

    def best(request, *, goal, top):
        ranked.append(top)
        return best_plans(request, goal=goal, top=top)

    monkeypatch.setattr(choice, "best_plans", best)
    whole = planned(runfile.loads(LORA))
    endless = planned(runfile.loads(LORA, overrides=["train.steps=null"]))
    assert find_engine("native").check(endless)[0].key == "train"
    assert endless.plan == whole.plan
    assert ranked == [50, 50]


@pytest.mark.parametrize(("num_devices", "data_shard"), [(1, 1), (2, 1), (8, 4)])
def test_a_pinned_plan_leaves_data_shard_to_the_devices_of_this_machine(num_devices, data_shard):
    run = runfile.loads(LORA, overrides=["cluster=here", "parallel={tensor: 2}"])
    here = with_devices_here(run, num_devices=num_devices)
    assert here.plan is not None
    assert (here.plan.data_shard, here.plan.num_devices, here.is_data_shard_open) == (data_shard, 2 * data_shard, False)
    assert with_devices_here(here, num_devices=16) is here
    given = runfile.loads(LORA, overrides=["cluster=here", "parallel={tensor: 2, data_shard: 1}"])
    assert with_devices_here(given, num_devices=8) is given


def test_devices_that_the_degrees_do_not_divide_are_refused():
    run = runfile.loads(LORA, overrides=["cluster=here", "parallel={tensor: 2}"])
    with pytest.raises(InputError, match="multiply to 2, which does not divide"):
        with_devices_here(run, num_devices=3)
    with pytest.raises(InputError, match="only `train` counts"):
        pinned_plan(run)


@pytest.mark.parametrize(
    ("engine", "cluster", "framework", "own"),
    [
        ("native", "h100-8x2", "megatron-bridge", "native"),
        ("native", "h100-8x2", "torchtitan", "native"),
        ("torchtitan", "h100-8x2", "nemo", "torchtitan"),
        ("torchtitan", "mi355x-8x2", "primus-torchtitan", None),
        ("megatron", "mi300x-8x2", "native", "primus-megatron"),
        ("megatron", "h100-8x2", "nemo", None),  # which runs Megatron-Core
        ("megatron", "mi300x-8x2", "megatron-bridge", None),
        ("any", "h100-8x2", "native", None),
        ("native", "h100-8x2", None, None),
    ],
)
def test_the_framework_of_another_program_is_said_by_plan_estimate_and_export(engine, cluster, framework, own):
    asked = {"model": "llama3-8b", "cluster": cluster, "global_batch": 64, "sequence_length": 4096}
    stated = [] if framework is None else [f"stack.framework={framework}"]
    run = runfile.from_options(**asked, engine=engine, overrides=["train.steps=10", *stated])
    for notes in (plan_run(run, top=1).notes, estimate_run(run).notes, note_on_switches(run, is_export=True)):
        found = [note for note in notes if note.startswith("stack.framework: ")]
        assert [note.rpartition(" ")[2] for note in found] == ([] if own is None else [own])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel={context: 2, data_shard: 4}"], ["CP2 DP4", "parallel.context: needs", "--fix context=1"]),
        (["precision=fp8", "parallel={data_shard: 8}"], ["precision: fp8 needs Transformer Engine"]),
        (["parallel={data_shard: 8}"], []),
        (["engine=native", "parallel={context: 2, data_shard: 4}"], []),
        (["engine=any", "parallel={context: 2, data_shard: 4}"], []),
        ([], []),
    ],
)
def test_what_is_exported_and_not_trained_here_is_said_in_one_line(overrides, words):
    run = runfile.loads(LORA.replace("task: lora\n", "engine: megatron\n"), overrides=overrides)
    notes = choice.notes_on_own_programs(run)
    assert len(notes) == bool(words)
    for word in ("`export` writes", "`train` and `launch` refuse it", *words) if words else ():
        assert word in notes[0]


def test_a_plan_says_that_its_first_layout_is_not_trained_here():
    run = runfile.loads(LORA.replace("task: lora\n", "engine: megatron\n"))
    (note,) = [note for note in plan_run(run, fixed={"context": 2}).notes if "`launch` refuse it" in note]
    assert "CP2" in note
    assert not any("`launch` refuse it" in note for note in plan_run(run, fixed={"context": 1}).notes)
