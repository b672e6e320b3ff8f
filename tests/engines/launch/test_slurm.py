"""Real jobs on a real Slurm of two nodes: they are killed, asked to save, cancelled, and end as they should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.engines.launch import slurm_cluster as slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(
        bool(slurm.missing()),
        reason=f"needs {', '.join(slurm.missing())}: apt-get install slurmctld slurmd slurm-client munge",
    ),
]
TRAIN = "{steps: 100, checkpoint: {folder: saved, every_steps: 20}}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm.slurm_cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def launch(training, cluster, *arguments: str) -> subprocess.Popen[str]:
    """`meshwright launch --on slurm --wait` of the run, a process on each of the two nodes."""
    command = [sys.executable, "-m", "meshwright", "launch", "run.yaml", "--on", "slurm", "--nodes", "2"]
    return subprocess.Popen(
        [*command, "--out", "out", "--wait", *arguments],
        cwd=training.folder, env=cluster, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def process_of(training, rank: int) -> int:
    """The process of a rank, by its folder and its environment; 0 while there is none."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and (entry / "cwd").resolve() == training.folder.resolve():
                words = (entry / "environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in words and b"train\0" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
        except OSError:  # it has ended
            continue
    return 0


def job_of(training) -> str:
    """The number of the job, which its log is named by."""
    (log,) = (training.folder / "out").glob("slurm-*.log")
    return log.stem.removeprefix("slurm-")


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=240)
    return process.returncode, stderr


def test_a_killed_worker_queues_the_job_again_and_it_goes_on(training, cluster, undisturbed, wait_for):
    process = launch(training, cluster)
    wait_for(lambda: training.checkpoints(), process)
    os.kill(process_of(training, 1), signal.SIGKILL)
    code, stderr = end_of(process)
    assert code == 0, stderr
    assert "running, restart 1" in stderr
    assert training.losses() == undisturbed
    log = (training.folder / "out" / "logs" / "rank-00000.log").read_text()
    assert "resumed from saved/step-" in log
    assert (training.folder / "out" / "failures").read_text() == "1\n"


def test_a_request_to_save_before_the_time_limit_costs_no_step(training, cluster, undisturbed, wait_for):
    process = launch(training, cluster, "--max-restarts", "0")
    wait_for(lambda: len(training.steps()) > 24, process)
    # What Slurm sends to the script itself when the time limit comes near.
    subprocess.run(["scancel", "--batch", "--signal=USR1", job_of(training)], env=cluster, check=True)
    code, stderr = end_of(process)
    assert code == 0, stderr
    assert training.losses() == undisturbed
    extra = [step for step in training.checkpoints() if step % 20]
    assert len(extra) == 1  # saved where it stood
    assert not (training.folder / "out" / "failures").exists()


def test_a_preempted_job_goes_on_and_no_failure_is_counted(training, cluster, undisturbed, wait_for):
    process = launch(training, cluster, "--max-restarts", "0")
    wait_for(lambda: len(training.steps()) > 24, process)
    # What Slurm sends to the processes, and not to the script, when the grace time begins.
    subprocess.run(["scancel", "--signal=TERM", job_of(training)], env=cluster, check=True)
    code, stderr = end_of(process)
    assert code == 0, stderr
    assert "running, restart 1" in stderr
    assert training.losses() == undisturbed
    assert not (training.folder / "out" / "failures").exists()


def test_a_cancelled_job_stays_cancelled(training, cluster, wait_for):
    process = launch(training, cluster)
    wait_for(lambda: len(training.steps()) > 10, process)
    job = job_of(training)
    subprocess.run(["scancel", job], env=cluster, check=True)
    code, stderr = end_of(process)
    assert code != 0
    assert "cancelled" in stderr
    time.sleep(8)  # longer than a job that is queued again waits
    queue = subprocess.run(["squeue", "--noheader", "--job", job], env=cluster, capture_output=True, text=True)
    assert queue.stdout.strip() == ""
    assert "queued again" not in (training.folder / "out" / f"slurm-{job}.log").read_text()


def test_the_exit_code_of_bad_input_is_the_runs_and_nothing_is_tried_again(training, cluster):
    (training.folder / "saved" / "step-00000007").mkdir(parents=True)
    (training.folder / "saved" / "step-00000007" / "manifest.json").write_text("{}")
    code, stderr = end_of(launch(training, cluster))
    assert code == 2, stderr
    log = (training.folder / "out" / f"slurm-{job_of(training)}.log").read_text()
    assert "exit code 2: starting again would not help" in log
