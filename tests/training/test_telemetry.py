"""The step log and the events survive what a checkpoint survives."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from meshwright.training.telemetry import EVENTS, STEPS, StepLogFile, log_event


def test_lines_are_on_the_disk_after_a_sync_and_when_the_log_is_closed(tmp_path, unsynced):
    log = StepLogFile(tmp_path)
    log.write({"step": 1})
    assert unsynced(tmp_path) == [STEPS]
    log.sync()
    assert unsynced(tmp_path) == []
    log.write({"step": 2})
    log.close()
    assert unsynced(tmp_path) == []
    assert [json.loads(line)["step"] for line in (tmp_path / STEPS).read_text().splitlines()] == [1, 2]


def test_events_are_on_the_disk(tmp_path, unsynced):
    log_event(tmp_path, {"step": 1})
    log_event(tmp_path, {"step": 2})
    assert unsynced(tmp_path) == []
    assert len((tmp_path / EVENTS).read_text().splitlines()) == 2


def test_a_checkpoint_of_a_training_is_never_newer_than_the_lines_of_its_steps(tiny_run, tmp_path):
    """The order on the disk: the log is synced before each manifest is written."""
    script = tmp_path / "order.py"
    script.write_text("""
import os
from pathlib import Path
fsync = os.fsync
def sync(handle):
    fsync(handle)
    with Path("order.txt").open("a") as stream:
        stream.write(Path(os.readlink(f"/proc/self/fd/{handle}")).name + "\\n")
os.fsync = sync
""")
    training = tiny_run(tmp_path, train="{steps: 4, checkpoint: {folder: saved, every_steps: 2}}")
    training.train(script=script)
    order = [
        name.split(".")[1] if "manifest" in name else name  # a manifest is synced as a partial file
        for name in (tmp_path / "order.txt").read_text().splitlines()
        if name == STEPS or "manifest" in name
    ]
    manifests = [index for index, name in enumerate(order) if name == "manifest"]
    assert len(manifests) == 2
    for number, index in enumerate(manifests, start=1):  # written beside the next steps, which may be done first
        assert order[:index].count(STEPS) >= number, order
