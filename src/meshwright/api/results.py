"""The folder of a training's results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import InputError

RESULTS = Path("runs")
MAX_NUMBERED = 10_000


def default_folder(name: str, *, resume: bool) -> Path:
    """Return runs/NAME. A new training takes the next free number, a resumed one the newest that is there."""
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).lstrip(".") or "run"
    candidates = [RESULTS / safe, *(RESULTS / f"{safe}-{i}" for i in range(2, MAX_NUMBERED))]
    first_free = next(i for i, path in enumerate(candidates) if not path.exists())
    return candidates[max(0, first_free - 1) if resume else first_free]


@contextmanager
def only_training_in(folder: Path, *, is_restart: bool = False) -> Iterator[None]:
    """Refuse to train where another training writes: their steps and checkpoints would mix.

    A run that starts again goes on in any case: a network file system may hold a lost host's lock for minutes.
    """
    from meshwright.files import held

    with held(folder) as is_free:
        if not is_free and not is_restart:
            raise InputError("another training writes there now", got=str(folder), hint="name another folder")
        yield
