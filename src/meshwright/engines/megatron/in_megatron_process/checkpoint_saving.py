"""Saving in the background of a training, by Megatron's own asynchronous writer.

    begin     an empty folder; Megatron plans who writes what, and copies what lies on a device to host memory
    write     a process that is forked from this one writes its files, and sums them up; the steps go on
    end       after the step in which the last process is done: Megatron's metadata, then our manifest, which makes
              it a checkpoint; only now older ones go

A fork sees memory as it was: what later steps change, it does not see, and a CPU's states need no copy. At most one
checkpoint is on its way: the next save waits for it, and so does the end of the run.
"""

from __future__ import annotations

import json
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.engines.megatron.in_megatron_process.optimizer_shards import NAME
from meshwright.errors import InputError
from meshwright.specs.run import Checkpoint
from meshwright.training.checkpoints import files
from meshwright.training.checkpoints.peers import Peers
from meshwright.training.checkpoints.stalls import Stalls
from meshwright.training.checkpoints.writing import begin, disk_errors, end
from meshwright.training.signals import ASKING

SUMS = ".sums-"  # what a writer leaves for its process; no part of the checkpoint


class Saver:
    """The checkpoints of one training. Every process makes one and calls the same methods in the same order."""

    def __init__(self, settings: Checkpoint) -> None:
        self.settings = settings
        self.folder = Path(settings.folder)
        self.peers = Peers()
        self.queue = AsyncCallsQueue()
        self.stalls = Stalls()

    def save(self, state: dict[str, Any], *, pieces: str, step: int, about: dict[str, Any]) -> None:
        """Save Megatron's sharded `state`, in the background if the settings say so. Raises as `wait` does.

        `pieces`: what this process knows of the state's places (`pieces.pieces_text`).
        """
        self.wait()
        with self.stalls.during(), disk_errors(self.folder):
            folder = begin(self.folder, step=step, peers=self.peers)
            self.peers.together(lambda: (folder / NAME.format(rank=self.peers.rank)).write_text(pieces))
            with warnings.catch_warnings(), _deaf_children():
                warnings.simplefilter("ignore")
                request = dist_checkpointing.save(state, str(folder), async_sharded_save=True)
            assert request is not None
            if request.async_fn is not None:  # else this process has nothing to write
                request = _summed_up(request, folder)
            request.add_finalize_fn(lambda: self._end(folder, step=step, about=about))
            self.queue.schedule_async_request(request)
        if not self.settings.asynchronous:
            self.wait()

    def look(self) -> None:
        """Make a checkpoint of what all processes have written, if they have. Raises as `wait` does."""
        self._finish(is_waiting=False)

    def wait(self) -> None:
        """Return when no checkpoint is on its way. Raises InputError where one could not be written."""
        self._finish(is_waiting=True)

    def _finish(self, *, is_waiting: bool) -> None:
        if self.queue.get_num_unfinalized_calls():
            with self.stalls.during(), disk_errors(self.folder), _lost_writers(self.folder):
                self.queue.maybe_finalize_async_calls(blocking=is_waiting)

    def _end(self, folder: Path, *, step: int, about: dict[str, Any]) -> None:
        digests = self.peers.together(lambda: _sums_of_the_writer(folder))
        known = {name for written in digests for name in written}
        others = self.peers.together(lambda: _sums(folder, known) if self.peers.rank == 0 else {})
        keep = self.settings.keep
        end(folder, [*digests, *others], step=step, about=about, keep=keep, peers=self.peers)


@contextmanager
def _lost_writers(folder: Path) -> Iterator[None]:
    """Megatron tells the first process alone what went wrong, and not what the operating system said of it."""
    try:
        yield
    except CheckpointException as error:
        reasons = [f"process {rank}: {cause}" for rank, (cause, _) in error.failures.items()]
        raise InputError(
            f"cannot write a checkpoint below {folder}: {'; '.join(reasons) or 'another process could not'}",
            hint="older checkpoints are untouched: see that no disk is full and no writer was killed, and --resume",
        ) from error


def _summed_up(request: AsyncRequest, folder: Path) -> AsyncRequest:
    """The request whose writer also leaves size and checksum of its files."""
    _, buckets, _ = request.async_fn_args
    names = [name for _, name, _ in buckets]
    assert request.async_fn is not None
    return request._replace(async_fn=partial(_write, request.async_fn, folder, names))


def _write(write: Callable[..., None], folder: Path, names: list[str], *args: Any) -> None:
    """What the forked process does."""
    write(*args)
    if all((folder / name).is_file() for name in names):
        sums = json.dumps(files.digests(folder, names))
        (folder / f"{SUMS}{dist.get_rank()}").write_text(sums, encoding="utf-8")


def _sums_of_the_writer(folder: Path) -> files.Digests:
    path = folder / f"{SUMS}{dist.get_rank()}"
    if not path.exists():
        return {}
    sums = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    return sums


def _sums(folder: Path, known: set[str]) -> files.Digests:
    """Of what Megatron writes besides the tensors."""
    return files.digests(folder, sorted(set(files.names(folder)) - known))


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started here do not hear what asks a training to stop: Megatron's queue of results outlives it."""
    resource_tracker.ensure_running()  # or its start would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
