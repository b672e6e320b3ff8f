"""`resolved.json` of a training is a run file: the same run with the plan that was trained."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("torch")
from tests.tiny_runs import tiny_run

from meshwright import runfile
from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.errors import RunFileError

pytestmark = pytest.mark.usefixtures("without_measuring")


def train(run, folder):
    return engine.train(run, options=TrainOptions(folder=folder, quiet=True))


def test_a_resolved_run_is_trained_again_with_the_same_plan_and_losses(tmp_path):
    asked = tiny_run("model.num_layers=1", "batch.micro=auto", "train.seed=7", "optimizer.learning_rate=0.02")
    first = train(asked, tmp_path / "first")
    again = runfile.load(tmp_path / "first" / "resolved.json")
    assert again.plan is not None
    assert again.plan.describe() == first.run["plan_in_words"]
    assert again.micro_batch == again.plan.micro_batch
    same = {"text": "", "overrides": (), "name": "", "plan": None, "micro_batch": None, "source": ""}
    assert replace(again, **same) == replace(asked, **same)
    second = train(again, tmp_path / "second")
    assert second.statistics["last_loss"] == first.statistics["last_loss"]
    changed = runfile.load(tmp_path / "first" / "resolved.json", overrides=["train.steps=1"])
    assert changed.num_steps == 1


def test_a_resolved_run_without_its_file_says_where_that_is(tmp_path):
    train(tiny_run("model.num_layers=1", "train.steps=1"), tmp_path / "run")
    path = tmp_path / "run" / "resolved.json"
    document = json.loads(path.read_text())
    del document["run_file"]
    path.write_text(json.dumps(document))
    with pytest.raises(RunFileError, match=r"(?s)without its run file.*run\.yaml"):
        runfile.load(path)
    path.write_text(json.dumps(document | {"run_file": 3}))
    with pytest.raises(RunFileError, match="without its run file"):
        runfile.load(path)
