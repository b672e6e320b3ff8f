"""All errors of one run file in one message, each with its place, its key and a hint."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError, RunFileError

KeyPath = tuple[str | int, ...]
"""Path of a value: ("batch", "micro") or ("parallel", "layers_per_stage", 2)."""

SourceLocation = int | str
"""A line of the file, or the option that gave the value (`--set batch.micro`)."""

MAX_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class RunFileProblem:
    """One thing that is wrong. `got` is shown when it is not None; `place` None: where `path` is."""

    path: KeyPath = ()
    message: str
    got: object = None
    allowed: str | None = None
    hint: str | None = None
    place: SourceLocation | None = None
    meant: str | None = None  # the known key that an unknown one is near to


class BelowError(InputError):
    """An error at `key`, which lies below the key that is looked at."""

    def __init__(self, key: str, message: str, **more: Any) -> None:
        super().__init__(message, **more)
        self.key = key


def key_name(path: KeyPath) -> str:
    """A key as messages write it.

    >>> key_name(("parallel", "layers_per_stage", 2))
    'parallel.layers_per_stage[2]'
    """
    name = ""
    for part in path:
        name += f"[{part}]" if isinstance(part, int) else f".{_short(part)}" if name else _short(part)
    return name


def as_error(
    problems: Sequence[RunFileProblem], *, file: str, places: Mapping[KeyPath, SourceLocation], most: int = MAX_SHOWN
) -> RunFileError:
    """The exception that says `most` of `problems`, in the order of the file."""
    located = sorted(((_place(p, places), p) for p in problems), key=lambda item: _order(item[0]))
    errors = [_one(problem, place, file) for place, problem in located]
    if len(errors) == 1:
        return errors[0]
    lines = [f"{len(errors)} errors"]
    lines += [f"  {e.message}{f'; hint: {e.hint}' if e.hint else ''}" for e in errors[:most]]
    if len(errors) > most:
        lines.append(f"  and {len(errors) - most} more")
    return RunFileError("\n".join(lines), file=file)


def _place(problem: RunFileProblem, places: Mapping[KeyPath, SourceLocation]) -> SourceLocation | None:
    """The nearest place known: a key that is missing stands where its parent does."""
    if problem.place is not None:
        return problem.place
    for end in range(len(problem.path), 0, -1):
        if problem.path[:end] in places:
            return places[problem.path[:end]]
    return None


def _order(place: SourceLocation | None) -> tuple[int, int]:
    """The whole file first, then its lines, then options."""
    return (0, 0) if place is None else (1, place) if isinstance(place, int) else (2, 0)


def _one(problem: RunFileProblem, place: SourceLocation | None, file: str) -> RunFileError:
    name = key_name(problem.path)
    # An option says which key it gives: `--set batch.micro` all of it, `--gbs` in its own word.
    is_said = isinstance(place, str) and (place == f"--set {name}" or not place.startswith("--set"))
    return RunFileError(
        problem.message,
        file=place if isinstance(place, str) else file,
        line=place if isinstance(place, int) else None,
        key=None if is_said else name or None,
        got=None if problem.got is None else _shown(problem.got),
        allowed=problem.allowed,
        hint=problem.hint,
    )


class _Unquoted(str):
    """Text that an error shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shown(value: object) -> _Unquoted:
    """A value in a message: never longer than a line, and a container only by its kind."""
    match value:
        case bool():
            return _Unquoted("true" if value else "false")
        case dict():
            return _Unquoted("a mapping")
        case list():
            return _Unquoted("a list")
        case str():
            return _Unquoted(repr(_short(value)))
        case _:
            return _Unquoted(reprlib.repr(value))


def _short(text: str) -> str:
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= 60 else f"{text[:57]}..."
