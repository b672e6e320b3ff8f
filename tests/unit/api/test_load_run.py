"""Runs from files, names, mappings and keyword arguments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.example_runs import OPEN_RUN

import meshwright as mw
from meshwright.specs.run import Objective

CONTENT = {
    "model": "llama3-8b",
    "data": {"sequence_length": 4096},
    "batch": {"global_sequences": 64},
    "cluster": "h100-8x2",
}


def test_a_path_a_name_and_a_mapping():
    assert mw.load_run(OPEN_RUN) == mw.load_run(str(OPEN_RUN))
    assert mw.load_run("llama3-8b").source == "llama3-8b.yaml"
    run = mw.load_run(CONTENT)
    assert (run.model.name, run.cluster_name, run.global_batch, run.name) == ("llama3-8b", "h100-8x2", 64, "llama3-8b")


def test_a_mapping_may_name_the_run_hold_paths_and_numpy_numbers():
    run = mw.load_run({**CONTENT, "data": {"sequence_length": np.int64(2048), "source": Path("texts")}})
    assert (run.sequence_length, run.data.source) == (2048, "texts")


def test_a_mapping_is_a_whole_run_file():
    assert mw.load_run(mw.load_run(CONTENT)) == mw.load_run(CONTENT)
    assert "model: llama3-8b" in mw.load_run(CONTENT).text


@pytest.mark.parametrize("overrides", [{"batch.micro": 2, "precision": "fp8"}, ["batch.micro=2", "precision=fp8"]])
def test_overrides(overrides):
    run = mw.load_run(OPEN_RUN, overrides=overrides)
    assert (run.micro_batch, run.precision.name) == (2, "fp8")


def test_a_run_is_loaded_again_with_its_overrides():
    first = mw.load_run(OPEN_RUN, overrides={"precision": "fp8"})
    second = mw.load_run(first, overrides={"cluster": "h100-8x2"})
    assert (second.precision.name, second.cluster_name, second.name) == ("fp8", "h100-8x2", first.name)
    assert mw.load_run(first) is first


def test_a_nested_override():
    assert mw.load_run(OPEN_RUN, overrides={"costs": {"usd_per_device_hour": 2.5}}).costs.usd_per_device_hour == 2.5


def test_keyword_arguments_describe_a_run():
    plans = mw.plan(
        model="llama3-8b", cluster="h100-8x2", global_sequences=64, sequence_length=4096, objective="cost",
        engine="megatron", overrides={"costs.usd_per_device_hour": 2.0}, top=1,
    )  # fmt: skip
    assert (plans.run.objective, plans.run.engine, plans.run.name) == (Objective.COST, "megatron", "llama3-8b")


def test_a_run_for_this_machine_gets_the_installed_calibration(tmp_path, monkeypatch):
    from meshwright.calibration import device

    (tmp_path / "here.json").write_text("no calibration")
    monkeypatch.setattr(device, "installed_path", lambda: tmp_path / "here.json")
    with pytest.raises(mw.InputError, match=r"here\.json"):
        mw.estimate({**CONTENT, "cluster": "here"})


def test_a_cluster_that_was_not_measured_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(mw.InputError, match="needs a known cluster"):
        mw.estimate({**CONTENT, "cluster": "here"})
