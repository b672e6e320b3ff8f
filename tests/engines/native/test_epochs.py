"""`train.epochs`: the data is counted before the plan, and the schedule and the record have the steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from tests.tiny_runs import TEXT, tiny_run

import meshwright as mw
from meshwright import runfile
from meshwright.engines.epochs import with_counted_epochs
from meshwright.engines.native.contract import check, lower
from meshwright.engines.refusals import endless
from meshwright.errors import InputError, RunFileError
from meshwright.specs.plan import Plan
from meshwright.specs.run import with_plan
from meshwright.training.data import open_data
from meshwright.training.optimizer import learning_rate

BYTES = ("model.vocab=260", "data.tokenizer=bytes", "train.steps=null")
SHARE = "optimizer={learning_rate: 1.0e-2, schedule: linear, warmup_ratio: 0.3, final_ratio: 0}"


def overrides(source: Path, *more: str) -> tuple[str, ...]:
    return (*BYTES, f"data.source={source}", *more)


@pytest.mark.parametrize("epochs", [1, 2.5, 0.001])
def test_epochs_become_the_tokens_that_are_read(epochs, tmp_path):
    (tmp_path / "text.txt").write_text("some text to learn " * 100)
    run = tiny_run(*overrides(tmp_path / "text.txt", SHARE, f"train.epochs={epochs}"))
    assert check(run) == ()
    assert [problem.key for problem in endless(run)] == ["train.epochs"]  # of other engines
    pinned = with_plan(run, Plan(micro_batch=8))
    assert lower(pinned, folder=tmp_path / "out").files.keys() == {"run.yaml"}
    counted, note = with_counted_epochs(run)
    num_samples = open_data(run).train.num_samples
    steps = math.ceil(epochs * num_samples / run.global_batch)
    assert counted.num_steps == steps
    assert note is not None
    assert f"{num_samples:,} samples" in note
    assert list(endless(counted)) == []
    assert counted.optimizer.warmup_steps == -(-3 * steps // 10)
    assert learning_rate(counted.optimizer, step=steps - 1, num_steps=steps) == pytest.approx(
        0.0 if steps > 1 else 1e-2
    )


def test_overrides_read_again_give_the_counted_run(tmp_path):
    (tmp_path / "text.txt").write_text("some text to learn " * 100)
    run = tiny_run(*overrides(tmp_path / "text.txt", SHARE, "train.epochs=2"))
    counted, _ = with_counted_epochs(run)
    again = runfile.loads(counted.text, overrides=(*overrides(tmp_path / "text.txt", SHARE), *counted.overrides))
    assert (again.train, again.optimizer) == (counted.train, counted.optimizer)


def test_a_training_takes_the_steps_of_its_epochs(tmp_path, without_measuring):
    text = tmp_path / "text.txt"
    text.write_text("some text to learn " * 40)
    counted, _ = with_counted_epochs(tiny_run(*overrides(text, "train.epochs=2")))
    (tmp_path / "run.yaml").write_text(TEXT)
    asked = {"model.vocab": 260, "data.tokenizer": "bytes", "data.source": str(text)}
    lengths = {"train.steps": None, "train.epochs": 2}
    done = mw.train(tmp_path / "run.yaml", out=tmp_path / "out", overrides=asked | lengths, quiet=True)
    assert done.statistics["steps"] == counted.num_steps > 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("train.steps=3",), "both steps and epochs are given"),
        (("batch.label_tokens=100",), "epochs: is given, but with batch.label_tokens"),
        (("data.source={a: {path: x.txt}, b: {path: y.txt}}",), "the 2 sources have epochs of their own"),
    ],
)
def test_epochs_that_cannot_be_counted_are_refused(more, words, tmp_path):
    with pytest.raises(RunFileError, match=words):
        tiny_run(*overrides(tmp_path / "text.txt", "train.epochs=2", *more))


def test_random_tokens_have_no_epochs():
    with pytest.raises(InputError, match="random tokens have no end"):
        with_counted_epochs(tiny_run("train.steps=null", "train.epochs=2"))


@pytest.mark.parametrize(
    ("engine", "sharding"), [("megatron", "optimizer"), ("maxtext", "parameters"), ("torchtitan", "parameters")]
)
def test_an_engine_that_takes_steps_is_given_those_of_the_epochs(meshwright, engine, sharding, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some text to learn " * 400)
    (tmp_path / "run.yaml").write_text(TEXT)
    of_run = [
        "model=llama3.1-8b", f"engine={engine}", "cluster=h100-8x1", "precision=bf16",
        f"parallel={{data_shard: 8, sharding: {sharding}, recompute: full}}",
        "batch={global_sequences: 16, micro: 1}", f"data={{source: {text}, tokenizer: bytes, sequence_length: 128}}",
        "train={epochs: 3}", "optimizer={learning_rate: 1e-3, warmup_ratio: 0.1}",
    ]  # fmt: skip
    given = [part for override in of_run for part in ("--set", override)]
    out = tmp_path / "out"
    done = meshwright("export", tmp_path / "run.yaml", "--out", out, *given)
    assert done.exit_code == 0, done.stderr
    counted, _ = with_counted_epochs(runfile.load(tmp_path / "run.yaml", overrides=of_run))
    assert f"3 epochs are {counted.num_steps} steps, as {engine} takes steps" in " ".join(done.stderr.split())
    with_steps = [*given, "--set", f"train={{tokens: {counted.train.tokens}}}"]
    again = meshwright("export", tmp_path / "run.yaml", "--out", tmp_path / "again", *with_steps)
    assert again.exit_code == 0, again.stderr
    for file in (path for path in out.rglob("*") if path.is_file()):
        other = tmp_path / "again" / file.relative_to(out)
        assert other.read_text().replace(str(tmp_path / "again"), str(out)) == file.read_text().replace(
            "epochs: null, ", ""
        )
    launched = meshwright("launch", tmp_path / "run.yaml", "--dry-run", "--on", "slurm", *given)
    assert launched.exit_code == 0, launched.stderr
    assert f"3 epochs are {counted.num_steps} steps" in " ".join(launched.stderr.split())
