"""A process that hangs says where it stands, and the run goes on without it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.training.test_processes import workers_of

from meshwright.training import watchdog
from meshwright.training.watchdog import Watchdog

HANGS_ONCE = """
import os, time
from pathlib import Path
from meshwright.engines.native.batch_loader import BatchLoader

read = BatchLoader.batch

def sleeping_beauty():
    time.sleep(1000)

def batch(self, number):
    if number == 12 and self.coordinates.rank == 1 and not Path("hung").exists():
        Path("hung").touch()
        sleeping_beauty()
    return read(self, number)

BatchLoader.batch = batch
"""


@pytest.mark.distributed
@pytest.mark.when_touched  # test_a_lost_process_is_replaced_and_the_run_goes_on replaces one
def test_a_hanging_process_is_found_and_replaced(tiny_run, tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS_ONCE)
    training = tiny_run(
        tmp_path,
        parallel="{data_shard: 2, sharding: parameters}",
        train="{steps: 30, checkpoint: {folder: saved, every_steps: 5}}",
    )
    process = training.start("--timeout", "8", "--max-restarts", "1", script=script)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert "a step took longer than 8 s" in stderr
    assert "starting again" in stderr
    assert [entry["batch"] for entry in training.steps()] == list(range(30))
    stacks = sorted((tmp_path / "out" / "stacks").iterdir())  # of the attempt that hung
    assert [path.name for path in stacks] == ["rank-00000.txt", "rank-00001.txt"]
    assert "sleeping_beauty" in stacks[1].read_text()
    assert "\n--- process " in stacks[1].read_text()


@pytest.mark.distributed
@pytest.mark.when_touched  # test_a_lost_process_is_replaced_and_the_run_goes_on loses one
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks processes up in /proc")
def test_a_suspended_process_is_named_in_time_with_its_stacks(tiny_run, tmp_path, wait_for):
    training = tiny_run(
        tmp_path, parallel="{data_shard: 2, sharding: parameters}", train="{steps: 100000}", precision="fp32"
    )
    process = training.start("--timeout", "6")
    wait_for(lambda: len(training.steps()) > 3, process)
    os.kill(workers_of(process.pid)[1], signal.SIGSTOP)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 1, stderr
    assert "process 1 of 2 was lost: it was suspended (SIGSTOP)" in stderr
    stacks = {path.name: path.read_text() for path in (tmp_path / "out" / "stacks").iterdir()}
    assert sorted(stacks) == ["rank-00000.txt", "rank-00001.txt"]
    assert all("trainer.py" in text for text in stacks.values())


def test_sigusr2_shows_where_a_run_stands(tiny_run, tmp_path, wait_for):
    training = tiny_run(tmp_path, train="{steps: 100000}")
    process = training.start()
    stacks = tmp_path / "out" / "stacks" / "rank-00000.txt"
    wait_for(training.steps, process)
    process.send_signal(signal.SIGUSR2)
    wait_for(lambda: "trainer.py" in stacks.read_text(), process)
    num_steps = len(training.steps())
    wait_for(lambda: len(training.steps()) > num_steps + 5, process)  # it goes on
    training.kill(process)


@pytest.fixture
def ended(monkeypatch):
    """Instead of ending the process."""
    calls = []
    monkeypatch.setattr(watchdog.os, "_exit", calls.append)
    return calls


def test_a_step_that_takes_too_long(tmp_path, ended, capfd):
    with Watchdog(tmp_path, rank=3, timeout_s=0.2) as watch:
        watch.start_timer()
        deadline_s = time.monotonic() + 60
        while not ended and time.monotonic() < deadline_s:
            time.sleep(0.01)
        watch.stop_timer()
    assert ended[0] == 1
    assert "test_a_step_that_takes_too_long" in (tmp_path / "stacks" / "rank-00003.txt").read_text()
    assert watchdog.stacks(tmp_path) == tmp_path / "stacks"
    assert "process 3: a step took longer than 0.2 s" in capfd.readouterr().err


def test_what_may_take_long_is_not_watched(tmp_path, ended):
    with Watchdog(tmp_path, rank=0, timeout_s=0.2) as watch:
        watch.start_timer()
        watch.stop_timer()
        time.sleep(0.5)
    assert not ended
    assert watchdog.stacks(tmp_path) is None
    watchdog.clear(tmp_path)
    assert not (tmp_path / "stacks").exists()
