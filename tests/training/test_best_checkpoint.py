"""The best checkpoint stays, patience ends a training, and both continue when it is resumed."""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("torch")
from tests.tiny_runs import tiny_run

from meshwright import runfile
from meshwright.engines import refusals
from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine, trainer
from meshwright.engines.native.progress import ProgressDisplay
from meshwright.engines.native.validation import ValidationLosses
from meshwright.errors import InputError, RunFileError
from meshwright.training import checkpoints

TEXT = """
model: {name: tiny, hidden: 16, num_layers: 1, vocab: 257, ffn_hidden: 16, attention: {num_heads: 2}}
data: {source: SOURCE, tokenizer: bytes, sequence_length: 16}
batch: {global_sequences: 2}
precision: fp32
cluster: here
optimizer: {learning_rate: 1.0e-2}
train:
  steps: 12
  evaluate: {every_steps: 1, num_batches: 1}
  checkpoint: {folder: SAVED, every_steps: 4, keep: 2, keep_best: true}
"""
LOSSES = (3.0, 2.5, 2.0, 2.2, 2.1, 2.4, 2.3, 2.2, 1.9, 2.0, 2.1, 2.2)


@pytest.fixture
def train(tmp_path, monkeypatch, without_measuring, one_thread_and_a_cache):
    """Train with the validation losses that are given: what is tested is what follows from them."""
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    taken = []

    def run(*overrides, losses=LOSSES, **options):
        text = TEXT.replace("SOURCE", str(tmp_path / "corpus.txt")).replace("SAVED", str(tmp_path / "saved"))
        loaded = runfile.loads(text, overrides=overrides)
        taken.clear()

        def planned(self, num_steps):
            taken.append(num_steps)
            loss = losses[num_steps - 1]
            found = ValidationLosses(by_source={"validation": loss}, mean=loss, best_by="mean")
            self.measured.validation = found
            return found

        monkeypatch.setattr(trainer.Trainer, "_validate", planned)
        return engine.train(loaded, options=TrainOptions(folder=tmp_path / "out", quiet=True, **options))

    run.taken = taken
    return run


def saved(tmp_path):
    return [c.step for c in checkpoints.checkpoints(tmp_path / "saved")]


def test_the_best_stays_beside_the_newest(train, tmp_path):
    """Those that were the best in between and are not regular ones go; so do old regular ones."""
    record = train("train.steps=8")
    assert saved(tmp_path) == [3, 4, 8]
    best = record.statistics["best"]
    assert best == {"loss": 2.0, "step": 3, "checkpoint": str(tmp_path / "saved" / "step-00000003")}
    record = train("train.steps=12", resume=True)
    assert saved(tmp_path) == [9, 12]
    assert record.statistics["best"]["step"] == 9
    assert checkpoints.choose(tmp_path / "saved", "best").step == 9
    assert checkpoints.choose(tmp_path / "saved", None).step == 12


def test_without_it_only_the_newest_stay(train, tmp_path):
    record = train("train.checkpoint.keep_best=false")
    assert saved(tmp_path) == [8, 12]
    assert record.statistics["best"] == {"loss": 1.9, "step": 9, "checkpoint": None}
    with pytest.raises(InputError, match="keeps no best checkpoint"):
        checkpoints.choose(tmp_path / "saved", "best")


def test_patience_ends_the_run_and_a_resumed_one_counts_on(train, tmp_path):
    settings = ("train.evaluate.patience=4", "train.checkpoint.every_steps=5")
    record = train(*settings)
    assert record.ending == "no_improvement"
    assert record.statistics["steps"] == 7  # 2.0 after step 3, then four that are worse
    assert (tmp_path / "out" / "record.json").is_file()
    again = train(*settings, resume=True)
    assert (again.ending, train.taken) == ("no_improvement", [])
    for path in (tmp_path / "saved").glob("step-00000007"):
        shutil.rmtree(path)
    record = train(*settings, resume=True)
    assert (record.ending, record.statistics["steps"], train.taken) == ("no_improvement", 7, [6, 7])
    record = train(*settings, "train.evaluate.patience=9", resume=True)
    assert (record.ending, record.statistics["steps"]) == ("done", 12)


def test_small_improvements_that_never_add_up_are_none(train):
    """Bar 2.0: 1.99 to 1.97 are not below it by more than 0.05, though each is the best."""
    losses = [2.0 - 0.01 * i for i in range(12)]
    settings = ("train.evaluate.patience=3", "train.evaluate.min_delta=0.05")
    record = train(*settings, losses=losses)
    assert (record.ending, record.statistics["steps"]) == ("no_improvement", 4)
    assert record.statistics["best"]["step"] == 4


def test_a_loss_that_is_no_number_is_worse(train):
    losses = (2.0, *[float("nan")] * 11)
    record = train("train.evaluate.patience=2", losses=losses)
    assert (record.ending, record.statistics["steps"], record.statistics["best"]["step"]) == ("no_improvement", 3, 1)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["train.evaluate=null"], "train.checkpoint.keep_best"),
        (["train.evaluate.min_delta=0.1"], "train.evaluate.min_delta"),
    ],
)
def test_settings_without_effect_are_refused(overrides, key):
    with pytest.raises(RunFileError, match=key):
        runfile.loads(TEXT, overrides=overrides)


def test_show_and_to_hf_know_the_best(train, tmp_path, meshwright):
    train("train.steps=8")
    shown = meshwright("checkpoint", "show", tmp_path / "saved", "--json").json
    assert shown["best_step"] == 3
    assert [c["step"] for c in shown["checkpoints"] if c["is_best"]] == [3]
    exported = meshwright("checkpoint", "to-hf", tmp_path / "saved", tmp_path / "hf", "--step", "best", "--json").json
    assert exported["step"] == 3
    done = meshwright("generate", tmp_path / "out", "the", "--max-tokens", "2", "--step", "best", "--json").json
    assert "step-00000003" in json.dumps(done)
    assert meshwright("checkpoint", "show", tmp_path / "saved", "--step", "worst").exit_code == 2


@pytest.mark.parametrize(("every", "steps"), [(None, [1, 7]), (3, [1, 3, 6, 7]), (100, [1, 7])])
def test_lines_of_progress_come_every_so_many_steps(every, steps, capsys):
    entry = {"loss": 1.0, "tokens_per_s_per_device": 1.0, "mfu": None, "memory_bytes": 1}
    progress = ProgressDisplay(quiet=False, num_steps=7, log_every=every)
    for step in range(1, 8):
        progress.step(entry | {"step": step}, left_s=1.0)
    lines = capsys.readouterr().err.splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == steps


def test_what_other_engines_lack_is_refused():
    run = tiny_run(
        "train.log_every=5", "train.evaluate={patience: 2}", "data.source=x.txt",
        "train.checkpoint={folder: x, keep_best: true}", "optimizer.name=muon",
    )  # fmt: skip
    keys = {problem.key for problem in refusals.keys_of_the_native_engine(run)}
    wanted = {"train.log_every", "train.checkpoint.keep_best", "train.evaluate.patience", "optimizer.name"}
    assert wanted <= keys
