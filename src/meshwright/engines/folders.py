"""Folders of a training: their locks, and the files of an earlier training in the folder of results."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path

from meshwright.errors import InputError
from meshwright.files import held
from meshwright.records.training import RECORD
from meshwright.specs.run import Run
from meshwright.training.parent_watch import GRACE_S
from meshwright.training.rendezvous import is_restart

POLL_S = 0.2
PATIENCE_S = GRACE_S + 10.0
"""Seconds that a training waits for the workers of one whose process was killed: they end in this time."""
OTHER_FOLDER = "name a folder that can be written with --out (out= in Python) and train.checkpoint.folder"
OF_A_TRAINING = (
    "identity.json", "steps.jsonl", "events.jsonl", RECORD, "resolved.json", "report.html", "trackers.json", "stacks",
    "profile", "tokenizer", "adapter",
)  # fmt: skip
"""Files and folders that a training leaves in its folder of results."""


def refuse_finished(folder: Path, *, is_forced: bool) -> None:
    """Raise InputError if the results of another training are in `folder`, unless they may be overwritten.

    Call it for a new run, not for one that is resumed. A restart and all but the main process of a launcher pass.
    """
    if is_forced or is_restart() or os.environ.get("RANK", "0") != "0" or not (folder / RECORD).is_file():
        return
    raise InputError(
        "the results of a training are in this folder", got=str(folder),
        hint="--force (force=True in Python) overwrites them; --resume continues the training; or name another folder",
    )  # fmt: skip


def clear_results(folder: Path) -> None:
    """Remove what an earlier training left in `folder`, of which a new one writes only some."""
    for name in OF_A_TRAINING:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def training_folders(folder: Path, run: Run) -> Iterator[None]:
    """Lock the results folder and the checkpoint folder of `run` for a training: see `locked`.

    Of the processes of a launcher only the main one locks. A restarted run continues in any case: a network file
    system may hold a lost host's lock for minutes.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    saves, restarts = run.train.checkpoint, is_restart()
    # The checkpoints first: a start that is refused because of them leaves no folder of results.
    with (
        nullcontext() if saves is None else locked_checkpoints(Path(saves.folder), is_restart=restarts),
        locked(folder, is_restart=restarts),
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
    since, patience_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic() + PATIENCE_S
    by = f"process {os.getpid()} since {since}\n{_host()}"
    with ExitStack() as stack:
        while True:
            try:
                holder = stack.enter_context(held(lock, by=by))
            except OSError as error:
                message = f"cannot write there: {error.strerror or error}"
                raise InputError(message, got=folder, hint=OTHER_FOLDER) from error
            if holder is None or is_restart:
                break
            if not _has_ended(holder) or time.monotonic() > patience_s:
                raise InputError(message, got=folder, hint=f"{hint}, or wait: {holder.splitlines()[0]} holds it")
            stack.close()
            time.sleep(POLL_S)
        yield


def _host() -> str:
    """This host, for a file that does not name it."""
    return blake2b(socket.gethostname().encode(), digest_size=8).hexdigest()


def _has_ended(holder: str) -> bool:
    """True if the process that took a lock on this host has ended. Its workers, which hold the lock, end soon."""
    found = re.fullmatch(r"process (\d+) since .*\n(\w+)", holder)
    if found is None or found[2] != _host():
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
