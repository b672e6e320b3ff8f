"""Signals that stop a training, and the files that remain."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

pytest.importorskip("torch")

from meshwright.training.signals import StopRequest, stop_on_signals

LONG = "{steps: 100000, checkpoint: {folder: saved, every_steps: 100000}}"
TWO = "{data_shard: 2, sharding: parameters}"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "meshwright")


def stopped(training, process, *, exit_code=128 + signal.SIGTERM):
    """The record of a run that was asked to stop: what it says was saved is on the disk."""
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == exit_code, stderr
    record = json.loads(stdout)
    assert record["ending"] == "stopped"
    assert training.checkpoints() == [record["statistics"]["steps"]] == [len(training.losses())]
    return stderr


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_stops(tiny_run, tmp_path, wait_for, signum):
    training = tiny_run(tmp_path, train=LONG)
    process = training.start()
    wait_for(training.steps, process)
    process.send_signal(signum)
    assert f"{signal.Signals(signum).name}: stopping after this step" in stopped(training, process)


def test_the_second_interrupt_stops_at_once(monkeypatch):
    told = []
    with stop_on_signals(told.append) as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.asked
        os.kill(os.getpid(), signal.SIGTERM)  # asks for what was asked for already
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert told == [signal.SIGINT]


SLOW_DATA = """
import time
from pathlib import Path
from meshwright.engines.native import trainer

def slow(*_, **__):
    Path("opening").touch()
    for _ in range(30_000):  # Python hears a signal between calls, as data is read in many
        time.sleep(0.01)

assert hasattr(trainer, "open_batch_loader")
trainer.open_batch_loader = slow
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("plan", ["{data_shard: 1}", pytest.param(TWO, marks=pytest.mark.distributed)])
def test_while_the_data_is_opened_a_signal_stops_at_once(tiny_run, tmp_path, wait_for, plan, signum):
    training = tiny_run(tmp_path / "run", train=LONG, parallel=plan)
    (tmp_path / "slow.py").write_text(SLOW_DATA)
    process = training.start(script=tmp_path / "slow.py")
    wait_for((training.folder / "opening").exists, process)
    os.killpg(process.pid, signum)  # as a terminal and a scheduler send it
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, stderr
    assert "Traceback" not in stderr
    assert not training.steps()


def test_an_interrupt_after_sigterm_is_the_first_one():
    request = StopRequest()
    request._handle(signal.SIGTERM, None)
    request._handle(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        request._handle(signal.SIGINT, None)


@pytest.mark.distributed
def test_an_interrupt_reaches_all_processes(tiny_run, tmp_path, wait_for):
    """As a terminal sends it: to the launcher and to its processes."""
    training = tiny_run(tmp_path, train=LONG, parallel=TWO)
    process = training.start()
    wait_for(training.steps, process)
    os.killpg(process.pid, signal.SIGINT)
    stopped(training, process)


@pytest.mark.slow  # engines/launch/test_local.py stops a run under torchrun
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform == "win32", reason="torchrun is started as on clusters")
def test_sigterm_to_torchrun_saves(tiny_run, tmp_path, wait_for):
    training = tiny_run(tmp_path, train=LONG, parallel=TWO)
    process = training.start(under=TORCHRUN)
    wait_for(training.steps, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode != 0  # torchrun's own
    assert training.checkpoints() == [len(training.losses())]
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["ending"] == "stopped"
