"""Background saving by Megatron's own asynchronous writer.

    begin     create a folder; Megatron plans the files of each process, and copies device memory to host memory
    write     a forked process writes the files and their checksums while training continues
    end       after the step in which the last process has finished: write Megatron's metadata, then the manifest, which
              makes the folder a checkpoint; then delete older checkpoints

A fork has a snapshot of the memory: later steps do not change it, and states on a CPU need no copy. At most one
checkpoint is in progress: the next save and the end of the run wait for it.
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
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.engines.megatron.in_megatron_process.optimizer_shards import FILE_NAME
from meshwright.errors import InputError
from meshwright.specs.run import Checkpoint
from meshwright.training.checkpoints import files
from meshwright.training.checkpoints.peers import Peers
from meshwright.training.checkpoints.stalls import Stalls
from meshwright.training.checkpoints.writing import begin, disk_errors, end
from meshwright.training.signals import ASKING

CHECKSUMS = ".sums-"  # prefix of a file from a writer to its process, which is not part of the checkpoint


class BackgroundSaver:
    """Saves the checkpoints of one training. All processes call the same methods in the same order."""

    def __init__(self, settings: Checkpoint) -> None:
        self.settings = settings
        self.folder = Path(settings.folder)
        self.peers = Peers()
        self.queue = AsyncCallsQueue()
        self.stalls = Stalls()

    def save(self, state: dict[str, Any], *, ranges: str, step: int, about: dict[str, Any]) -> None:
        """Save Megatron's sharded `state`, in the background if the settings are asynchronous. Raises as `wait`.

        `ranges`: the positions of this process's optimizer states (`optimizer_shards.ranges_text`).
        """
        self.wait()
        with self.stalls.during(), disk_errors(self.folder):
            folder = begin(self.folder, step=step, peers=self.peers)
            self.peers.together(lambda: (folder / FILE_NAME.format(rank=self.peers.rank)).write_text(ranges))
            with warnings.catch_warnings(), _children_without_signals():
                warnings.simplefilter("ignore")
                request = dist_checkpointing.save(state, str(folder), async_sharded_save=True)
            assert request is not None
            if request.async_fn is not None:  # otherwise this process writes nothing
                # The writer also writes sizes and checksums of its files.
                _, buckets, _ = request.async_fn_args
                names = [name for _, name, _ in buckets]
                request = request._replace(async_fn=partial(_write, request.async_fn, folder, names))
            request.add_finalize_fn(lambda: self._end(folder, step=step, about=about))
            self.queue.schedule_async_request(request)
        if not self.settings.asynchronous:
            self.wait()

    def poll(self) -> None:
        """Complete the checkpoint if all processes have written their files. Raises as `wait`."""
        self._finish(is_waiting=False)

    def wait(self) -> None:
        """Wait until no checkpoint is in progress. Raises InputError if one could not be written."""
        self._finish(is_waiting=True)

    def _finish(self, *, is_waiting: bool) -> None:
        if self.queue.get_num_unfinalized_calls():
            with self.stalls.during(), disk_errors(self.folder), _lost_writers(self.folder):
                self.queue.maybe_finalize_async_calls(blocking=is_waiting)

    def _end(self, folder: Path, *, step: int, about: dict[str, Any]) -> None:
        digests = self.peers.together(lambda: _checksums_of_writer(folder))
        known = {name for written in digests for name in written}
        others = self.peers.together(  # of the files that Megatron writes besides tensors
            lambda: files.digests(folder, sorted({*files.names(folder)} - known)) if self.peers.rank == 0 else {}
        )
        keep = self.settings.keep
        end(folder, [*digests, *others], step=step, about=about, keep=keep, peers=self.peers)


@contextmanager
def _lost_writers(folder: Path) -> Iterator[None]:
    """Raise InputError with the errors of all processes, which Megatron reports only to the first one."""
    try:
        yield
    except CheckpointException as error:
        reasons = [f"process {rank}: {cause}" for rank, (cause, _) in error.failures.items()]
        raise InputError(
            f"cannot write a checkpoint below {folder}: {'; '.join(reasons) or 'another process could not'}",
            hint="older checkpoints are untouched: see that no disk is full and no writer was killed, and --resume",
        ) from error


def _write(write: Callable[..., None], folder: Path, names: list[str], *args: Any) -> None:
    """Write the files and their checksums; runs in the forked process."""
    write(*args)
    if all((folder / name).is_file() for name in names):
        sums = json.dumps(files.digests(folder, names))
        (folder / f"{CHECKSUMS}{dist.get_rank()}").write_text(sums, encoding="utf-8")


def _checksums_of_writer(folder: Path) -> files.Digests:
    path = folder / f"{CHECKSUMS}{dist.get_rank()}"
    if not path.exists():
        return {}
    sums = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    return sums


@contextmanager
def _children_without_signals() -> Iterator[None]:
    """Block stop signals in processes that are started here: Megatron's result queue must survive them."""
    resource_tracker.ensure_running()  # its later start would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
