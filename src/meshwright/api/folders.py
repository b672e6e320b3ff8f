"""Folders of results: which one a run uses, and its lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import InputError
from meshwright.files import held

RESULTS = Path("runs")


def results_folder(name: str, *, resume: bool) -> Path:
    """Return runs/NAME; a new training takes the next free number, a resumed one the newest existing one."""
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).lstrip(".") or "run"
    candidates = [RESULTS / safe, *(RESULTS / f"{safe}-{i}" for i in range(2, 10_000))]
    first_free = next(i for i, path in enumerate(candidates) if not path.exists())
    return candidates[max(0, first_free - 1) if resume else first_free]


@contextmanager
def locked(folder: Path, *, is_restart: bool = False) -> Iterator[None]:
    """Refuse to train where another training writes: their steps and checkpoints would mix.

    A restarted run continues in any case: a network file system may hold a lost host's lock for minutes.
    """
    with held(folder) as is_free:
        if not is_free and not is_restart:
            raise InputError(
                "another training writes there now",
                got=str(folder),
                hint="name another folder with --out, or out= in Python",
            )
        yield
