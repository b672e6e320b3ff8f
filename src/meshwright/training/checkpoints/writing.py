"""Write and load checkpoints. A partial folder is synced, checksummed, and only then renamed.

A tensor is stored under the name of its parameter, whatever pipeline stage or shard it came from, so a checkpoint loads
under another plan and on another number of processes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as read_state
from torch.distributed.checkpoint.state_dict_saver import save as write_state
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.errors import InputError
from meshwright.files import FORMAT, sync, write_atomically
from meshwright.training.checkpoints import files
from meshwright.training.checkpoints.metadata import CheckpointReader
from meshwright.training.checkpoints.peers import Peers


def save(
    state: dict[str, Tensor],
    *,
    folder: Path,
    step: int,
    about: Mapping[str, Any],
    keep: int | None,
    peers: Peers | None = None,
) -> Path:
    """Write `state` and return the checkpoint's folder. Every process calls it; `about` goes into the manifest.

    Raises InputError in all processes when the disk of one is full or cannot be written; older checkpoints are then
    as before.
    """
    peers = peers or Peers()
    with disk_errors(folder):
        partial = begin(folder, step=step, peers=peers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns that it assumes one process where there is one
            write_state(state, storage_writer=_Writer(partial, sync_files=True), process_group=peers.group)
        names = peers.share(files.names(partial))
        digests = peers.together(lambda: files.digests(partial, names))
        return end(partial, digests, step=step, about=about, keep=keep, peers=peers)


def begin(folder: Path, *, step: int, peers: Peers) -> Path:
    """Create an empty partial folder for the checkpoint after `step`. Raises OSError."""
    partial = folder / f"{files.PARTIAL}step-{step:08d}"
    peers.on_first(lambda: _begin(folder, partial))
    return partial


def end(
    partial: Path,
    digests: Sequence[files.Digests],
    *,
    step: int,
    about: Mapping[str, Any],
    keep: int | None,
    peers: Peers,
) -> Path:
    """Rename `partial` to a checkpoint, now that all its files are on the disk, and prune old ones. Raises OSError.

    `digests` has the digests of its files, by process.
    """
    manifest = {"format": FORMAT, **about, "step": step, "files": {n: d for part in digests for n, d in part.items()}}
    final = partial.with_name(partial.name.removeprefix(files.PARTIAL))
    peers.on_first(lambda: _end(partial, final, manifest, keep))
    return final


class _Writer(FileSystemWriter):
    """Raises the operating system's error, which `torch.save` wraps in another one."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's tensors."""
        with _unburied():
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata: the file of each tensor."""
        with _unburied():
            super().finish(metadata, results)


@contextmanager
def _unburied() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror) from error


def _begin(folder: Path, partial: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files.clear(folder)
    partial.mkdir()


def _end(partial: Path, final: Path, manifest: Mapping[str, Any], keep: int | None) -> None:
    write_atomically(partial / files.MANIFEST, json.dumps(files.sealed(manifest), indent=2) + "\n")
    sync(partial)
    if final.exists():
        files.remove(final, successor=partial)
    else:
        partial.rename(final)
    sync(final.parent)
    files.prune(final.parent, keep=keep)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Convert the operating system's errors of a full or unwritable disk to InputError."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        cause = error
        if isinstance(error, CheckpointException):  # DCP wraps what each process raised
            cause = next((e for e, _ in error.failures.values() if isinstance(e, OSError)), None)
        if not isinstance(cause, OSError):
            raise
        hint = "older checkpoints are untouched: free space, or set train.checkpoint.keep, and --resume"
        message = f"cannot write a checkpoint below {folder}: {cause.strerror or cause}"
        raise InputError(message, hint=hint) from error


def load(saved: files.SavedCheckpoint, *, into: dict[str, Tensor], zero_if_absent: str | None = None) -> dict[str, Any]:
    """Read `saved` into the tensors of `into`, in place, and return the manifest. Every process calls it.

    Tensors whose names begin with `zero_if_absent` are set to 0 where the checkpoint lacks them.

    Raises InputError when a tensor is missing or has another shape.
    """
    manifest = files.read_manifest(saved.path)
    reader = CheckpointReader(saved.path)
    stored = reader.read_metadata().state_dict_metadata
    absent = [n for n in into if zero_if_absent and n.startswith(zero_if_absent) and n not in stored]
    for name in absent:
        into[name].zero_()
    into = {name: tensor for name, tensor in into.items() if name not in absent}
    for name, tensor in into.items():
        held = getattr(stored.get(name), "size", None)
        if held is None:
            raise InputError(
                f"checkpoint {saved.path} has no tensor {name!r}", hint="it is of another model or optimizer"
            )
        if tuple(held) != tuple(tensor.shape):
            raise InputError(
                f"checkpoint {saved.path}: {name} has another shape", got=tuple(held), allowed=tuple(tensor.shape)
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read_state(into, storage_reader=reader)
    return manifest
