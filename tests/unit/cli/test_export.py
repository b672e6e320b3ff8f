"""`meshwright export`: files, the command that starts them, and what is said against the plan."""

from __future__ import annotations

import ast

import pytest

import meshwright as mw
from meshwright import runfile
from meshwright.errors import InputError

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


def test_nodes_of_two_sizes_have_a_command_each(meshwright, run_file):
    sizes = ("--set", "cluster=h100-8x2+h100-4x1", "--set", "batch.global_sequences=40")
    outcome = meshwright("export", run_file, "--engine", "torchtitan", "--out", "titan", *sizes)
    assert outcome.exit_code == 0, outcome.stderr
    commands = [line for line in outcome.stdout.splitlines() if "torchrun" in line]
    assert [line.split()[1:3] for line in commands] == [
        ["--nproc-per-node=8", "--nnodes=3"], ["--nproc-per-node=4", "--nnodes=3"],
    ]  # fmt: skip
    assert [line.rpartition("# ")[2] for line in commands] == ["hosts of h100-8x2", "hosts of h100-4x1"]


def test_native_exports_too(meshwright, run_file):
    outcome = meshwright("export", run_file, "--out", "here", "--json")
    assert outcome.json["argv"][1:4] == ["-m", "meshwright", "train"]


def test_a_plan_that_does_not_fit_is_noted(meshwright, run_file):
    plan = "parallel={sharding: none, data_shard: 16}"
    outcome = meshwright("export", run_file, "--engine", "torchtitan", "--out", "titan", "--set", plan)
    assert outcome.exit_code == 0, outcome.stderr
    assert "note: the plan does not fit: stage 0 needs" in outcome.stderr


def test_an_export_that_was_interrupted_goes_on_in_its_folder(meshwright, run_file, tmp_path):
    line = ("export", run_file, "--engine", "megatron", "--out", tmp_path / "files", "--json")
    first = meshwright(*line)
    assert first.exit_code == 0, first.stderr
    whole = {path.name: path.read_bytes() for path in (tmp_path / "files").iterdir()}
    next(path for path in (tmp_path / "files").iterdir() if path.suffix == ".args").unlink()
    (tmp_path / "files" / ".megatron_lm.args.0123abcd.partial").write_text("--num")
    assert meshwright(*line).exit_code == 0
    assert {n: (tmp_path / "files" / n).read_bytes() for n in whole} == whole
    (tmp_path / "files" / "megatron_lm.args").write_text("of somebody else")
    assert "the folder is not empty" in meshwright(*line).stderr


def test_refusals_and_a_folder_that_is_not_empty(meshwright, run_file, tmp_path):
    plan = "parallel={sharding: optimizer, data_shard: 16}"
    outcome = meshwright("export", run_file, "--engine", "torchtitan", "--out", "titan", "--set", plan)
    assert outcome.exit_code == 2
    assert "does not shard optimizer" in outcome.stderr
    assert not (tmp_path / "titan").exists()
    outcome = meshwright("export", run_file, "--engine", "torchtitan", "--out", ".")
    assert outcome.exit_code == 2
    assert "the folder is not empty" in outcome.stderr


def test_the_function_exports_as_the_command_does(meshwright, run_file, tmp_path):
    plan = "parallel={sharding: none, data_shard: 16}"
    outcome = meshwright("export", run_file, "--engine", "torchtitan", "--out", "titan_1", "--set", plan, "--json")
    done = mw.export(run_file, engine="torchtitan", folder="titan_2", overrides=[plan])
    assert outcome.json["memory"] == done.to_dict()["memory"]
    assert outcome.json["memory"]["verdict"] == "does not fit"
    for name in outcome.json["files"]:
        one, two = ((tmp_path / folder / name).read_text() for folder in ("titan_1", "titan_2"))
        assert one.replace("titan_1", "titan_2") == two
    assert str(done) == "run: llama3.1-8b with torchtitan, DP16 ddp mbs1"


def test_an_engine_is_named_once(run_file):
    with pytest.raises(InputError, match="engine and the override of engine are both given"):
        mw.export(run_file, engine="torchtitan", folder="titan", overrides={"engine": "megatron"})


def test_an_import_says_whether_its_plan_fits(meshwright, run_file, tmp_path):
    mw.export(run_file, engine="megatron", folder="exported")
    source = next((tmp_path / "exported").glob("*.args"))
    asked = ("import", source, "--cluster", "h100-8x2", "--json")
    found = mw.import_run(source, cluster="h100-8x2", file="again.yaml")
    assert meshwright(*asked).json["memory"] == found.to_dict()["memory"]
    assert found.to_dict()["memory"]["verdict"] == "fits"
    assert runfile.load("again.yaml").plan == found.run.plan
    assert (tmp_path / "again.yaml").read_text() == found.text
