"""Folders of results and of checkpoints: which one a run uses, and their locks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

from meshwright.errors import InputError
from meshwright.files import held
from meshwright.specs.run import Run

RESULTS = Path("runs")
_OTHER_FOLDER = "name a folder that can be written with --out (out= in Python) and train.checkpoint.folder"


def results_folder(name: str, *, resume: bool) -> Path:
    """Return runs/NAME; a new training takes the next free number, a resumed one the newest existing one."""
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).lstrip(".") or "run"
    candidates = [RESULTS / safe, *(RESULTS / f"{safe}-{i}" for i in range(2, 10_000))]
    first_free = next(i for i, path in enumerate(candidates) if not path.exists())
    return candidates[max(0, first_free - 1) if resume else first_free]


def require_writable(folder: Path, run: Run) -> None:
    """Raise InputError if the results folder or the checkpoint folder of `run` cannot be written. Creates nothing."""
    saves = run.train.checkpoint
    for path in (folder, *(() if saves is None else (Path(saves.folder).expanduser(),))):
        parent = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        if not parent.is_dir():
            raise InputError("cannot write there: it is not a folder", got=str(parent), hint=_OTHER_FOLDER)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise InputError("cannot write there", got=str(parent), hint=_OTHER_FOLDER)


@contextmanager
def training_folders(folder: Path, run: Run) -> Iterator[None]:
    """Lock the results folder and the checkpoint folder of `run` for a training: see `locked`.

    Of the processes of a launcher only the main one locks. A restarted run continues in any case: a network file
    system may hold a lost host's lock for minutes.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    saves = run.train.checkpoint
    with (
        locked(folder, is_restart=_is_restart()),
        nullcontext() if saves is None else locked_checkpoints(Path(saves.folder), is_restart=_is_restart()),
    ):
        yield


@contextmanager
def locked(folder: Path, *, is_restart: bool = False) -> Iterator[None]:
    """Refuse to train where another training writes: their steps would mix."""
    hint = "name another folder with --out, or out= in Python"
    with _only_one(folder / ".lock", "another training writes there now", str(folder), hint, is_restart):
        yield


@contextmanager
def locked_checkpoints(folder: Path, *, is_restart: bool = False) -> Iterator[None]:
    """Refuse to save checkpoints where another training does: each would delete those of the other.

    The lock lies beside the folder: some engines start differently where a checkpoint folder exists.
    """
    place = folder.expanduser().resolve()
    message = "another training saves its checkpoints there now"
    hint = "name another folder with --set train.checkpoint.folder=..."
    with _only_one(place.with_name(f".{place.name}.lock"), message, str(folder), hint, is_restart):
        yield


@contextmanager
def _only_one(lock: Path, message: str, folder: str, hint: str, is_restart: bool) -> Iterator[None]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    with ExitStack() as stack:
        try:
            holder = stack.enter_context(held(lock, by=f"process {os.getpid()} since {since}"))
        except OSError as error:
            raise InputError(
                f"cannot write there: {error.strerror or error}", got=folder, hint=_OTHER_FOLDER
            ) from error
        if holder is not None and not is_restart:
            raise InputError(message, got=folder, hint=f"{hint}, or wait: {holder} holds it")
        yield


def _is_restart() -> bool:
    counts = (os.environ.get(name, "0") for name in ("MESHWRIGHT_RESTARTS", "TORCHELASTIC_RESTART_COUNT"))
    return any(int(count) > 0 for count in counts)
