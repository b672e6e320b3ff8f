"""Trainings with torchtitan on this CPU, through the test-only shim, held against the native engine step by step.

Same weights (Hugging Face safetensors), same batches in the same order, fp32: losses and gradient norms agree to the
last digits that sums in another order leave.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec

import pytest

if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: pip install '.[torchtitan]'", allow_module_level=True)

from meshwright.answers.comparison.study import compare_items

ALONE = "parallel={data_shard: 1, sharding: none}"
SHARDED = "parallel={data_shard: 2, sharding: parameters}"


def plan(words: str) -> str:
    return f"parallel={{data_shard: 1, sharding: none, {words}}}"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("out", "parallel"),
    [("one", ALONE), pytest.param("two", SHARDED, marks=pytest.mark.slow)],  # experts are sharded by default
)
def test_losses_are_those_of_the_native_engine(toys, train, steps, native, assert_equal, out, parallel):
    done = train("dense", out, parallel, page=True)
    assert done.returncode == 0, done.stderr
    taken = steps(out)
    assert [line["step"] for line in taken] == list(range(1, 21))
    assert_equal(taken, native("dense"))
    assert taken[-1]["loss"] < taken[0]["loss"] - 0.5
    record = json.loads(done.stdout)
    assert record["ending"] == "done"
    assert record["run"]["engine"] == "torchtitan"
    assert record["software"]["torchtitan"] == "0.3.0"
    assert len(record["ranks"]["step_s"]) == record["statistics"]["num_devices"]
    assert record["statistics"]["tokens"] == 20 * 8 * 64
    assert (toys / out / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("parallel", [ALONE, SHARDED, plan("tensor: 2"), plan("pipeline: 2")])
def test_a_loss_in_chunks_is_that_of_all_tokens(train, steps, native, assert_equal, parallel):
    out = "chunks-" + "".join(c for c in parallel if c.isalnum())
    done = train("dense", out, parallel, "kernels.loss_chunk=32")
    assert done.returncode == 0, done.stderr
    assert_equal(steps(out), native("dense"))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "parallel",
    [
        "parallel={data_shard: 2, expert: 2, sharding: parameters}",
        pytest.param(SHARDED, marks=pytest.mark.slow),
        pytest.param(ALONE, marks=pytest.mark.slow),
        pytest.param(plan("tensor: 2"), marks=pytest.mark.slow),
        pytest.param(plan("pipeline: 2"), marks=pytest.mark.slow),
    ],
)
def test_experts_learn_what_the_native_engines_learn(train, steps, native, assert_equal, parallel):
    out = "experts-" + "".join(c for c in parallel if c.isalnum())
    done = train("experts", out, parallel)
    assert done.returncode == 0, done.stderr
    assert_equal(steps(out), native("experts"), may_flip=True)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("words", ["tensor: 2", "pipeline: 2", "tensor: 2, pipeline: 2"])
def test_model_parallel_losses_are_those_of_the_native_engine(train, steps, native, assert_equal, words):
    out = "".join(c for c in words if c.isalnum())
    done = train("dense", out, plan(words))
    assert done.returncode == 0, done.stderr
    assert_equal(steps(out), native("dense"))


@pytest.mark.slow
@pytest.mark.distributed
def test_context_parallel_losses_are_those_of_the_native_engine(train, steps, native, assert_equal):
    longer = ("data.sequence_length=256", "batch.micro=1", "batch.global_sequences=2")  # blocks of its masks
    done = train("dense", "context", "parallel={data_shard: 1, context: 2, sharding: gradients}", *longer)
    assert done.returncode == 0, done.stderr
    assert_equal(steps("context"), native("dense", *longer))


@pytest.mark.slow
def test_adapters_learn_beside_the_same_base(train, steps, native):
    adapters = ("task=lora", "lora={rank: 4}", "train.steps=20")
    done = train("dense", "adapters", ALONE, *adapters)
    assert done.returncode == 0, done.stderr
    taken, theirs = steps("adapters"), native("dense", *adapters)
    assert taken[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-6)  # they begin with no say
    assert taken[-1]["loss"] < taken[0]["loss"] - 0.3
    for mine, other in zip(taken, theirs, strict=True):  # their first matrices are drawn apart
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-2)


def test_documents_are_joined_and_a_target_ends_the_training(toys, train, steps, native, assert_equal):
    shared = ("data.joined_documents=true", "data.validation=notes.txt", "train.steps=12")
    evaluated = "train.evaluate={every_steps: 3, skip_first: 1, num_sequences: 8, target_loss: 4.5}"
    theirs = native("dense", *shared, evaluated)
    taken = train("dense", "joined", *shared, evaluated, "parallel={data_shard: 1, sharding: none}")
    assert taken.returncode == 0, taken.stderr
    assert_equal(steps("joined"), theirs)
    ours, losses = (
        {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
        for lines in (steps("joined"), theirs)
    )
    assert ours == pytest.approx(losses, rel=2e-6)
    assert 3 not in losses
    assert len(theirs) < 12  # it ended early
    record = json.loads((toys / "joined" / "record.json").read_text())
    assert (record["ending"], record["statistics"]["target"]["steps"]) == ("target", len(theirs))


@pytest.mark.slow
def test_evaluations_are_those_of_the_native_engine(train, steps, native):
    evaluated = ("train.evaluate={every_steps: 10, num_batches: 2}", "data.validation=notes.txt")
    done = train("dense", "evaluated", ALONE, *evaluated)
    assert done.returncode == 0, done.stderr
    taken = {line["step"]: line["validation_loss"] for line in steps("evaluated") if "validation_loss" in line}
    theirs = {
        line["step"]: line["validation_loss"] for line in native("dense", *evaluated) if "validation_loss" in line
    }
    assert list(theirs) == [10, 20]
    assert list(taken) == [1, 10, 20]  # torchtitan evaluates after the first step, too
    for step, loss in theirs.items():
        assert taken[step] == pytest.approx(loss, rel=2e-6)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_are_resumed_by_one_with_the_same_batches(toys, train, steps, native, assert_equal):
    saves = "train.checkpoint={folder: saved, every_steps: 2}"
    done = train("dense", "resumed", SHARDED, "train.steps=4", saves)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(toys / "saved" / "step-4")
    again = train("dense", "resumed", ALONE, "train.steps=4", saves)
    assert again.returncode == 2
    assert "the results of a training are in this folder" in again.stderr
    done = train("dense", "resumed", ALONE, "train.steps=4", saves, arguments=("--resume",))
    assert done.returncode == 0, done.stderr
    assert_equal(steps("resumed"), native("dense")[:4])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_weights_move_between_engines(toys, train, steps, to_hf, assert_equal, name):
    """Four steps on one engine, four on the other or on the same: who took the first ones does not show."""
    for engine, parallel in (("native", ALONE), ("torchtitan", SHARDED)):
        saves = f"train.checkpoint={{folder: {name}-{engine}, every_steps: 4}}"
        settings = (f"engine={engine}", "train.steps=4", saves)
        done = train(name, f"{name}-first-{engine}", parallel, *settings)
        assert done.returncode == 0, done.stderr
        done = to_hf(name, f"{name}-after-{engine}", *settings)
        assert done.returncode == 0, done.stderr
    taken = {}
    for first, then in (("native", "native"), ("native", "torchtitan"), ("torchtitan", "native")):
        out = f"{name}-{first}-{then}"
        weights = f"weights={name}-after-{first}"
        done = train(name, out, ALONE, f"engine={then}", "train.steps=4", weights)
        assert done.returncode == 0, done.stderr
        taken[first, then] = steps(out)
    through = taken["native", "native"]
    assert through[0]["loss"] < steps(f"{name}-first-native")[0]["loss"] - 0.3  # they go on where the first ended
    for others in taken.values():
        assert_equal(others, through, may_flip=name == "experts")


@pytest.mark.distributed
def test_one_flop_rule_for_both(toys, train, native):
    if not (toys / "one" / "record.json").is_file():
        assert train("dense", "one", ALONE).returncode == 0
    native("dense")
    records = [json.loads((toys / out / "record.json").read_text()) for out in ("one", "native-dense")]
    mine, theirs = (record["statistics"] for record in records)
    assert mine.keys() == theirs.keys()
    for key in ("model_flops_per_token", "parameters", "trained_parameters", "tokens", "num_devices"):
        assert mine[key] == theirs[key]


def test_without_an_accelerator_it_is_refused_before_anything_starts(toys, train):
    done = train("dense", "refused", with_shim=False)
    assert done.returncode == 3
    assert "torchtitan 0.3.0 needs an accelerator" in done.stderr
    assert not (toys / "refused").exists()


def test_a_process_that_fails_is_reported_with_its_error(train):
    done = train("dense", "failed", ALONE, "model.vocab=64", "weights=null")
    assert done.returncode in (1, 2)
    assert "vocabulary" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.distributed
def test_engines_are_measured_beside_each_other(toys, bench):
    done = bench("dense.yaml", "--engines=native,torchtitan", f"--set={ALONE}", "--runs=1", "--steps=3",
                 "--warmup=1", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    mine, theirs = told["configurations"][1], told["configurations"][0]
    assert mine["last_loss"] == pytest.approx(theirs["last_loss"], rel=2e-6)
    assert mine["mfu_convention"] == theirs["mfu_convention"]
    (contest,) = told["engines"]
    ratio = mine["tokens_per_s_per_device"]["value"] / theirs["tokens_per_s_per_device"]["value"]
    assert contest["over_the_first"]["torchtitan"] == pytest.approx(ratio)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_profile_has_the_categories_of_the_native_engine(toys, train, steps):
    options = ("--profile-steps=6:8",)
    for engine in ("torchtitan", "native"):
        done = train("dense", f"profiled-{engine}", SHARDED, f"engine={engine}", "train.steps=10", arguments=options)
        assert done.returncode == 0, done.stderr
        record = json.loads((toys / f"profiled-{engine}" / "record.json").read_text())
        found = record["profile"]
        assert found == json.loads((toys / f"profiled-{engine}" / "profile" / "summary.json").read_text())
        assert found["steps"] == [6, 7, 8]
        assert sum(found["shares"].values()) == pytest.approx(1)
        for name in ("GEMM", "elementwise", "optimizer", "communication", "idle"):
            assert found["shares"][name] > 0, name
        assert found["unknown"] == []
        taken = steps(f"profiled-{engine}")
        assert [line["step"] for line in taken if line.get("profiled")] == [5, 6, 7, 8]
        assert record["statistics"]["step_s"]["n"] == 6
        assert record["time_s"]["profiling"] >= sum(line["step_s"] for line in taken if line.get("profiled"))
    compared = compare_items(
        [str(toys / f"profiled-{engine}") for engine in ("native", "torchtitan")], is_like_for_like=True
    )
    assert compared.gaps
    assert not any("not split" in text for text in compared.cautions)
