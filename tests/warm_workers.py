"""Processes of other engines that start warm: forked where their program and its test-only shim are loaded.

    Server(MODULES, environment=...)          loads them once (`tests/warm.py`)
    WarmProcess(..., script=WORKERS, server=...)    a command forked from it, which forks its workers
    with workers_from(server): local.run(...)       workers forked from it

What tests protect about the start of workers (their command line, what they find of a device) needs cold ones.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import pytest
from tests.warm import Descriptor, Server

from meshwright.engines import local

WORKERS = Path(__file__)


class ForkedPython:
    """A forked worker, used as a `subprocess.Popen` is."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        """Exit code; the negative signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends. Raises TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return code

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()


def _started(kind: str, arguments: Sequence[str], env: Mapping[str, str], log: TextIO) -> ForkedPython:
    context = multiprocessing.get_context(kind)
    process = context.Process(
        target=_run_python, args=(list(arguments), dict(env), str(Path.cwd()), Descriptor(log.fileno()))
    )
    process.start()
    return ForkedPython(process)


def _run_python(arguments: list[str], environment: dict[str, str], folder: str, log: Descriptor) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number in (1, 2):
        os.dup2(log.number, number)
    multiprocessing.current_process()._config["daemon"] = False  # it may have writers of its own
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


@contextmanager
def workers_from(server: Server) -> Iterator[None]:
    """Let `local.run` fork workers from a server."""

    def start(arguments: Sequence[str], *, env: Mapping[str, str], log: TextIO) -> ForkedPython:
        with server.serving():
            return _started("forkserver", arguments, env, log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "start_python", start)
        yield


def _fork_workers() -> None:
    """Let the command of this process fork its workers, and ask for devices here, where the program is loaded."""
    from meshwright.engines.megatron import probe as megatron
    from meshwright.engines.torchtitan import probe as torchtitan

    vars(local)["start_python"] = lambda arguments, *, env, log: _started("fork", arguments, env, log)
    for probe in (megatron, torchtitan):
        assert hasattr(probe, "ask")
        vars(probe)["ask"] = lambda *_, detect=probe.detect, **__: asdict(detect())


if __name__ != "tests.warm_workers":
    _fork_workers()
