"""A profile of a real run."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from meshwright import runfile
from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.errors import InputError
from meshwright.records.training import Ending
from meshwright.training import signals
from meshwright.training.profiling.shares import STEP
from meshwright.training.profiling.steps import ProfileSteps

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring")


@pytest.fixture
def train(tmp_path, tiny_text):
    def run(*overrides, **options):
        overrides = ("train.steps=10", "train.checkpoint=null", "batch.micro=4", *overrides)
        loaded = runfile.loads(tiny_text, overrides=overrides)
        return engine.train(loaded, options=TrainOptions(folder=tmp_path / "out", quiet=True, **options))

    return run


def test_a_profile_of_a_real_run(train, tmp_path):
    record = train(profile=True)
    found = record.profile
    assert found == json.loads((tmp_path / "out" / "profile" / "summary.json").read_text())
    assert found["steps"] == [6, 7, 8]
    assert sum(found["shares"].values()) == pytest.approx(1)
    for name in ("GEMM", "attention", "elementwise", "optimizer", "idle"):
        assert found["shares"][name] > 0, name
    assert found["unknown"] == []
    trace = json.loads(gzip.decompress((tmp_path / "out" / "profile" / "trace-rank0.json.gz").read_bytes()))
    assert {"aten::mm", f"{STEP}6"} <= {e["name"] for e in trace["traceEvents"]}
    assert "host_name" not in trace
    lines = [json.loads(line) for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("profiled")] == [5, 6, 7, 8]
    assert record.statistics["step_s"]["n"] == 6
    assert record.time_s["profiling"] > 0


def test_a_run_that_stops_leaves_what_was_profiled(train, tmp_path, monkeypatch):
    monkeypatch.setattr(signals.StopRequest, "asked", True, raising=False)
    monkeypatch.setattr(signals.StopRequest, "__init__", lambda self, tell: None)
    monkeypatch.setattr(signals.StopRequest, "at_once", nullcontext)  # the request comes in the first step
    record = train(profile_steps=ProfileSteps(first=1, last=4))
    assert record.ending is Ending.STOPPED
    assert record.profile is not None
    assert record.profile["steps"] == [1]


def test_steps_that_the_run_does_not_take_are_refused(train):
    with pytest.raises(InputError, match="steps to profile"):
        train(profile_steps=ProfileSteps(first=9, last=11))


@pytest.mark.when_touched  # test_a_profile_of_a_real_run profiles one process
def test_passes_of_two_stages_tell_waiting_from_computing(train, tmp_path):
    """The first stage waits for every gradient: longer than the last one computes what it waits for first."""
    record = train("parallel={pipeline: 2}", "batch.micro=1", profile=True)
    shares = record.profile["shares"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["GEMM"] > 0.01  # sends that are on their way cover no computing
    assert shares["pipeline wait"] > 0
    for rank, waiting in ((0, "B"), (1, "F")):
        found = json.loads((tmp_path / "out" / "profile" / f"passes-{rank}.json").read_text())["passes"]
        assert len(found) == 8
        for p in found:
            assert 0 <= p["wait_s"] < p["end_s"] - p["start_s"]
            assert (p["wait_s"] > 0) == (p["kind"] == waiting)
