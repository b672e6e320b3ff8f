"""The training loop: losses fall, schedules, precision, validation, faults, what is left on disk."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from functools import cache, partial

import pytest

torch = pytest.importorskip("torch")

from meshwright import runfile
from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.errors import InputError, MissingDependencyError
from meshwright.records.training import Ending
from meshwright.specs.run import LearningRateSchedule, Optimizer
from meshwright.training import signals
from meshwright.training.optimizer import learning_rate

pytestmark = pytest.mark.usefixtures("without_measuring")

TEXT = """
model:
  name: tiny
  hidden: 32
  num_layers: 2
  vocab: 257
  ffn_hidden: 64
  attention: {num_heads: 4, num_kv_heads: 2}
data: {source: TEXT, tokenizer: bytes, sequence_length: 16}
batch: {global_sequences: 8, micro: 4}
precision: fp32
cluster: here
optimizer: {learning_rate: 1.0e-2, warmup_steps: 3}
train: {steps: 30, evaluate: {every_steps: 10, num_batches: 1}}
"""


def train_in(folder, *overrides, **options):
    text = folder / "corpus.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 600)
    loaded = runfile.loads(TEXT.replace("TEXT", str(text)), overrides=overrides)
    return engine.train(loaded, options=TrainOptions(folder=folder / "out", quiet=True, **options))


@pytest.fixture
def train(tmp_path):
    return partial(train_in, tmp_path)


def steps(folder):
    return [json.loads(line) for line in (folder / "out" / "steps.jsonl").read_text().splitlines()]


def losses(folder):
    return [entry["loss"] for entry in steps(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """`whole("bf16")`: record and losses of the run in this precision, trained once."""

    @cache
    def trained(precision):
        folder = tmp_path_factory.mktemp(precision)
        return train_in(folder, f"precision={precision}"), losses(folder)

    return trained


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_loss_falls(whole, precision):
    record, _ = whole(precision)
    assert record.ending is Ending.DONE
    assert record.statistics["first_loss"] == pytest.approx(math.log(257), rel=0.05)
    assert record.statistics["last_loss"] < 3.6
    assert record.statistics["validation_loss"] < 3.6
    assert record.sample


def test_bf16_with_fp32_masters_follows_fp32(whole):
    assert whole("bf16")[1] == pytest.approx(whole("fp32")[1], rel=0.02)


SHORT = ("train.steps=8", "train.evaluate=null")


def test_micro_batches_add_up_to_the_batch(train, tmp_path):
    found = []
    for size in (1, 8):
        train(*SHORT, f"batch.micro={size}")
        found.append(losses(tmp_path))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_recomputation_changes_no_bit(train, tmp_path):
    found = []
    for how in ("none", "full"):
        train(*SHORT, f"parallel={{data_shard: 1, recompute: {how}}}")
        found.append(losses(tmp_path))
    assert len(found[0]) == 8
    assert found[0] == found[1]


def test_z_loss_joins_the_gradient_and_no_loss_that_is_shown(train, tmp_path, whole):
    _, without = whole("fp32")
    record = train("train.z_loss=0.1")
    found = losses(tmp_path)
    assert found[0] == without[0]  # the same weights: the same cross-entropy
    assert found[-1] != without[-1]
    assert record.statistics["validation_loss"] < 3.6


def test_training_ends_at_the_target_loss(train, tmp_path):
    target = "train.evaluate={every_steps: 2, num_batches: 1, target_loss: 4.0}"
    record = train(target, f"train.checkpoint={{folder: {tmp_path / 'saved'}}}")
    assert record.ending is Ending.REACHED
    reached = record.statistics["target"]
    entries = steps(tmp_path)
    assert reached["steps"] == len(entries) < 30
    assert reached["tokens"] == reached["steps"] * 8 * 16
    assert reached["seconds"] == pytest.approx(entries[-1]["elapsed_s"])
    assert reached["seconds"] >= sum(entry["step_s"] for entry in entries)
    validated = [entry["validation_loss"] for entry in entries if "validation_loss" in entry]
    assert validated[-1] <= 4.0 < min(validated[:-1])
    assert record.statistics["checkpoint"].endswith(f"step-{reached['steps']:08d}")  # it is saved
    assert record.sample


def test_a_target_that_is_not_reached_ends_as_usual(train):
    record = train("train.evaluate.target_loss=0.5", "train.steps=4")
    assert record.ending is Ending.DONE
    assert record.statistics["target"] is None


def test_what_a_run_leaves_behind(train, tmp_path):
    record = train("train.steps=10")
    folder = tmp_path / "out"
    assert {p.name for p in folder.iterdir()} == {
        "identity.json", "run.yaml", "resolved.json", "steps.jsonl", "record.json"
    }  # fmt: skip
    assert runfile.load(folder / "run.yaml").train.steps == 10  # the file states the run with its overrides
    assert json.loads((folder / "resolved.json").read_text())["plan"]["data_shard"] == 1
    entries = steps(tmp_path)
    assert [entry["step"] for entry in entries] == list(range(1, 11))
    assert entries[-1]["tokens"] == 10 * 8 * 16
    assert "validation_loss" in entries[-1]
    assert record.statistics["step_s"]["n"] == 7  # the first three warm up
    assert record.software["torch"] == torch.__version__
    assert record.predicted is not None
    assert record.predicted["step"]["low"] < record.predicted["step"]["high"]


def test_a_loss_that_is_no_number_ends_the_run(train, tmp_path):
    record = train("optimizer.learning_rate=1e12", "optimizer.gradient_clip=null", "optimizer.warmup_steps=0")
    assert record.ending is Ending.DIVERGED
    assert len(steps(tmp_path)) == record.statistics["steps"] < 30
    assert record.events[-1]["kind"] == "not_finite"


def test_a_request_to_stop_ends_after_the_step(train, monkeypatch):
    monkeypatch.setattr(signals.StopRequest, "asked", True, raising=False)
    monkeypatch.setattr(signals.StopRequest, "__init__", lambda self, tell: None)
    monkeypatch.setattr(signals.StopRequest, "at_once", nullcontext)  # the request comes in the first step
    record = train()
    assert record.ending is Ending.STOPPED
    assert record.statistics["steps"] == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [("train.steps=null", "says neither steps nor tokens"), ("precision=nvfp4", "nvfp4 is not trained")],
)
def test_what_this_engine_cannot_do_is_refused(train, override, words):
    with pytest.raises(InputError, match=words):
        train(override)


def test_an_accelerator_that_is_not_there_is_missing(train, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingDependencyError, match="no accelerator"):
        train("cluster=h100-8x1")


def test_checkpoints_of_another_run_are_not_overwritten(train, tmp_path):
    saves = (f"train.checkpoint={{folder: {tmp_path / 'saved'}}}", "train.steps=3")
    train(*saves)
    with pytest.raises(InputError, match="already holds checkpoints, the newest after step 3"):
        train(*saves)
    with pytest.raises(InputError, match="nothing to resume from"):
        train(resume=True)


SCHEDULES = {
    LearningRateSchedule.CONSTANT: [0.5, 1.0, 1.0, 1.0, 1.0, 1.0],
    LearningRateSchedule.LINEAR: [0.5, 1.0, 0.775, 0.55, 0.325, 0.1],
    LearningRateSchedule.COSINE: [0.5, 1.0, 0.868198, 0.55, 0.231802, 0.1],
    LearningRateSchedule.WSD: [0.5, 1.0, 1.0, 1.0, 0.55, 0.1],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rates(schedule):
    settings = Optimizer(learning_rate=1.0, warmup_steps=2, schedule=schedule, decay_ratio=1 / 3)
    found = [learning_rate(settings, step=i, num_steps=6) for i in range(6)]
    assert found == pytest.approx(SCHEDULES[schedule], abs=1e-6)


def test_the_sample_of_conversations_follows_a_prompt_and_ends_with_the_answer(tmp_path):
    talk = [{"role": "user", "content": "Ready?"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 8)
    loaded = runfile.loads(
        TEXT.replace("TEXT", str(tmp_path / "talks.jsonl")),
        overrides=["data.sequence_length=80", "train={steps: 120}", "batch={global_sequences: 2, micro: 2}"],
    )
    record = engine.train(loaded, options=TrainOptions(folder=tmp_path / "out", quiet=True))
    prompt = "<|im_start|>user\nReady?<|im_end|>\n<|im_start|>assistant\n"
    assert record.sample is not None
    assert record.sample.startswith(prompt)
    assert record.sample.removeprefix(prompt) == "yes"  # and not 64 tokens


@pytest.mark.parametrize(("ratio", "is_noted"), [(0.0, True), (0.1, False)])
def test_a_last_step_without_a_learning_rate_is_noted(ratio, is_noted, tmp_path):
    (tmp_path / "corpus.txt").write_text("the quick brown fox. " * 100)
    loaded = runfile.loads(
        TEXT.replace("TEXT", str(tmp_path / "corpus.txt")), overrides=[f"optimizer.final_ratio={ratio}"]
    )
    notes = engine.prepare(loaded, options=TrainOptions(folder=tmp_path / "out")).notes
    assert any("learning rate of the last step is 0" in line for line in notes) == is_noted
