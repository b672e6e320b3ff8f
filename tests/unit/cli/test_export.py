"""`meshwright export`: files, the command that starts them, and what is said against the plan."""

from __future__ import annotations

import ast

import pytest

from meshwright import runfile

RUN = """
model: llama3.1-8b
data: {sequence_length: 4096}
batch: {global_sequences: 64}
cluster: h100-8x2
train: {steps: 100}
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    return "run.yaml"


def test_a_plan_is_searched_and_all_files_are_there(meshwright, run_file, tmp_path):
    outcome = meshwright("export", run_file, "--engine", "torchtitan", "--out", "titan", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.json["files"] == ["meshwright_run.py", "meshwright_run.yaml"]
    assert outcome.json["num_processes"] == 16
    ast.parse((tmp_path / "titan" / "meshwright_run.py").read_text())
    again = runfile.load(tmp_path / "titan" / "meshwright_run.yaml")
    assert again.engine == "torchtitan"
    assert again.plan.num_devices == 16


def test_the_command_of_a_host_is_printed(meshwright, run_file):
    outcome = meshwright("export", run_file, "--engine", "torchtitan", "--out", "titan")
    assert "torchrun --nproc-per-node=8 --nnodes=2" in outcome.stdout
    assert "-m meshwright.engines.torchtitan.worker titan/meshwright_run.py" in outcome.stdout


def test_native_exports_too(meshwright, run_file):
    outcome = meshwright("export", run_file, "--out", "here", "--json")
    assert outcome.json["argv"][1:4] == ["-m", "meshwright", "train"]


def test_a_plan_that_does_not_fit_is_noted(meshwright, run_file):
    plan = "parallel={sharding: none, data_shard: 16}"
    outcome = meshwright("export", run_file, "--engine", "torchtitan", "--out", "titan", "--set", plan)
    assert outcome.exit_code == 0, outcome.stderr
    assert "note: the plan does not fit: stage 0 needs" in outcome.stderr


def test_refusals_and_a_folder_that_is_not_empty(meshwright, run_file, tmp_path):
    plan = "parallel={sharding: optimizer, data_shard: 16}"
    outcome = meshwright("export", run_file, "--engine", "torchtitan", "--out", "titan", "--set", plan)
    assert outcome.exit_code == 2
    assert "does not shard optimizer" in outcome.stderr
    assert not (tmp_path / "titan").exists()
    outcome = meshwright("export", run_file, "--engine", "torchtitan", "--out", ".")
    assert outcome.exit_code == 2
    assert "the folder is not empty" in outcome.stderr
