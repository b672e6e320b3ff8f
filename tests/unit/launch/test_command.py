"""The command line of `launch`: a dry run tells everything and starts nothing; bad input is exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.launch import start
from meshwright.launch.request import read_hosts, shape

DRY = ("--dry-run", "--site", "site.yaml")


@pytest.fixture(autouse=True)
def _start_nothing(monkeypatch):
    def refuse(*arguments, **more):
        raise AssertionError(f"started {arguments}")

    monkeypatch.setattr(start.subprocess, "run", refuse)
    monkeypatch.setattr(start.subprocess, "Popen", refuse)


@pytest.mark.parametrize(
    ("place", "num_nodes", "files", "program"),
    [
        ("local --set cluster=mi355x-8x1 --set parallel.data_shard=8", 1, {"runs/run/run.yaml"}, "env"),
        ("slurm", 4, {"runs/run/run.yaml", "runs/run/submit.sh"}, "sbatch"),
        ("kubernetes", 4, {"runs/run/run-files.yaml", "runs/run/manifest.yaml"}, "kubectl"),
        ("skypilot", 4, {"runs/run/run.yaml", "runs/run/task.yaml"}, "sky"),
        ("ray", 4, {"runs/run/run.yaml", "runs/run/submit.py"}, "ray"),
    ],
)
def test_a_dry_run_tells_everything_and_leaves_nothing(place, num_nodes, files, program, meshwright, run_file):
    before = sorted(Path.cwd().iterdir())
    arguments = ("launch", run_file, "--on", *place.split(), *DRY)
    document = meshwright(*arguments, "--json").json
    shown = meshwright(*arguments).stdout
    assert set(document["files"]) == files
    assert document["commands"][0][0] == program
    assert (document["num_nodes"], document["devices_per_node"]) == (num_nodes, 8)
    for text in document["files"].values():
        assert text in shown
    for variable in document["environment"]:
        assert f"{variable['name']}={variable['value']}"[:30] in shown
        assert variable["reason"]
    assert "NCCL_DEBUG" not in {v["name"] for v in document["environment"]}  # the site file takes it away
    assert sorted(Path.cwd().iterdir()) == before


def test_torchrun_binds_processes_to_the_nodes_of_their_devices(meshwright, run_file):
    place = ("--on", "local", "--set", "cluster=mi355x-8x1", "--set", "parallel.data_shard=8")
    (command,) = meshwright("launch", run_file, *place, *DRY, "--numa", "--json").json["commands"]
    assert command[command.index("--numa-binding") + 1] == "node"


def test_out_writes_the_files_of_a_dry_run(meshwright, run_file):
    outcome = meshwright("launch", run_file, "--on", "slurm", *DRY, "--out", "first")
    assert outcome.exit_code == 0, outcome.stderr
    assert "#SBATCH --nodes=4" in Path("first/submit.sh").read_text()
    assert "data_shard: 32" in Path("first/run.yaml").read_text()


def test_the_command_line_lies_over_the_site_file(meshwright, run_file):
    outcome = meshwright(
        "launch", run_file, "--on", "slurm", *DRY, "--partition", "long", "--directive", "--reservation=r1",
        "--env", "NCCL_DEBUG=INFO", "--env", "GPU_MAX_HW_QUEUES=", "--json",
    )  # fmt: skip
    script = outcome.json["files"]["runs/run/submit.sh"]
    assert "#SBATCH --partition=long" in script
    assert "#SBATCH --account=llm" in script
    assert "#SBATCH --reservation=r1" in script
    assert "export NCCL_DEBUG=INFO" in script
    assert "GPU_MAX_HW_QUEUES" not in script


def test_a_run_without_a_plan_gets_the_planners(meshwright, run_file):
    outcome = meshwright("launch", run_file, "--on", "slurm", *DRY, "--set", "parallel=auto", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    assert "data_shard:" in outcome.json["files"]["runs/run/run.yaml"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--on slurm --nodes 3", "the plan needs another number of devices: got '3 nodes x 10 = 30', allowed: 32"),
        ("--on slurm --nodes 2 --devices-per-node 8", "allowed: 32"),
        ("--on slurm --exclude-file none.txt", "the list of hosts cannot be read"),
        ("--on slurm --rendezvous a:1", "--rendezvous is for --on local: got '--on slurm'"),
        ("--on local --wait", "--wait is for --on slurm"),
        ("--on local", "the run needs 4 hosts"),
        ("--on local --rendezvous a:b", "HOST or HOST:PORT"),
        ("--on local --rendezvous a:1", "need the same folder"),
        ("--on slurm --nodes 2 --devices-per-node 16", "a node of the cluster has fewer devices"),
        ("--on local --set cluster=mi355x-8x1 --set parallel.data_shard=8 --rendezvous a:1", "needs no rendezvous"),
        ("--on local --rendezvous a --exclude-file bad.txt", "hosts to exclude are for slurm"),
        ("--on ray --exclude-file bad.txt", "hosts to exclude are for slurm"),
        ("--on skypilot --exclude-file bad.txt", "hosts to exclude are for slurm"),
        ("--on slurm --exclude-file wrong.txt", "no host name"),
        ("--on slurm --env NAME", "NAME=VALUE"),
        ("--on slurm --site gone.yaml", "no such file"),
        ("--on slurm --site typo.yaml", "typo.yaml:2: slurm.partitoin: unknown key"),
        ("--on skypilot --site buckets.yaml", "buckets.yaml:1: skypilot.bucket: unknown key"),
        ("--on skypilot", "the results would be lost: nothing is mounted there"),
        ("--on kubernetes", "needs an image"),
        (
            "--on slurm --set cluster=mi355x-8x3+mi355x-4x2",
            "a launch starts as many processes on each node, and nodes of mi355x-8x3+mi355x-4x2 have 8 and 4 devices",
        ),
        ("--on slurm --set cluster=here --set parallel=auto", "pins no plan"),
        ("--on slurm --set engine=maxtext --set precision=fp8", "the maxtext engine cannot do this run"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments, said, meshwright, run_file):
    Path("bad.txt").write_text("node07\n")
    Path("wrong.txt").write_text("two words\n")
    Path("buckets.yaml").write_text("skypilot: {bucket: {}}\n")
    Path("typo.yaml").write_text("interface: x\nslurm: {partitoin: a}\n")
    outcome = meshwright("launch", run_file, *arguments.split())
    assert outcome.exit_code == 2
    assert said in outcome.stderr
    assert not Path("runs").exists()


@pytest.mark.parametrize("place", ["slurm", "kubernetes", "skypilot", "ray"])
def test_where_the_program_is_missing_exit_code_3_says_what_to_install(place, meshwright, run_file, monkeypatch):
    monkeypatch.setattr(start.shutil, "which", lambda program: None)
    outcome = meshwright("launch", run_file, "--on", place, "--site", "site.yaml")
    assert outcome.exit_code == 3
    assert "hint:" in outcome.stderr
    assert not Path("runs").exists()


def test_a_refusal_of_sbatch_is_reported_verbatim(meshwright, run_file, monkeypatch):
    monkeypatch.setattr(start.shutil, "which", lambda program: program)
    refusal = subprocess.CompletedProcess([], 1, "", "sbatch: error: invalid partition specified: gpu\n")
    monkeypatch.setattr(start.subprocess, "run", lambda *a, **k: refusal)
    outcome = meshwright("launch", run_file, "--on", "slurm", "--site", "site.yaml")
    assert outcome.exit_code == 1
    assert "sbatch refused: sbatch: error: invalid partition specified: gpu" in outcome.stderr


def test_the_list_of_the_doctor_is_read(tmp_path):
    path = tmp_path / "exclude.txt"
    path.write_text("node07\nnode11  # a lost device\n\nnode07\n")
    assert read_hosts(path) == ("node07", "node11")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [((None, None, None), (1, 16)), ((2, None, None), (2, 8)), ((None, 4, None), (4, 4)), ((None, None, 4), (4, 4)),
     ((2, 4, 4), (4, 4))],
)  # fmt: skip
def test_nodes_and_devices_follow_from_each_other(asked, expected):
    cluster_nodes, num_nodes, each = asked
    found = shape(16, cluster_nodes=cluster_nodes, num_nodes=num_nodes, devices_per_node=each)
    assert found == expected


def test_what_does_not_multiply_is_refused():
    with pytest.raises(InputError, match="allowed: 16"):
        shape(16, cluster_nodes=None, num_nodes=3, devices_per_node=None)


def test_signals_reach_the_command_and_its_exit_code_comes_back(monkeypatch):
    monkeypatch.undo()
    code = (
        "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *a: sys.exit(7));"
        "os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    )
    assert start.run_here([sys.executable, "-c", code]) == 7
