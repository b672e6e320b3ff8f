"""Training states on disk: whole or absent, checked before they are read, and free of the plan that wrote them.

    FOLDER/step-00000100/            renamed into place when everything is on the disk
        __0_0.distcp, .metadata      PyTorch's distributed checkpoint: every tensor by name, in shards
        manifest.json                step, plan, and size and SHA-256 of every file
    FOLDER/.partial-step-00000120/   what a killed process leaves; never read, removed by the next save

A tensor is stored under the name of its parameter, whatever pipeline stage or shard it came from, so a checkpoint
loads under another plan and on another number of processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as read_state
from torch.distributed.checkpoint.state_dict_saver import save as write_state

from meshwright.errors import InputError
from meshwright.files import write_atomically

NAME = re.compile(r"step-(\d{8,})")
MANIFEST = "manifest.json"
READ_BYTES = 2**22


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One checkpoint on the disk."""

    path: Path
    step: int  # steps taken when it was written


def checkpoints(folder: Path) -> list[Saved]:
    """All whole checkpoints below `folder`, oldest first."""
    if not folder.is_dir():
        return []
    found = [(NAME.fullmatch(path.name), path) for path in folder.iterdir() if (path / MANIFEST).is_file()]
    return sorted((Saved(path=p, step=int(m[1])) for m, p in found if m), key=lambda saved: saved.step)


def save(
    state: dict[str, Tensor], *, folder: Path, step: int, about: Mapping[str, Any], keep: int | None
) -> Path:
    """Write `state` and return the checkpoint's folder. Every process calls it; `about` goes into the manifest.

    Raises InputError when the disk is full or the folder cannot be written; older checkpoints are then as before.
    """
    final = folder / f"step-{step:08d}"
    partial = folder / f".partial-{final.name}"
    with _disk_errors(folder):
        if _rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(".partial-step-*"):
                shutil.rmtree(left)
            partial.mkdir()
        _wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP says that it assumes one process where there is one
            write_state(dict(state), storage_writer=FileSystemWriter(partial, sync_files=True))
        digests = _digests(partial)
        if _rank() == 0:
            manifest = {**about, "step": step, "files": digests}
            write_atomically(partial / MANIFEST, json.dumps(manifest, indent=2) + "\n")
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            _sync_folder(folder)
            _prune(folder, keep=keep)
    _wait()
    return final


def newest(folder: Path) -> Saved:
    """The newest checkpoint, checked. Every process calls it.

    Raises InputError when there is none, or when its files are not what its manifest says; the message then names
    the newest one that is.
    """
    found = checkpoints(folder)
    if not found:
        raise InputError("there is no checkpoint to resume from", got=str(folder))
    damage = damage_of(found[-1].path)
    if not damage:
        return found[-1]
    good = next((saved for saved in reversed(found[:-1]) if not damage_of(saved.path)), None)
    if good is None:
        hint = "no older checkpoint is whole"
    else:
        hint = f"the last good one is {good.path}: remove {found[-1].path} to resume from step {good.step}"
    raise InputError(f"checkpoint {found[-1].path} is damaged: {damage}", hint=hint)


def load(saved: Saved, *, into: dict[str, Tensor]) -> dict[str, Any]:
    """Read `saved` into the tensors of `into`, in place, and return the manifest. Every process calls it.

    Raises InputError when a tensor is missing or has another shape.
    """
    manifest = read_manifest(saved.path)
    reader = FileSystemReader(saved.path)
    stored = reader.read_metadata().state_dict_metadata
    for name, tensor in into.items():
        held = getattr(stored.get(name), "size", None)
        if held is None:
            raise InputError(f"checkpoint {saved.path} has no tensor {name!r}", hint="it is of another model")
        if tuple(held) != tuple(tensor.shape):
            raise InputError(
                f"checkpoint {saved.path}: {name} has another shape",
                got=tuple(held),
                allowed=tuple(tensor.shape),
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read_state(into, storage_reader=reader)
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`. Raises InputError when it cannot be read."""
    try:
        return json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the manifest of checkpoint {path}: {error}") from error


def damage_of(path: Path) -> str | None:
    """What is wrong with the files of a checkpoint, or None. Processes divide the files; all get one answer."""
    try:
        files = read_manifest(path)["files"]
    except (InputError, KeyError, TypeError):
        return "its manifest cannot be read"
    names = sorted(files)[_rank() :: _num_ranks()]
    damage = next((d for d in (_damage(path / n, files[n]) for n in names) if d), None)
    return next((d for d in _gathered(damage) if d), None)


def _damage(file: Path, expected: Mapping[str, Any]) -> str | None:
    if not file.is_file():
        return f"{file.name} is missing"
    size = file.stat().st_size
    if size != expected["bytes"]:
        return f"{file.name} has {size:,} bytes, was written with {expected['bytes']:,}"
    return None if _sha256(file) == expected["sha256"] else f"{file.name} was altered (its checksum differs)"


def _digests(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file, each computed by one process."""
    _wait()
    names = sorted(p.name for p in folder.iterdir())[_rank() :: _num_ranks()]
    mine = {n: {"bytes": (folder / n).stat().st_size, "sha256": _sha256(folder / n)} for n in names}
    return {name: digest for part in _gathered(mine) for name, digest in part.items()}


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _prune(folder: Path, *, keep: int | None) -> None:
    if keep is not None:
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old.path)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn what the operating system says of a full or unwritable disk into an InputError."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        cause = error
        if isinstance(error, CheckpointException):  # DCP wraps what each process raised
            cause = next((e for e, _ in error.failures.values() if isinstance(e, OSError)), None)
        if not isinstance(cause, OSError):
            raise
        hint = "older checkpoints are untouched: free space, or set train.checkpoint.keep, and --resume"
        words = f"cannot write a checkpoint below {folder}: {cause.strerror or cause}"
        raise InputError(words, hint=hint) from error


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _wait() -> None:
    if _num_ranks() > 1:
        dist.barrier()


def _gathered(value: Any) -> list[Any]:
    """The value of every process, by rank."""
    if _num_ranks() == 1:
        return [value]
    values: list[Any] = [None] * _num_ranks()
    dist.all_gather_object(values, value)
    return values
