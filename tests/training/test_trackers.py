"""Trackers: each for real where it is installed, and what happens when one fails or is absent."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec

import pytest

pytest.importorskip("torch")

from meshwright import runfile
from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.errors import InputError, MissingDependencyError
from meshwright.records.training import Ending
from meshwright.specs.run import Tracker
from meshwright.training import trackers

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring")

foreign = pytest.mark.filterwarnings("ignore")  # warnings of other projects' code are theirs


def needs(package: str):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


@pytest.fixture
def train(tmp_path, tiny_text):
    def run(*names, steps=4, **options):
        overrides = (
            f"train.steps={steps}",
            f"train.trackers=[{', '.join(names)}]",
            f"train.checkpoint.folder={tmp_path / 'saved'}",
        )
        loaded = runfile.loads(tiny_text, overrides=overrides)
        return engine.train(loaded, options=TrainOptions(folder=tmp_path / "out", quiet=True, **options))

    return run


def logged(tmp_path) -> dict[int, float]:
    lines = (tmp_path / "out" / "steps.jsonl").read_text().splitlines()
    return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}


def test_an_unknown_name_is_refused(train):
    with pytest.raises(InputError, match=r"train\.trackers") as refused:
        train("tensorbord")
    assert "tensorboard" in str(refused.value)


@pytest.mark.parametrize("name", list(Tracker))
def test_one_that_is_not_installed_stops_the_run_before_it_begins(train, tmp_path, monkeypatch, name):
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(MissingDependencyError) as missing:
        train(name.value)
    assert missing.value.hint == f"pip install {name.value}"
    assert not (tmp_path / "out").exists()


class Failing:
    """Takes some steps and then raises, as a server that went away does."""

    identity = "abc"

    def __init__(self, opening):
        self.seen = []

    def step(self, step, values):
        self.seen.append(step)
        if step == 3:
            raise ConnectionError("the server went away\nand more")

    def text(self, name, words, *, step):
        raise AssertionError("it was left out")

    finish = text


def test_one_that_fails_is_warned_of_once_and_left_out(train, tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.BACKENDS, Tracker.TENSORBOARD, Failing)
    monkeypatch.setattr(trackers, "find_spec", lambda package: True)
    record = train("tensorboard")
    assert record.ending is Ending.DONE
    assert record.statistics["steps"] == 4
    assert [n for n in record.notes if "tensorboard" in n] == [
        "tensorboard failed and was not called again: the server went away"
    ]


def test_losses_of_several_sources_have_names(tmp_path, monkeypatch):
    seen = {}

    class Seeing(Failing):
        identity = None

        def __init__(self, opening):
            pass

        def step(self, step, values):
            seen.update(values)

    monkeypatch.setitem(trackers.BACKENDS, Tracker.WANDB, Seeing)
    opening = trackers.TrackedRun(name="x", folder=tmp_path, settings={}, after_step=0)
    found = trackers.Trackers((Tracker.WANDB,), run=opening, warn=print)
    found.step({"step": 1, "validation_loss": 1.5, "validation_losses": {"web": 2, "mean": 1.5}, "profiled": True})
    assert seen == {"validation_loss": 1.5, "validation_losses/web": 2.0, "validation_losses/mean": 1.5}


def test_one_that_cannot_be_opened_is_left_out(tmp_path, monkeypatch):
    def refuses(opening):
        raise OSError("no such server")

    said = []
    monkeypatch.setitem(trackers.BACKENDS, Tracker.WANDB, refuses)
    opening = trackers.TrackedRun(name="x", folder=tmp_path, settings={}, after_step=0)
    found = trackers.Trackers((Tracker.WANDB,), run=opening, warn=said.append)
    found.step({"step": 1, "loss": 1.0})
    assert said == ["warning: wandb failed and was not called again: no such server"]
    assert not (tmp_path / trackers.IDENTITIES).exists()


@foreign
@needs("tensorboard")
def test_tensorboard_for_real(train, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train("tensorboard", steps=4)
    train("tensorboard", steps=6, resume=True)
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    losses = {event.step: event.value for event in events.Scalars("loss")}
    assert losses == pytest.approx(logged(tmp_path))
    assert {"learning_rate", "gradient_norm", "mfu", "step_s"} <= set(events.Tags()["scalars"])


@foreign
@needs("wandb")
@pytest.mark.when_touched  # a stand-in takes the same calls above
def test_wandb_offline_for_real(train, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    record = train("wandb")
    assert [n for n in record.notes if "wandb" in n] == []
    (written,) = (tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    identity = json.loads((tmp_path / "out" / trackers.IDENTITIES).read_text())["wandb"]
    assert written.stem == f"run-{identity}"
    assert b"gradient_norm" in written.read_bytes()


@foreign
@needs("mlflow")
@needs("sqlalchemy")
def test_mlflow_for_real(train, tmp_path):
    from mlflow import MlflowClient

    train("mlflow", steps=4)
    train("mlflow", steps=6, resume=True)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'out' / 'mlflow.db'}")
    identity = json.loads((tmp_path / "out" / trackers.IDENTITIES).read_text())["mlflow"]
    history = {metric.step: metric.value for metric in client.get_metric_history(identity, "loss")}
    assert history == pytest.approx(logged(tmp_path))
    run = client.get_run(identity)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["summary/steps"] == 6
    assert all(math.isfinite(value) for value in history.values())
