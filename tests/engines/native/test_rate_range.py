"""The learning-rate range test: what follows from a curve, and the command on a run."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

from meshwright import runfile
from meshwright.records.rate_range import RateRange, rate_of

TEXT = """
model: {name: tiny, hidden: 32, num_layers: 1, vocab: 257, ffn_hidden: 32, attention: {num_heads: 4}}
data: {source: SOURCE, tokenizer: bytes, sequence_length: 16}
batch: {global_sequences: 4}  # small
precision: fp32
cluster: here
optimizer: {learning_rate: 5.0e-6}
train: {steps: 3, checkpoint: {folder: SAVED}, evaluate: {every_steps: 1}}
"""


def curve(loss_of, *, num_steps=100, low=1e-7, high=1.0) -> RateRange:
    rates = tuple(rate_of(i, num_steps=num_steps, low=low, high=high) for i in range(num_steps))
    return RateRange(rates=rates, losses=tuple(loss_of(math.log10(r)) for r in rates), end=high)


def test_the_steepest_descent_is_suggested():
    """A fall around 1e-4 and no divergence; smoothing over 50 steps is late, by less than a decade."""
    found = curve(lambda x: 5.0 - 3.0 / (1 + math.exp(-4 * (x + 4))))
    assert 1e-4 < found.steepest < 1e-3
    assert found.divergence is None
    assert found.suggested == pytest.approx(found.steepest, rel=0.05)


def test_a_tenth_of_the_divergence_bounds_it():
    """Flat, then falling until it diverges at once."""
    whole = curve(lambda x: 5.0 - 0.5 * max(0.0, x + 3) if x < -1.0 else 1e4)
    last = next(i for i, loss in enumerate(whole.losses) if loss > 100)
    found = RateRange(rates=whole.rates[: last + 1], losses=whole.losses[: last + 1], end=1.0)
    assert found.has_diverged
    assert found.divergence == whole.rates[last]
    assert found.suggested == pytest.approx(found.divergence / 10, rel=0.05)


@pytest.mark.parametrize("loss_of", [lambda x: 5.0, lambda x: 5.0 + x + 7], ids=["flat", "rising"])
def test_a_loss_that_does_not_fall_suggests_nothing(loss_of):
    assert curve(loss_of).suggested is None


def test_a_loss_that_is_no_number_has_diverged():
    found = RateRange(rates=(1e-3, 1e-2), losses=(5.0, math.nan), end=1.0)
    assert (found.divergence, found.suggested) == (1e-2, None)
    assert not RateRange(rates=(), losses=(), end=1.0).has_diverged


@pytest.fixture
def run_path(tmp_path, without_measuring, one_thread_and_a_cache, warm_ranks):
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 600)
    path = tmp_path / "run.yaml"
    path.write_text(TEXT.replace("SOURCE", str(tmp_path / "corpus.txt")).replace("SAVED", str(tmp_path / "saved")))
    return path


def names(folder):
    return {path.name for path in folder.iterdir()}


def tune(meshwright, run_path, *options):
    return meshwright("tune", "learning-rate", run_path, "--steps", "40", "--from", "1e-5", "--to", "10", *options)


@pytest.mark.when_touched  # test_both_rates_of_muon_are_set measures rates in one process
def test_a_run_gets_a_rate_that_trains_and_nothing_else(meshwright, run_path, tmp_path):
    before = names(tmp_path)
    done = tune(meshwright, run_path, "--json", "--html", tmp_path / "rates.html", "--write", tmp_path / "new.yaml")
    assert done.exit_code == 0, done.stderr
    found = done.json
    assert 1e-4 < found["suggested"] < 1.0
    assert found["steps"][0]["loss"] == pytest.approx(math.log(257), rel=0.05)
    tuned = runfile.load(tmp_path / "new.yaml")
    assert tuned.optimizer.learning_rate == found["suggested"] == found["values"]["optimizer.learning_rate"]
    assert "# small" in (tmp_path / "new.yaml").read_text()
    assert "<svg" in (tmp_path / "rates.html").read_text()
    assert names(tmp_path) - before - {"cache"} == {"rates.html", "new.yaml"}


@pytest.mark.when_touched  # test_both_rates_of_muon_are_set measures rates in one process
@pytest.mark.distributed
def test_several_processes_measure_the_same(meshwright, run_path):
    alone = tune(meshwright, run_path, "--json").json
    several = tune(meshwright, run_path, "--json", "--set", "parallel={data_shard: 2, sharding: parameters}").json
    ours, theirs = ([step["loss"] for step in found["steps"][:20]] for found in (several, alone))
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_both_rates_of_muon_are_set(meshwright, run_path):
    muon = "optimizer={name: muon, learning_rate: 0.02, adamw_learning_rate: 0.002, adjust_learning_rate: original}"
    values = tune(meshwright, run_path, "--json", "--set", muon).json["values"]
    ratio = values["optimizer.learning_rate"] / values["optimizer.adamw_learning_rate"]
    assert ratio == pytest.approx(10, rel=0.06)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "1e-2", "--to", "1e-3"], "not below"),
        (["--from", "0"], "no learning rate"),
        (["--to", "nan"], "no learning rate"),
        (["--steps", "2"], "2"),
        (["--set", "engine=maxtext"], "native"),
        (["--apply", "--set", "precision=bf16"], "--apply"),
    ],
    ids=["order", "zero", "nan", "steps", "engine", "apply"],
)
def test_what_makes_no_sense_is_refused(meshwright, run_path, options, message):
    done = meshwright("tune", "learning-rate", run_path, *options)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_launcher_is_refused(meshwright, run_path, monkeypatch):
    from meshwright.engines.native import rate_range_test

    monkeypatch.setattr(rate_range_test, "under_launcher", lambda: True)
    done = meshwright("tune", "learning-rate", run_path)
    assert done.exit_code == 2
    assert "launcher" in done.stderr
