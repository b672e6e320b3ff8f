"""Checkpoints in a folder: find them, read their manifests, verify their files, remove old ones."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import InputError, NewerFormatError
from meshwright.files import require_format, swap_names, sync
from meshwright.json_values import load_json
from meshwright.training.checkpoints.peers import Peers

NAME = re.compile(r"step-(\d{8,})")
PARTIAL, REMOVED = ".partial-", ".removed-"
MANIFEST, SEAL = "manifest.json", "manifest_sha256"
BEST, ONLY_BEST = "best_step", "is_only_best"
"""Keys of a manifest: steps of the best checkpoint when this one was written, and True if this one was written for no
other reason than to be the best."""
StepChoice = int | Literal["best"] | None
"""Steps of a checkpoint, the best one, or None: the newest."""

Digests = dict[str, dict[str, Any]]
"""Size and SHA-256 by file."""


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """One checkpoint on the disk."""

    path: Path
    step: int  # steps taken when it was written


def checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """All whole checkpoints below `folder`, oldest first."""
    return [saved for saved in _named(folder) if (saved.path / MANIFEST).is_file()]


def without_manifest(folder: Path) -> list[SavedCheckpoint]:
    """Folders below `folder` that are named like checkpoints and have no manifest, oldest first.

    No save leaves one: its manifest was removed, or it was copied in part.
    """
    return [saved for saved in _named(folder) if not (saved.path / MANIFEST).is_file()]


def _named(folder: Path) -> list[SavedCheckpoint]:
    """Folders below `folder` that are named like checkpoints, oldest first."""
    inside = folder.iterdir() if folder.is_dir() else ()
    found = ((NAME.fullmatch(path.name), path) for path in inside if path.is_dir())
    return sorted((SavedCheckpoint(path=p, step=int(m[1])) for m, p in found if m), key=lambda saved: saved.step)


def newest(folder: Path) -> SavedCheckpoint:
    """The newest checkpoint, verified. Every process calls it.

    Raises InputError when there is none, or when its files do not match its manifest; the message then names
    the newest good checkpoint.
    """
    found = _named(folder)
    if not found:
        raise InputError(
            "there is no checkpoint to resume from", got=str(folder),
            hint="train: --resume-or-begin begins the run where there is none",
        )  # fmt: skip
    fault = verify(found[-1].path)
    if not fault:
        return found[-1]
    good = newest_good(folder)
    if good is None:
        hint = "no older checkpoint is whole"
    else:
        hint = f"the last good one is {good.path}: remove {found[-1].path} to resume from step {good.step}"
    raise InputError(f"checkpoint {found[-1].path} is damaged: {fault}", hint=hint)


def newest_good(folder: Path) -> SavedCheckpoint | None:
    """The newest checkpoint whose files match its manifest. Every process calls it."""
    return next((saved for saved in reversed(checkpoints(folder)) if not verify(saved.path)), None)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`. Raises InputError when it cannot be read, or is of a newer format."""
    try:
        manifest = load_json(path / MANIFEST)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the manifest of checkpoint {path}: {error}") from error
    require_format(manifest, where=f"checkpoint {path}")
    if not isinstance(manifest, dict):
        raise InputError(f"the manifest of checkpoint {path} is no JSON object", got=type(manifest).__name__)
    return manifest


def verify(path: Path) -> str | None:
    """Compare the files of a checkpoint with its manifest; the first difference found, or None.

    Every process calls it, reads a part of the files, and gets the same result. Raises NewerFormatError.
    """
    peers = Peers()
    try:
        if not (path / MANIFEST).is_file():
            raise FileNotFoundError
        manifest = read_manifest(path)
        if sealed(manifest) != manifest:
            return "its manifest was altered (its checksum differs)"
        files = manifest["files"]
        faults = (_verify_file(path / name, files[name]) for name in peers.share(files))
        fault = next((f for f in faults if f), None)
    except FileNotFoundError:
        fault = "it has no manifest"
    except NewerFormatError:
        raise
    except (InputError, KeyError, TypeError, AttributeError):
        fault = "its manifest cannot be read"
    return next((f for f in peers.gathered(fault) if f), None)


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """`manifest` with the SHA-256 of its other keys."""
    said = {key: value for key, value in manifest.items() if key != SEAL}
    return said | {SEAL: hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()}


def _verify_file(file: Path, expected: Mapping[str, Any]) -> str | None:
    if not file.is_file():
        return f"{file.name} is missing"
    size = file.stat().st_size
    if size != expected["bytes"]:
        return f"{file.name} has {size:,} bytes, was written with {expected['bytes']:,}"
    return None if _sha256(file) == expected["sha256"] else f"{file.name} was altered (its checksum differs)"


def names(folder: Path) -> list[str]:
    """Names of the files in `folder`, in no order."""
    return [path.name for path in folder.iterdir()]


def digests(folder: Path, names: Iterable[str]) -> Digests:
    """Size and SHA-256 of these files, which are on the disk then, as a manifest holds them."""
    for name in (names := list(names)):
        sync(folder / name)
    return {n: {"bytes": (folder / n).stat().st_size, "sha256": _sha256(folder / n)} for n in names}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def clear(folder: Path) -> None:
    """Remove partial checkpoints that killed processes left."""
    for prefix in (PARTIAL, REMOVED):
        for left in folder.glob(f"{prefix}step-*"):
            _delete(left)


def remove(path: Path, *, successor: Path | None = None) -> None:
    """Remove a checkpoint, or put `successor` in its place.

    It is renamed first: a killed process leaves no incomplete one under its name. Of a link to another disk the link
    goes, and the files that somebody moved there stay.
    """
    if successor is not None and swap_names(successor, path):
        _delete(successor)  # the old one: a step that is saved again is never absent
        return
    doomed = path.with_name(REMOVED + path.name)
    path.rename(doomed)
    if successor is not None:
        successor.rename(path)
    _delete(doomed)


def _delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def prune(folder: Path, *, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints (None: all) and the best, which the newest manifest names.

    A checkpoint that was written only because it was the best is removed once its successor is written.
    """
    found, best = checkpoints(folder), best_step(folder)
    outdone = [s for s in found[:-1] if s.step != best and read_manifest(s.path).get(ONLY_BEST)]
    left = [saved for saved in found if saved not in outdone]
    old = [] if keep is None else [saved for saved in left[:-keep] if saved.step != best]
    for saved in (*outdone, *old):
        remove(saved.path)


def best_step(folder: Path) -> int | None:
    """Steps of the best checkpoint of `folder`, as its newest manifest has it; None: the run keeps none."""
    found = checkpoints(folder)
    return read_manifest(found[-1].path).get(BEST) if found else None


def at_step(folder: Path, step: int) -> Path:
    """The path of the checkpoint after `step` steps."""
    return folder / f"step-{step:08d}"


def choose(folder: Path, step: StepChoice) -> SavedCheckpoint:
    """The checkpoint of `folder` after `step` steps. Raises InputError where there is none."""
    found = checkpoints(folder)
    if not found:
        raise InputError("there is no checkpoint", got=str(folder))
    if step is None:
        return found[-1]
    wanted = best_step(folder) if step == "best" else step
    if wanted is None:
        hint = "train with train.checkpoint.keep_best: true"
        raise InputError("the run keeps no best checkpoint", got=str(folder), hint=hint)
    for saved in found:
        if saved.step == wanted:
            return saved
    steps = ", ".join(str(saved.step) for saved in found[-12:])
    if step == "best":
        raise InputError(f"the checkpoint of the best evaluation, after step {wanted}, was not kept", allowed=steps)
    raise InputError("no checkpoint of this step", got=step, allowed=steps)
