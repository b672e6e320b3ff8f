"""Processes that start warm: forked from a server that has imported PyTorch and the native engine once.

A start from nothing imports for three seconds and more, each rank again; a fork takes milliseconds. What such a
process does afterwards is what a cold one does: a session of its own, its own environment, files for stdout and
stderr. What a test protects about the start itself (`python -m meshwright`, torchrun, what ranks find in their command
line) needs a cold one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch.distributed.fsdp",
    "meshwright.engines.native.rehearsal",
    "meshwright.engines.native.trainer",
    "meshwright.cli.train",
    "tests.warm",
)


class WarmProcess:
    """The command line `meshwright ARGUMENTS` in `folder`, used as a `subprocess.Popen` is."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        environment: dict[str, str],
        measures: bool = False,
        in_one: bool = False,
    ) -> None:
        """Start it, at the head of a process group.

        `measures`: a training measures this machine first. `in_one`: stderr goes where stdout goes.
        """
        self._outputs = [folder / ".stdout", folder / (".stdout" if in_one else ".stderr")]
        for path in self._outputs:
            path.write_text("")
        multiprocessing.set_forkserver_preload(list(PRELOADED))
        context = multiprocessing.get_context("forkserver")
        ready, is_ready = context.Pipe(duplex=False)
        with ready:
            with is_ready:
                self._process: ForkServerProcess = context.Process(
                    target=_run_command,
                    args=(list(arguments), folder, environment, self._outputs, measures, is_ready),
                    daemon=True,  # one that a failed test leaves ends with the tests
                )
                self._process.start()
            ready.recv()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; the negative signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As `returncode`."""
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait until it ends; what it wrote to stdout and stderr. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("meshwright", timeout or 0.0)
        stdout, stderr = (path.read_text() for path in self._outputs)
        return stdout, stderr

    def send_signal(self, signum: int) -> None:
        """Send a signal to this process alone."""
        os.kill(self.pid, signum)

    def kill(self) -> None:
        """SIGKILL this process alone."""
        self.send_signal(signal.SIGKILL)


def _run_command(
    arguments: list[str],
    folder: Path,
    environment: dict[str, str],
    outputs: list[Path],
    measures: bool,
    is_ready: Any,
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(outputs, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    multiprocessing.current_process()._config["daemon"] = False  # it may have ranks of its own
    sys.argv = ["meshwright", *arguments]
    is_ready.send(None)
    is_ready.close()

    from meshwright.cli import main

    if find_spec("torch") is not None:
        from meshwright.training import processes

        processes.start_processes = partial(processes.start_processes, start_method="fork")
        if not measures:
            measure_nothing(setattr)
    sys.exit(main.run(arguments))


def measure_nothing(replace: Callable[[Any, str, Any], None]) -> None:
    """Let trainings expect something without measuring this machine first, which costs more than their steps.

    Tests of the expectation itself measure: test_expectation.py, test_trainer.py, test_record.py, cli/test_train.py.
    """
    import meshwright.engines.native.expectation as expectation
    import meshwright.training.device as device
    from meshwright.engines.native.machine_measurement import MachineMeasurement

    rates = device.Rates(matmul_flops_per_s=dict.fromkeys(device.FORMATS, 1e11), copy_bytes_per_s=1e10)
    assert hasattr(expectation, "measure_machine")
    replace(expectation, "measure_machine", lambda *_, **__: MachineMeasurement(rates=rates))


def start_warm_ranks(function: Callable[..., None], args: tuple[Any, ...] = (), **options: Any) -> Any:
    """Take the place of PyTorch's `start_processes`: ranks have this process's environment, and start warm."""
    from torch.multiprocessing.spawn import start_processes

    multiprocessing.set_forkserver_preload(list(PRELOADED))
    return start_processes(
        _run_rank, (dict(os.environ), function, args), **options | {"start_method": "forkserver"}
    )


def _run_rank(
    rank: int, environment: dict[str, str], function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    function(rank, *args)
