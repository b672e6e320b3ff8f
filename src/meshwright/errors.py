"""The exception tree. Every error that a user can cause is a `MeshwrightError` and prints as one message.

    MeshwrightError            exit code 2 unless a subclass says otherwise
    ├── InputError             what the user wrote is wrong: what, got, allowed, hint
    │   ├── RunFileError       ... in a run file, with file, line and key
    │   ├── UnknownNameError   ... a name that no catalogue holds, with the nearest known one
    │   └── NewerFormatError   ... a file that a newer version wrote
    ├── InfeasibleError        the answer is no (does not fit, check failed): exit code 1
    └── MissingDependencyError an optional package or device is absent: exit code 3, names the install command

Inside the search infeasible is a value (`specs.estimate.Shortfall`), never one of these.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar
from unicodedata import category

Value = TypeVar("Value")

MAX_SHOWN = 1000
"""Characters of a value in a message."""


class Terminated(KeyboardInterrupt):
    """SIGTERM. As after Ctrl-C, what was measured is kept, programs are ended and temporary files are removed."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM while the context is open. Outside the main thread nothing changes."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # signals belong to the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class MeshwrightError(Exception):
    """Base of all errors that a user sees. `hint` is printed on its own line."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by the finished message: subclasses are made of other arguments than `args`."""
        return _restored, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class InputError(MeshwrightError):
    """Something the user wrote cannot be used.

    >>> print(InputError("micro-batch must be positive", got=0, allowed=">= 1"))
    micro-batch must be positive: got 0, allowed: >= 1
    """

    def __init__(self, message: str, *, got: object = None, allowed: object = None, hint: str | None = None) -> None:
        parts = [message]
        if got is not None:
            parts.append(f": got {_shown(got)}")
        if allowed is not None:
            parts.append(f"{',' if got is not None else ':'} allowed: {allowed}")
        super().__init__("".join(parts), hint=hint)


class RunFileError(InputError):
    """A run file has an error; the message begins with `file:line: key`."""

    def __init__(
        self,
        message: str,
        *,
        file: str,
        line: int | None = None,
        key: str | None = None,
        got: object = None,
        allowed: object = None,
        hint: str | None = None,
    ) -> None:
        where = file if line is None else f"{file}:{line}"
        super().__init__(f"{where}: {key + ': ' if key else ''}{message}", got=got, allowed=allowed, hint=hint)
        self.file, self.line, self.key = file, line, key


class NewerFormatError(InputError):
    """A file has a format that a newer version of this program writes."""

    def __init__(self, where: object, *, got: object, allowed: object) -> None:
        hint = "a newer Meshwright wrote it: update this one"
        super().__init__(f"{where}: unknown format", got=got, allowed=allowed, hint=hint)


MOST_NAMES = 30
"""Known names that an error lists: all fields of a plan, some of the models."""


class UnknownNameError(InputError):
    """A name that is not in the catalogue.

    >>> print(UnknownNameError("model", "lama3-8b", known=["llama3-8b", "mixtral-8x7b"]))
    unknown model: got 'lama3-8b'
    hint: did you mean 'llama3-8b'?
    """

    def __init__(self, kind: str, name: str, *, known: Iterable[str]) -> None:
        known = sorted(known)
        near = nearest(name, known)
        more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
        hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known[:MOST_NAMES])}{more}"
        super().__init__(f"unknown {kind}", got=name, hint=hint)


def value_named(kind: str, name: str, values: Mapping[str, Value]) -> Value:
    """Return the value of `name`. Raises UnknownNameError, "unknown `kind`", where there is none."""
    if name not in values:
        raise UnknownNameError(kind, name, known=values)
    return values[name]


class InfeasibleError(MeshwrightError):
    """The request is well formed and the answer is no."""

    exit_code = 1


class MissingDependencyError(MeshwrightError):
    """An optional package or device is absent; `hint` holds the command that installs it."""

    exit_code = 3


def _restored(kind: type[MeshwrightError], args: tuple[Any, ...], state: dict[str, Any]) -> MeshwrightError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


BIDIRECTIONAL = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that change the direction of the text around them, so that it reads as another one."""
NO_CHARACTERS = "\ufffe\uffff"
"""Code points that XML lacks, beside control characters and surrogates."""


def printable(text: str) -> str:
    r"""Return `text` with characters as escapes that a terminal obeys or no text has; line feeds and tabs stay.

    >>> print(printable("red: \x1b[31m"))
    red: \x1b[31m
    """
    if text.isascii() and text.isprintable():
        return text
    shown = (
        c for c in {*text} if (category(c) in ("Cc", "Cs") and c not in "\n\t") or c in BIDIRECTIONAL + NO_CHARACTERS
    )
    return text.translate({ord(c): ascii(c)[1:-1] for c in shown})


def _shown(value: object) -> str:
    """Return `repr(value)`, shortened; the type's name where the value cannot be shown."""
    try:
        text = repr(value)
    except Exception:  # a number of thousands of digits, or a broken __repr__
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name nearest to `name`, or None when nothing is near."""
    lowered = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None
