"""Processes that start warm: forked from a server that has imported PyTorch and the native engine once.

A start from nothing imports for three seconds and more, each rank again; a fork takes milliseconds. What such a
process does afterwards is what a cold one does: a session of its own, its own environment, files for stdout and
stderr. What a test protects about the start itself (`python -m meshwright`, torchrun, what ranks find in their command
line) needs a cold one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

PRELOADED = (
    "torch._dynamo",  # ranks of several processes import it for two seconds: FSDP, DTensor and stages use it
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "numpy.random",
    "altair",  # a third of a second of each page
    "meshwright.engines.native.contract",
    "meshwright.engines.native.rehearsal",
    "meshwright.engines.native.trainer",
    "meshwright.report.training_page",
    *(
        f"meshwright.cli.{name}"
        for name in ("train", "plan", "bench_train", "estimate", "scale", "checkpoint", "evaluate", "generate")
    ),
    "tests.warm",
    "tests.warm_frozen",
)


class Server:
    """A server of its own for processes of another program, which has `modules` loaded in `environment`."""

    def __init__(self, modules: Sequence[str], *, environment: Mapping[str, str]) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload([*modules, "tests.warm_frozen"])  # it passes over what cannot be imported
        self._environment = environment

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Processes that are started here are forked from this server."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._environment.items():
                patch.setenv(name, value)
            self._server.ensure_running()
            patch.setattr(forkserver, "connect_to_new_process", self._server.connect_to_new_process)
            yield


class Descriptor:
    """An open file that goes to a process with its arguments."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[..., Descriptor], tuple[Any]]:
        """Called as the process starts, which gets a copy."""
        return _received, (reduction.DupFd(self.number),)


def _received(copy: Any) -> Descriptor:
    return Descriptor(copy.detach())


def start_command(
    arguments: Sequence[str],
    *,
    folder: Path,
    environment: dict[str, str],
    descriptors: Sequence[int],
    measures: bool = False,
    script: Path | None = None,
    server: Server | None = None,
) -> ForkServerProcess:
    """Start `meshwright ARGUMENTS` in `folder`, at the head of a process group.

    `descriptors` are its stdin, stdout and stderr. `measures`: a training measures this machine first. `script`: Python
    that runs before the command, in its process and so in all that are forked from it. `server`: another one than that
    of the native engine.
    """
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    context = multiprocessing.get_context("forkserver")
    inherited = [Descriptor(number) for number in descriptors]
    ready, is_ready = context.Pipe(duplex=False)
    with ready:
        with is_ready:
            process = context.Process(
                target=_run_command,
                args=(list(arguments), folder, environment, inherited, measures, script, is_ready),
                daemon=True,  # one that a failed test leaves ends with the tests
            )
            with server.serving() if server else nullcontext():
                process.start()
        ready.recv()
    return process


class WarmProcess:
    """The command line `meshwright ARGUMENTS` in `folder`, used as a `subprocess.Popen` is."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        environment: dict[str, str],
        script: Path | None = None,
        server: Server | None = None,
    ) -> None:
        """Start it; its output goes to files. `script`, `server`: see `start_command`."""
        self._outputs = [folder / ".stdout", folder / ".stderr"]
        with (
            Path(os.devnull).open() as nothing,
            self._outputs[0].open("w") as stdout,
            self._outputs[1].open("w") as stderr,
        ):
            self._process = start_command(
                arguments,
                folder=folder,
                environment=environment,
                descriptors=[file.fileno() for file in (nothing, stdout, stderr)],
                script=script,
                server=server,
            )
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
    descriptors: list[Descriptor],
    measures: bool,
    script: Path | None,
    is_ready: Any,
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor.number, number)
        os.close(descriptor.number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  multiprocessing has closed the other
    multiprocessing.current_process()._config["daemon"] = False  # it may have ranks of its own
    sys.argv = ["meshwright", *arguments]
    is_ready.send(None)
    is_ready.close()
    if arguments[:1] == ["kernels"]:
        # It compiles, which Triton cannot where it was imported as its interpreter.
        os.execve(sys.executable, [sys.executable, "-m", *sys.argv], environment)

    from meshwright.cli import main

    if find_spec("torch") is not None:
        from meshwright.training import processes

        processes.start_processes = _fork_ranks
        if not measures:
            measure_nothing(setattr)
    if script is not None:
        runpy.run_path(str(script))
    sys.exit(main.run(arguments))


def measure_nothing(replace: Callable[[Any, str, Any], None]) -> None:
    """Let trainings expect something without measuring this machine first, which costs more than their steps.

    Tests of the expectation itself measure: test_expectation.py, test_record.py, cli/test_train.py.
    """
    import meshwright.engines.native.expectation as expectation
    import meshwright.training.device as device
    from meshwright.engines.native.machine_measurement import MachineMeasurement

    rates = device.Rates(matmul_flops_per_s=dict.fromkeys(device.FORMATS, 1e11), copy_bytes_per_s=1e10)
    assert hasattr(expectation, "measure_machine")
    replace(expectation, "measure_machine", lambda *_, **__: MachineMeasurement(rates=rates))


def _fork_ranks(*args: Any, **options: Any) -> Any:
    """Take the place of PyTorch's `start_processes` in a process that is warm itself."""
    from torch.multiprocessing.spawn import start_processes

    return start_processes(*args, **options | {"start_method": "fork"})


def start_warm_ranks(function: Callable[..., None], args: tuple[Any, ...] = (), **options: Any) -> Any:
    """Take the place of PyTorch's `start_processes`: ranks have this process's environment, and start warm."""
    from torch.multiprocessing.spawn import start_processes

    multiprocessing.set_forkserver_preload(list(PRELOADED))
    return start_processes(_run_rank, (dict(os.environ), function, args), **options | {"start_method": "forkserver"})


def _run_rank(rank: int, environment: dict[str, str], function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    function(rank, *args)
