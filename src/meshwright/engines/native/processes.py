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
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from meshwright.engines.native.signals import stop_on_signals
from meshwright.errors import InputError, MeshwrightError

Target = Callable[[int, int, Any], None]
TIMEOUT = timedelta(minutes=10)  # what processes wait for each other, where the caller does not say
GRACE_S = 20.0  # what the others get to end by themselves after one was lost
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun
JOB_RESTARTS = "MESHWRIGHT_RESTARTS"  # set by `meshwright launch`, whose schedulers start whole jobs again
GLOO = "gloo/transport"  # its errors have no type of their own, but name the file they come from
CPU_BACKEND, GPU_BACKEND = "gloo", "cpu:gloo,cuda:nccl"


class WorkerLostError(MeshwrightError):
    """A process of the run ended too early."""

    exit_code = 1
    was_asked_to_stop = False  # then the others need not start again


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What every process is told. Pickles."""

    target: Target
    payload: Any
    num_ranks: int
    device_type: str
    timeout: timedelta


def under_torchrun() -> bool:
    """Whether a launcher has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_processes() -> int:
    """Processes that a launcher has started; 0 without one."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else 0


def run_ranks(
    target: Target,
    payload: Any,
    *,
    num_ranks: int,
    device_type: str,
    timeout: timedelta = TIMEOUT,
    max_restarts: int = 0,
    again: Any = None,
    apart: bool = False,
) -> None:
    """Run `target` on every rank and return when all have ended. `payload` and `target` must pickle.

    A single one runs in this process, unless it is to be `apart`.
    After a process was lost all start again, with `again` as their payload.

    Raises InputError when torchrun started another number of processes, WorkerLostError when a process was lost
    and no restart is left, and the target's own MeshwrightError when it raised one.
    """
    if under_torchrun():
        _run_launched(target, payload, num_ranks=num_ranks, device_type=device_type, timeout=timeout)
    elif num_ranks == 1 and not apart:
        target(0, 1, payload)
    else:
        for restarts_left in range(max_restarts, -1, -1):
            start = _Start(
                target=target, payload=payload, num_ranks=num_ranks, device_type=device_type, timeout=timeout
            )
            try:
                return _run_here(start)
            except WorkerLostError as error:
                if not restarts_left or error.was_asked_to_stop:
                    raise
                print(f"{error.message}; starting again", file=sys.stderr, flush=True)
                payload = again


def is_restart() -> bool:
    """Whether torchrun, or the scheduler of a job, started this process after another one was lost."""
    return any(int(os.environ.get(name, "0")) > 0 for name in (RESTARTS, JOB_RESTARTS))


def _run_launched(
    target: Target, payload: Any, *, num_ranks: int, device_type: str, timeout: timedelta
) -> None:
    rank, launched = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if launched != num_ranks:
        hint = f"start it with --nproc-per-node so that there are {num_ranks} in all"
        raise InputError(
            "the plan needs another number of processes", got=launched, allowed=num_ranks, hint=hint
        )
    try:
        with process_group(rank=rank, num_ranks=num_ranks, device_type=device_type, timeout=timeout):
            target(rank, num_ranks, payload)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and GLOO not in str(error):
            raise
        raise WorkerLostError(
            f"process {rank} of {num_ranks} lost another one: {_first_words(error)}",
            hint="torchrun --max-restarts N starts all again, from the newest checkpoint",
        ) from error


def _run_here(start: _Start) -> None:
    port = free_port()
    failures = mp.get_context("spawn").SimpleQueue()
    workers = start_processes(
        _worker,
        args=(start, port, failures),
        nprocs=start.num_ranks,
        join=False,
        start_method="spawn",
    )
    assert workers is not None
    with stop_on_signals(lambda signum: _kill(workers, signal.SIGTERM)) as request:
        try:
            while not workers.join(timeout=1.0, grace_period=GRACE_S):
                pass
        except (ProcessExitedException, ProcessRaisedException) as error:
            if not failures.empty():
                raise failures.get() from None
            lost = WorkerLostError(
                f"process {error.error_index} of {start.num_ranks} was lost: {_first_words(error)}",
                hint="resume from the last checkpoint with --resume",
            )
            lost.was_asked_to_stop = request.asked
            raise lost from error
        except KeyboardInterrupt:  # the second Ctrl-C
            _kill(workers, signal.SIGKILL)
            raise


def _first_words(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _kill(workers: Any, signum: int) -> None:
    for pid in workers.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def _worker(rank: int, start: _Start, port: int, failures: Any) -> None:
    num_ranks, device_type = start.num_ranks, start.device_type
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if device_type == "cpu":  # divide the cores, or every process starts as many threads as there are cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        with process_group(rank=rank, num_ranks=num_ranks, device_type=device_type, timeout=start.timeout):
            start.target(rank, num_ranks, start.payload)
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
def process_group(
    *, rank: int, num_ranks: int, device_type: str, timeout: timedelta = TIMEOUT
) -> Iterator[None]:
    """The default process group of this process, left in order at the end."""
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    backend = GPU_BACKEND if device_type == "cuda" else CPU_BACKEND
    store, _, _ = next(rendezvous("env://", rank, num_ranks, timeout=timeout))
    # torchrun may keep one store for all its restarts: without a prefix of its own a process that starts again finds
    # the addresses of those that ended.
    attempt = dist.PrefixStore(f"attempt-{os.environ.get(RESTARTS, '0')}", store)
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=num_ranks, timeout=timeout)
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
