"""The processes of a launch: how they are asked to stop, and what is left of one that is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from meshwright.engines import local
from meshwright.engines.base import Launch

STOPS = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]).write_text("stopped"), sys.exit(0)))
pathlib.Path(sys.argv[2]).touch()
signal.pause()
"""
LEAVES = """
import pathlib, subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(left.pid))
sys.exit(3)
"""


def launch(script: str, *arguments: Path) -> Launch:
    return Launch(argv=("python", "-c", script, *map(str, arguments)), files={}, num_processes=1)


def wait_until(said) -> None:
    deadline_s = time.monotonic() + 60
    while not said():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_is_passed_on_and_waited_for(tmp_path, signum):
    started = tmp_path / "started"

    def ask() -> None:
        wait_until(started.exists)
        os.kill(os.getpid(), signum)

    asking = threading.Thread(target=ask)
    asking.start()
    local.run(launch(STOPS, tmp_path / "said", started), folder=tmp_path)
    asking.join()
    assert (tmp_path / "said").read_text() == "stopped"


def test_what_a_lost_process_has_started_ends_with_it(tmp_path):
    with pytest.raises(local.ProcessLostError, match="exit code 3") as caught:
        local.run(launch(LEAVES, tmp_path / "left"), folder=tmp_path)
    assert not caught.value.was_asked_to_stop
    left = (tmp_path / "left").read_text()

    def is_gone() -> bool:
        listed = subprocess.run(["ps", "-o", "stat=", "-p", left], capture_output=True, text=True, check=False)
        return not listed.stdout.strip() or listed.stdout.startswith("Z")

    wait_until(is_gone)


def test_the_error_is_told_without_torchs_prefix(tmp_path):
    script = "import sys; print('[rank0]: ValueError: no'); print('[rank0]: hint: none'); sys.exit(1)"
    with pytest.raises(local.ProcessLostError, match=r"exit code 1: ValueError: no\n"):
        local.run(launch(script), folder=tmp_path)
