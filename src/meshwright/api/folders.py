"""Folders of results and of checkpoints: which ones a run uses."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from meshwright.engines.folders import OTHER_FOLDER
from meshwright.errors import InputError
from meshwright.json_values import load_json
from meshwright.specs.run import Run
from meshwright.training.run_identity import IDENTITY, RunIdentity, identity_in, read_identity

RESULTS = Path("runs")


def results_folder(run: Run, *, resume: bool) -> Path:
    """Return the folder of results where none was named: runs/NAME, or the next free runs/NAME-2, ...

    With `resume` it is the folder of the run whose checkpoints are in the checkpoint folder of `run`; a free one if
    there is none. Raises InputError if several folders are of that run.
    """
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in run.name).lstrip(".") or "run"
    candidates = (RESULTS / safe, *(RESULTS / f"{safe}-{i}" for i in range(2, 10_000)))
    first_free = next(path for path in candidates if not path.exists())
    saves = run.train.checkpoint
    if not resume or saves is None:
        return first_free
    identity = identity_in(Path(saves.folder))
    if identity is not None and identity.run_id:
        found = _folders_of(identity)
    else:
        found = [path for path in _below(RESULTS) if _saves_to(path, Path(saves.folder))]
    if len(found) > 1:
        raise InputError(
            "several folders hold results of this run", got=", ".join(str(path) for path in found),
            hint="name the one to continue with --out (out= in Python)",
        )  # fmt: skip
    return found[0] if found else first_free


def holds_checkpoints(folder: Path) -> bool:
    """True if `folder` has a checkpoint of any engine: `step-N`, or MaxText's `NAME/checkpoints/N`."""
    found = (*folder.glob("step-*"), *folder.glob("*/checkpoints/*"))
    return any(path.name.removeprefix("step-").isdecimal() for path in found)


def own_folder(run: Run, *, resume: bool) -> Path:
    """`results_folder`, of a process that trains. Raises InputError under a launcher, whose processes share one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "the processes of a launcher need one folder for their results",
            hint="name it, for example --out runs/first (out= in Python)",
        )
    return results_folder(run, resume=resume)


def _folders_of(identity: RunIdentity) -> list[Path]:
    """Folders with results of this run: the one where its checkpoint was written, and those below runs/."""
    places = [*([Path(identity.results)] if identity.results else ()), *_below(RESULTS)]
    found: dict[Path, Path] = {}
    for place in places:
        there = read_identity(place / IDENTITY)
        if there is not None and there.run_id == identity.run_id:
            found.setdefault(place.resolve(), _relative(place))
    return list(found.values())


def _below(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()


def _relative(path: Path) -> Path:
    """The path below the working directory where it is there, which reads better."""
    return path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path


def _saves_to(results: Path, checkpoints: Path) -> bool:
    """True if the training of an older release whose results are in this folder saved to `checkpoints`."""
    try:
        train = load_json(results / "resolved.json")["train"]
        return Path(train["checkpoint"]["folder"]).resolve() == checkpoints.resolve()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def require_writable(folder: Path, run: Run) -> None:
    """Raise InputError if the results folder or the checkpoint folder of `run` cannot be written. Creates nothing."""
    saves = run.train.checkpoint
    for path in (folder, *(() if saves is None else (Path(saves.folder).expanduser(),))):
        parent = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        if not parent.is_dir():
            raise InputError("cannot write there: it is not a folder", got=str(parent), hint=OTHER_FOLDER)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise InputError("cannot write there", got=str(parent), hint=OTHER_FOLDER)
