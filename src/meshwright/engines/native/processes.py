"""One process a device: started here, or by torchrun and found in the environment.

`run_ranks(target, payload, num_ranks=N)` calls `target(rank, num_ranks, payload)` in N processes that form one
process group, and waits. When one is lost the others end too, and the whole set starts again if restarts are left:
the target resumes from its last checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from meshwright.errors import InputError, MeshwrightError

Target = Callable[[int, int, Any], None]
TIMEOUT = timedelta(minutes=10)
GRACE_S = 20.0  # what the others get to end by themselves after one was lost
CPU_BACKEND, GPU_BACKEND = "gloo", "cpu:gloo,cuda:nccl"


class WorkerLostError(MeshwrightError):
    """A process of the run ended without being asked to."""

    exit_code = 1


def under_torchrun() -> bool:
    """Whether a launcher has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(
    target: Target,
    payload: Any,
    *,
    num_ranks: int,
    device_type: str,
    max_restarts: int = 0,
    again: Any = None,
) -> None:
    """Run `target` on every rank and return when all have ended. `payload` and `target` must pickle.

    After a process was lost all start again, with `again` as their payload.

    Raises InputError when torchrun started another number of processes, WorkerLostError when a process was lost
    and no restart is left, and the target's own MeshwrightError when it raised one.
    """
    if under_torchrun():
        _run_launched(target, payload, num_ranks=num_ranks, device_type=device_type)
    elif num_ranks == 1:
        target(0, 1, payload)
    else:
        for restarts_left in range(max_restarts, -1, -1):
            try:
                return _run_here(target, payload, num_ranks=num_ranks, device_type=device_type)
            except WorkerLostError as error:
                if not restarts_left:
                    raise
                print(f"{error.message}; starting again", file=sys.stderr, flush=True)
                payload = again


def _run_launched(target: Target, payload: Any, *, num_ranks: int, device_type: str) -> None:
    rank, launched = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if launched != num_ranks:
        hint = f"start it with --nproc-per-node so that there are {num_ranks} in all"
        raise InputError(
            "the plan needs another number of processes", got=launched, allowed=num_ranks, hint=hint
        )
    with process_group(rank=rank, num_ranks=num_ranks, device_type=device_type):
        target(rank, num_ranks, payload)


def _run_here(target: Target, payload: Any, *, num_ranks: int, device_type: str) -> None:
    port = free_port()
    failures = mp.get_context("spawn").SimpleQueue()
    workers = start_processes(
        _worker,
        args=(target, payload, num_ranks, device_type, port, failures),
        nprocs=num_ranks,
        join=False,
        start_method="spawn",
    )
    assert workers is not None
    try:
        with _passing_on_sigterm(workers):
            while not workers.join(timeout=1.0, grace_period=GRACE_S):
                pass
    except (ProcessExitedException, ProcessRaisedException) as error:
        if not failures.empty():
            raise failures.get() from None
        raise WorkerLostError(
            f"process {error.error_index} of {num_ranks} was lost: {_first_words(error)}",
            hint="resume from the last checkpoint with --resume",
        ) from error


def _first_words(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


@contextmanager
def _passing_on_sigterm(workers: Any) -> Iterator[None]:
    def pass_on(signum: int, frame: object) -> None:
        for pid in workers.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    try:
        before = signal.signal(signal.SIGTERM, pass_on)
    except ValueError:  # off the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _worker(
    rank: int, target: Target, payload: Any, num_ranks: int, device_type: str, port: int, failures: Any
) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if device_type == "cpu":  # divide the cores, or every process starts as many threads as there are cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        with process_group(rank=rank, num_ranks=num_ranks, device_type=device_type):
            target(rank, num_ranks, payload)
    except MeshwrightError as error:
        if rank == 0:
            failures.put(error)
        raise
    # All is written and the group is left. An orderly end would tear down threads of PyTorch in an order that now
    # and then aborts the process, and a run that is done would count as lost.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def process_group(*, rank: int, num_ranks: int, device_type: str) -> Iterator[None]:
    """The default process group of this process, left in order at the end."""
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    backend = GPU_BACKEND if device_type == "cuda" else CPU_BACKEND
    dist.init_process_group(backend, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """A TCP port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
