"""`launch --on local` with real processes: a toy run, a lost worker, the run's own answer."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.distributed
SECTIONS = {
    "precision": "fp32",
    "cluster": "cpu-2x1",  # workers do not measure this machine before they train
    "parallel": "{data_shard: 2, sharding: parameters}",
    "optimizer": "{learning_rate: 1.0e-3, schedule: constant}",
    "train": "{steps: 24, checkpoint: {folder: saved, every_steps: 4}}",
}
LONG = SECTIONS | {"train": "{steps: 5000, checkpoint: {folder: saved, every_steps: 4}}"}
ALONE_AT = {"cluster": "cpu-1x1", "parallel": "{data_shard: 1}"}
ALONE = SECTIONS | ALONE_AT  # where one process shows as much as two


def start(training, *arguments: str) -> subprocess.Popen[str]:
    training.folder.mkdir(parents=True, exist_ok=True)
    (training.folder / "run.yaml").write_text(training.text)
    command = [sys.executable, "-m", "meshwright", "launch", "run.yaml", "--on", "local", "--out", "out", "--json"]
    return subprocess.Popen(
        [*command, *arguments], cwd=training.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def workers_of(pid: int) -> dict[int, int]:
    """Rank -> process, of the processes that torchrun started below `pid`."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found: dict[int, int] = {}
    for child in map(int, children):
        words = dict(w.partition(b"=")[::2] for w in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"))
        if b"RANK" in words:
            found[int(words[b"RANK"])] = child
        found |= workers_of(child)
    return found


@pytest.mark.when_touched  # exit codes of `launch` are below, a lost process is in training/test_processes.py
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks processes up in /proc")
def test_a_lost_worker_starts_again_and_a_stopped_run_does_not(tmp_path, tiny_run, wait_for, meshwright, monkeypatch):
    """The losses are those of a run that nothing disturbs, and nobody else trains in its folders meanwhile."""
    alone, killed = tiny_run(tmp_path / "alone", **SECTIONS), tiny_run(tmp_path / "killed", **LONG)
    process = start(killed, "--max-restarts", "2")
    wait_for(killed.checkpoints, process)
    workers = workers_of(process.pid)
    assert len(workers) == 2
    assert_others_are_refused(killed.folder, workers.values(), meshwright, monkeypatch)
    os.kill(workers[1], signal.SIGKILL)
    before = len(killed.steps())
    wait_for(lambda: len(killed.steps()) > max(24, before), process)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert stderr.count("starting again") == 1
    assert "resumed from saved/step-" in stderr
    document = json.loads(stdout)  # nothing of the run on stdout
    assert document["exit_code"] == process.returncode
    assert document["files"].keys() == {"out/run.yaml"}
    assert killed.checkpoints()[-1] == len(killed.losses())
    alone.train()
    assert killed.losses()[:24] == alone.losses()


def assert_others_are_refused(folder: Path, workers: Iterable[int], meshwright, monkeypatch) -> None:
    """Start two trainings in a folder where `workers` train."""
    for worker in workers:  # they hold their folder, and leave the processors to this one
        os.kill(worker, signal.SIGSTOP)
    monkeypatch.chdir(folder)
    for words in ("launch run.yaml --on local --resume", "train run.yaml --resume"):  # nor does another write between
        second = meshwright(*words.split(), "--out", "out")
        assert second.exit_code == 2
        expected = "another training (writes|saves its checkpoints) there now: got '(out|saved)'"
        assert re.search(expected, second.stderr)
    for worker in workers:
        os.kill(worker, signal.SIGCONT)


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell a process of its parent's end")
@pytest.mark.when_touched  # the last test starts the same processes, test_signals.py ends them
def test_a_killed_launcher_leaves_nothing_that_trains(tmp_path, tiny_run, wait_for):
    """One worker, as another of the same launcher ends in the same way."""
    training = tiny_run(tmp_path, **LONG | ALONE_AT)
    process = start(training)
    wait_for(lambda: len(training.steps()) > 1, process)
    (worker,) = workers_of(process.pid).values()
    training.kill(process)
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline_s, "it trains on"
        time.sleep(0.1)
    assert training.checkpoints()  # asked, not killed


@pytest.mark.when_touched  # the next test starts the same processes and hands on their exit code
def test_a_run_that_ends_is_exit_code_0(tmp_path, tiny_run):
    training = tiny_run(tmp_path, **ALONE | {"train": "{steps: 3}"})
    process = start(training)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == json.loads(stdout)["exit_code"] == 0, stderr
    record = json.loads((training.folder / "out" / "record.json").read_text())
    assert (record["ending"], record["statistics"]["steps"]) == ("done", 3)
    assert len(training.losses()) == 3
    assert (training.folder / "out" / "report.html").is_file()


def test_bad_input_is_exit_code_2_and_is_tried_once(tmp_path, tiny_run):
    training = tiny_run(tmp_path, **ALONE, data="{source: nowhere.txt, sequence_length: 16}")
    process = start(training, "--max-restarts", "2")
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == json.loads(stdout)["exit_code"] == 2, stderr
    assert "nowhere.txt" in stderr
    assert "starting again" not in stderr


@pytest.mark.slow  # the exit code comes through torchrun as in the test above; native refuses in its own tests
def test_checkpoints_in_the_way_are_bad_input(tmp_path, tiny_run):
    training = tiny_run(tmp_path, **SECTIONS | {"train": "{steps: 4, checkpoint: {folder: saved, every_steps: 2}}"})
    training.train()
    process = start(training, "--out", "another")
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "already holds checkpoints" in stderr
    assert len(training.losses()) == 4
