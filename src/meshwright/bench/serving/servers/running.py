"""A started server: free port, log, health check, and its end with all of its processes.

with running(command, folder=...) as server:   the server answers
    server.url
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError

POLL_S = 0.1
STOP_S = 20.0
LOG_NAME = "server.log"
SHOWN_LINES = 5
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerStartError(MeshwrightError):
    """A server did not begin to answer."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """Command line of a server."""

    name: str
    argv: tuple[str, ...]
    model: str  # as requests name it
    port: int
    health: str = "/health"
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    served: Mapping[str, Any] | None = None  # shapes and formats of the model, for the records

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A server that answers."""

    command: ServerCommand
    start_s: float  # until it answered
    log: Path
    pid: int  # of the process that all of the server's are descendants of


@contextmanager
def running(
    command: ServerCommand, *, folder: Path, timeout_s: float, waiting: Callable[[float], None] = lambda seconds: None
) -> Iterator[RunningServer]:
    """Start a server, wait until it is healthy, and end it with all of its processes afterwards.

    Its output goes to `server.log` in `folder`. Raises ServerStartError with the end of the log when it ends or does
    not answer within `timeout_s`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / LOG_NAME
    supervised = [sys.executable, "-m", "meshwright.bench.serving.servers.supervise", *command.argv]
    begin_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            supervised, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
            env=os.environ | dict(command.environment), start_new_session=True,
        )  # fmt: skip
    try:
        while not _is_healthy(command):
            spent_s = time.monotonic() - begin_s
            if process.poll() is not None:
                raise ServerStartError(
                    f"the server {command.name} ended with exit code {process.returncode}: {end_of(log)}",
                    hint=f"its output is in {log}",
                )
            if spent_s > timeout_s:
                raise ServerStartError(
                    f"the server {command.name} did not answer within {timeout_s:g} s: {end_of(log)}",
                    hint=f"--start-timeout SECONDS; its output is in {log}",
                )
            waiting(spent_s)
            time.sleep(POLL_S)
        yield RunningServer(command=command, start_s=time.monotonic() - begin_s, log=log, pid=process.pid)
    finally:
        _stop(process)


def _is_healthy(command: ServerCommand) -> bool:
    try:
        with NO_PROXY.open(f"{command.url}{command.health}", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Close the supervisor's stdin, and wait for it."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_of(log: Path) -> str:
    """Last lines of a log, on one line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    shown = [" ".join(line.split())[:200] for line in lines if line.strip()][-SHOWN_LINES:]
    return " | ".join(shown) or "it printed nothing"
