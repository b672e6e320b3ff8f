"""Processes of a launch on this machine: one per device, started together and ended together.

They get the variables of torchrun: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Their output goes to
FOLDER/logs/rank-N.txt. Signals that request a stop are forwarded to them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from meshwright.engines.base import Launch
from meshwright.errors import MeshwrightError
from meshwright.files import held_locks, write_atomically
from meshwright.specs.run import Run
from meshwright.training.machine import OWN_WORKER
from meshwright.training.parent_watch import PARENT
from meshwright.training.rendezvous import free_port, under_launcher
from meshwright.training.signals import STOPPED_EXIT_CODE, stop_on_signals

LOGS = "logs"
POLL_S = 0.1
TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ")  # of tracebacks in a process group
GRACE_S = 20.0  # for the other processes to end by themselves after a failure


class ProcessLostError(MeshwrightError):
    """A process of a launch ended too early."""

    exit_code = 1
    was_asked_to_stop = False  # then no restart follows


def with_accelerator_file(launch: Launch, run: Run) -> Launch:
    """Return `launch` with the file of a user's accelerator, which its run files then name beside them.

    Hosts and pods that have the files of a launch need not have the folder of its run file.
    """
    from meshwright.runfile.accelerator_file import is_accelerator_file
    from meshwright.runfile.writing import given_section

    cluster = given_section(run, "cluster")
    path = (isinstance(cluster, Mapping) and cluster.get("accelerator")) or ""
    if not is_accelerator_file(path):
        return launch
    name = Path(path).name
    files = {file: text.replace(path, name) for file, text in launch.files.items()}
    return replace(launch, files={**files, name: Path(path).read_text(encoding="utf-8")})


def write_files(launch: Launch, folder: Path) -> None:
    """Put the files of `launch` below `folder`."""
    for name, text in launch.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)


def run(launch: Launch, *, folder: Path, watch: Callable[[], None] = lambda: None, splits_cores: bool = False) -> None:
    """Start all processes, or this rank's under a launcher, and wait. `watch` is called while they run.

    `splits_cores`: the processes run on this machine's CPU, and each gets its part of the threads. Raises
    ProcessLostError when one fails, and KeyboardInterrupt at the second Ctrl-C; the other processes are ended then.
    """
    ranks = [int(os.environ["RANK"])] if under_launcher() else list(range(launch.num_processes))
    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    port = free_port()
    with ExitStack() as stack:
        processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in ranks:
                log = stack.enter_context((folder / LOGS / f"rank-{rank}.txt").open("a", encoding="utf-8"))
                env = os.environ | _environment(launch, rank, port=port, splits_cores=splits_cores)
                processes[rank] = start_python(launch.argv[1:], env=env, log=log)
            with stop_on_signals(lambda _: _ask_to_stop(processes)) as request:
                try:
                    _wait(processes, folder=folder, watch=watch)
                except ProcessLostError as error:
                    error.was_asked_to_stop = request.asked
                    raise
        finally:
            _end(processes)


def start_python(arguments: Sequence[str], *, env: Mapping[str, str], log: TextIO) -> subprocess.Popen[bytes]:
    """Start Python at the head of a session: this process receives Ctrl-C and forwards it. Both hold the locks."""
    return subprocess.Popen(
        [sys.executable, *arguments], env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        pass_fds=held_locks,
    )  # fmt: skip


def _environment(launch: Launch, rank: int, *, port: int, splits_cores: bool) -> dict[str, str]:
    own = {OWN_WORKER: "1", PARENT: str(os.getpid())}
    if under_launcher():
        return dict(launch.env) | own
    env = own | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(launch.num_processes),
        "LOCAL_WORLD_SIZE": str(launch.num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if splits_cores and "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // launch.num_processes))
    return env | dict(launch.env)


def _wait(processes: dict[int, subprocess.Popen[bytes]], *, folder: Path, watch: Callable[[], None]) -> None:
    while True:
        codes = {rank: process.poll() for rank, process in processes.items()}
        watch()
        for rank, code in codes.items():
            if code and code != STOPPED_EXIT_CODE:  # stopped processes end together, after they saved their states
                log = folder / LOGS / f"rank-{rank}.txt"
                raise ProcessLostError(
                    f"process {rank} ended with {_reason(code)}: {_error_line(log)}", hint=f"see {log}"
                )
        if all(code is not None for code in codes.values()):
            return
        time.sleep(POLL_S)


def _reason(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


def _error_line(log: Path) -> str:
    """Return the last line of a log that is an error, else its last line."""
    with suppress(OSError):
        text = log.read_text(encoding="utf-8", errors="replace")
        lines = [TORCH_PREFIX.sub("", line).strip() for line in text.splitlines()]
        errors = [line for line in lines if "Error" in line.partition(":")[0]]
        candidates = errors or [line for line in lines if line]
        return candidates[-1] if candidates else "it printed nothing"
    return "it printed nothing"


def _ask_to_stop(processes: dict[int, subprocess.Popen[bytes]]) -> None:
    for process in processes.values():
        process.terminate()


def _end(processes: dict[int, subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to running processes, then SIGKILL to the process groups of all.

    Processes left over from a failure must not write while restarted ones do.
    """
    _ask_to_stop(processes)
    deadline_s = time.monotonic() + GRACE_S
    for process in processes.values():
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
    for process in processes.values():
        with suppress(ProcessLookupError, PermissionError):  # nothing of its group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
