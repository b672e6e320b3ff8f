"""One process a device: started here, or by torchrun and found in the environment.

`run_ranks(target, payload, num_ranks=N)` calls `target(rank, num_ranks, payload)` in N processes that form one
process group, and waits. When one is lost the others end too, and all of them start again if restarts are left:
the target resumes from its last checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  # not in torch's __all__
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from meshwright.errors import InputError, MeshwrightError, printable
from meshwright.files import held_locks
from meshwright.training.parent_watch import end_with_parent, end_with_torchrun
from meshwright.training.rendezvous import RESTARTS, free_port, is_restart, under_launcher
from meshwright.training.signals import stop_on_signals

RankFunction = Callable[[int, int, Any], None]
TIMEOUT = timedelta(minutes=10)  # what processes wait for each other, where the caller does not say
GRACE_S = 20.0  # what the others get to end by themselves after one was lost
STACKS_S = 2.0  # what a suspended process gets to write its stacks, on a busy machine too
LAST_S = 2.0  # what a process that lost another one waits before it ends
SHOWS_S = 2.0  # what one that was lost gets to end after those that lost it, as while its core is written
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"  # set by torchrun
GLOO = "gloo/transport"  # its errors have no type of their own, but name the file they come from
CPU_BACKEND, GPU_BACKEND = "gloo", "cpu:gloo,cuda:nccl"


class WorkerLostError(MeshwrightError):
    """A process of the run ended too early."""

    exit_code = 1
    stopped_by: KeyboardInterrupt | None = None  # a signal; then the others need not start again


class _Locks:
    """Locks of folders that this process holds. A process that gets them pickled at its start holds them, too."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, tuple(map(DupFd, self.descriptors))


def _inherited(*copies: Any) -> _Locks:
    return _Locks([copy.detach() for copy in copies])


@dataclass(frozen=True, kw_only=True)
class _Start:
    """The arguments of every process, pickled."""

    target: RankFunction
    payload: Any
    num_ranks: int
    device_type: str
    timeout: timedelta
    locks: _Locks


def run_ranks(
    target: RankFunction,
    payload: Any,
    *,
    num_ranks: int,
    device_type: str,
    timeout: timedelta = TIMEOUT,
    max_restarts: int = 0,
    restart_payload: Any = None,
    in_new_process: bool = False,
) -> None:
    """Run `target` on every rank and return when all have ended. `payload` and `target` must pickle.

    A single rank runs in this process, unless `in_new_process`.
    After a process was lost all start again, with `restart_payload`, here or under the launcher.

    Raises InputError when torchrun started another number of processes, WorkerLostError when a process was lost
    and no restart is left, and the target's own MeshwrightError when it raised one.
    """
    start = _Start(
        target=target, payload=payload, num_ranks=num_ranks, device_type=device_type, timeout=timeout,
        locks=_Locks(held_locks),
    )  # fmt: skip
    if under_launcher():
        _run_launched(start, restart_payload=restart_payload)
    elif num_ranks == 1 and not in_new_process:
        target(0, 1, payload)
    else:
        for restarts_left in range(max_restarts, -1, -1):
            try:
                return _run_here(start)
            except WorkerLostError as error:
                if not restarts_left or error.stopped_by is not None:
                    raise
                print(printable(f"{error.message}; starting again"), file=sys.stderr, flush=True)
                start = replace(start, payload=restart_payload)


def _run_launched(start: _Start, *, restart_payload: Any) -> None:
    end_with_torchrun()
    rank, launched, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), start.num_ranks
    if launched != num_ranks:
        hint = f"start it with --nproc-per-node so that there are {num_ranks} in all"
        raise InputError("the plan needs another number of processes", got=launched, allowed=num_ranks, hint=hint)
    # Hosts could not agree after a restart on the processes that belong to it.
    num_hosts, restarts = (int(os.environ.get(n, "0")) for n in ("GROUP_WORLD_SIZE", MAX_RESTARTS))
    if num_hosts > 1 and restarts > 0 and _keeps_store():
        raise InputError(
            "torchrun's hosts count their restarts separately, and would not find each other again",
            hint="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun; `meshwright launch` does",
        )
    try:
        with process_group(rank=rank, num_ranks=num_ranks, device_type=start.device_type, timeout=start.timeout):
            is_any_restart = restart_payload is not None and reduced(is_restart())[0] > 0
            start.target(rank, num_ranks, restart_payload if is_any_restart else start.payload)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and GLOO not in str(error):
            raise
        time.sleep(LAST_S)  # so that the launcher sees the lost process first
        raise WorkerLostError(
            f"process {rank} of {num_ranks} lost another one: {_reason(error)}",
            hint="torchrun --max-restarts N starts all again, from the newest checkpoint",
        ) from error


def _keeps_store() -> bool:
    """Return True if torchrun keeps one store for all its restarts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def is_several() -> bool:
    """Return True if the run has several processes."""
    return dist.is_initialized() and dist.get_world_size() > 1


def reduced(*values: float, op: Any = dist.ReduceOp.MAX) -> list[float]:
    """`values` over all processes of the run: the largest ones, or as `op` reduces. Collective."""
    found = torch.tensor(values, dtype=torch.float64)
    if is_several():
        dist.all_reduce(found, op=op)
    return found.tolist()


def _run_here(start: _Start) -> None:
    port = free_port()
    context = mp.get_context("spawn")
    failures, done = context.SimpleQueue(), context.Array("b", start.num_ranks, lock=False)
    others = {process.pid for process in mp.active_children()}
    try:
        workers = start_processes(
            _worker, args=(start, port, failures, done), nprocs=start.num_ranks, join=False, start_method="spawn"
        )
    except BaseException:  # a signal after some have started: Python would wait at its exit for these, and they for all
        for process in mp.active_children():
            if process.pid not in others:
                process.kill()
        raise
    assert workers is not None
    lost: tuple[int, str] | None = None
    with stop_on_signals(lambda signum: _kill(workers, signal.SIGTERM)) as request:
        try:
            has_all = False
            while not has_all:
                if wait(list(workers.sentinels), timeout=1.0):
                    # Before `join`, which ends the others and keeps no trace of what each of them was.
                    shows_s = SHOWS_S if failures.empty() else 0.0
                    lost = None if request.asked else lost or _first_lost(workers.processes, done, shows_s=shows_s)
                    if lost is not None:
                        _end_after(workers, lost[0])
                    has_all = workers.join(timeout=0.0, grace_period=GRACE_S)
        except (ProcessExitedException, ProcessRaisedException, EOFError, UnpicklingError) as error:
            if not failures.empty():
                raise failures.get() from None
            # PyTorch may read the error of a process that was ended as it wrote it: then there is no more than a part.
            index, reason = lost or (getattr(error, "error_index", 0), _reason(error))
            failure = WorkerLostError(
                f"process {index} of {start.num_ranks} was lost: {reason}",
                hint="resume from the last checkpoint with --resume",
            )
            failure.stopped_by = request.reason() if request.asked else None
            raise failure from error
        except KeyboardInterrupt:  # the second Ctrl-C
            _kill(workers, signal.SIGKILL)
            raise
        finally:
            for name in filter(None, workers.error_files):  # PyTorch leaves what it has read
                Path(name).unlink(missing_ok=True)
        if request.asked and not all(done):  # they had nothing to save
            raise request.reason()


def _first_lost(processes: Sequence[Any], done: Sequence[int], *, shows_s: float) -> tuple[int, str] | None:
    """The process that a signal or an early exit has ended, and how: those that lost it raise errors of their own.

    shows_s: in which it may end after them, as while its core is written.
    """
    found, until = _lost(processes, done), time.monotonic() + shows_s
    while found is None and any(process.exitcode for process in processes) and time.monotonic() < until:
        time.sleep(0.05)
        found = _lost(processes, done)
    return found


def _lost(processes: Sequence[Any], done: Sequence[int]) -> tuple[int, str] | None:
    for index, process in enumerate(processes):
        if process.exitcode == 0 and not done[index]:
            return index, "it ended with exit code 0 before its work was done"
        if process.exitcode is not None and process.exitcode < 0:
            return index, f"{signal.Signals(-process.exitcode).name} ended it"
    if any(process.exitcode is not None for process in processes):  # the others waited for it until their timeout
        for index, process in enumerate(processes):
            if process.exitcode is None and _is_suspended(process.pid):
                return index, "it was suspended (SIGSTOP)"
    return None


def _is_suspended(pid: int) -> bool:
    with suppress(OSError):  # it has ended, or the system has no /proc
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _end_after(workers: Any, index: int) -> None:
    """End what `join` would wait for after process `index` was lost: those that go on while it is gone or suspended."""
    process = workers.processes[index]
    if process.exitcode is None:  # it writes its stacks (`watchdog`), and no more than that
        for signum in (signal.SIGUSR2, signal.SIGCONT):
            os.kill(process.pid, signum)
        process.join(STACKS_S)
        process.kill()
    elif process.exitcode == 0:  # which `join` takes for success
        _kill(workers, signal.SIGKILL)


def _reason(error: Exception) -> str:
    """The last line of an error's message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _kill(workers: Any, signum: int) -> None:
    for pid in workers.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def _worker(rank: int, start: _Start, port: int, failures: Any, done: Any) -> None:
    end_with_parent()
    num_ranks, device_type = start.num_ranks, start.device_type
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if device_type == "cpu":  # split the cores, or every process starts as many threads as there are cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        with process_group(rank=rank, num_ranks=num_ranks, device_type=device_type, timeout=start.timeout):
            start.target(rank, num_ranks, start.payload)
    except MeshwrightError as error:
        if rank == 0:
            failures.put(error)
        raise
    done[rank] = 1
    # All files are written and the group is left. A normal exit tears down PyTorch's threads in an order that
    # sometimes aborts the process, and a run that is done would count as lost.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def process_group(*, rank: int, num_ranks: int, device_type: str, timeout: timedelta = TIMEOUT) -> Iterator[None]:
    """Open the default process group of this process, and leave it at the end."""
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    backend = GPU_BACKEND if device_type == "cuda" else CPU_BACKEND
    store, _, _ = next(rendezvous("env://", rank, num_ranks, timeout=timeout))
    if _keeps_store():  # without its own prefix a restarted process finds addresses of processes that ended
        store = PrefixStore(f"attempt-{os.environ.get(RESTARTS, '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()
