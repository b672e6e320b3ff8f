"""An input that is a pipe without a writer, or a device, is refused; one with a writer is read."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from meshwright import json_values
from meshwright.json_values import load_bytes


@pytest.fixture(autouse=True)
def limited(monkeypatch, tmp_path):
    """Wait a moment for a writer, and end a test that waits longer."""
    monkeypatch.setattr(json_values, "PIPE_WAIT_S", 2.0)
    monkeypatch.chdir(tmp_path)
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "{}.yaml"), ("estimate", "{}.yaml"), ("import", "{}.yaml", "--cluster", "h100-8x1"),
        ("import", "{}.toml", "--cluster", "h100-8x1"), ("import", "{}.sh", "--cluster", "h100-8x1"),
        ("import", "{}.py", "--cluster", "h100-8x1"), ("accuracy", "--runs", "{}.csv"), ("calibrate", "{}.json"),
        ("calibrate", "{}.jsonl"), ("report", "{}.json", "--html", "page.html"),
    ],
)  # fmt: skip
def test_a_pipe_without_a_writer_and_a_device_are_refused(meshwright, tmp_path, command):
    name = next(word for word in command if "{" in word)
    os.mkfifo(tmp_path / name.format("pipe"))
    (tmp_path / name.format("device")).symlink_to("/dev/zero")
    for kind in ("pipe", "device"):
        outcome = meshwright(*(word.format(kind) for word in command))
        assert outcome.exit_code == 2, outcome.stderr
        assert outcome.stderr.startswith("error: ")


def test_a_survey_leaves_pipes_out(meshwright, tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    assert meshwright("import", "--survey", tmp_path, "--json").exit_code == 0


def test_a_pipe_with_a_writer_is_read_to_its_end(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"x" * 200_000))
    writer.start()
    assert load_bytes(pipe) == b"x" * 200_000
    writer.join()
