"""A tiny run that trains in a process of its own, as a user starts it: to be watched, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run file in a folder of its own; checkpoints go to `saved`, results to `out`."""

    folder: Path
    text: str

    def start(self, *arguments: str, under: tuple[str, ...] = ("-m", "meshwright")) -> subprocess.Popen[str]:
        """Start `meshwright train` at the head of a process group; `under` is what Python runs it with."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.yaml").write_text(self.text)
        return subprocess.Popen(
            [sys.executable, *under, "train", "run.yaml", "--out", "out", "--json", *arguments],
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def train(self, *arguments: str, under: tuple[str, ...] = ("-m", "meshwright")) -> dict[str, Any]:
        """Train to the end and return the record."""
        process = self.start(*arguments, under=under)
        stdout, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr
        return json.loads(stdout)

    def kill(self, process: subprocess.Popen[str]) -> None:
        """SIGKILL, and nothing else: what a lost machine looks like."""
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL

    def checkpoints(self) -> list[int]:
        """Steps after which a whole checkpoint stands on the disk."""
        return sorted(int(path.parent.name[5:]) for path in self.folder.glob("saved/step-*/manifest.json"))

    def steps(self) -> list[dict[str, Any]]:
        """The lines of the step log; a killed process may have left half of the last one."""
        path = self.folder / "out" / "steps.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def losses(self) -> list[float]:
        """The loss of every step; each step is there once, in order."""
        entries = self.steps()
        assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1))
        return [entry["loss"] for entry in entries]


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Look until `condition` holds; fail when the process ends first."""
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s
        if process.poll() is not None:
            pytest.fail(f"ended too early: {process.communicate()}")
        time.sleep(0.005)


@pytest.fixture(scope="session")
def wait_for() -> Callable[[Callable[[], object], subprocess.Popen[str]], None]:
    """`wait_for(condition, process)`."""
    return wait_until


@pytest.fixture(scope="session")
def tiny_run(tiny_text: str) -> Callable[..., Training]:
    """`tiny_run(folder, optimizer="{...}")`: the tiny run with other sections, in `folder`."""

    def make(folder: Path, **sections: str) -> Training:
        added = "".join(f"{key}: {value}\n" for key, value in sections.items())
        kept = [line for line in tiny_text.splitlines() if line.split(":")[0] not in sections]
        return Training(folder=folder, text="\n".join(kept) + "\n" + added)

    return make
