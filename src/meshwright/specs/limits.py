"""Limits of the values that a run file gives to a dataclass.

They stand in the types of fields, `Annotated[int, Limits(gt=0)]`, where `runfile.fields` finds them: a value is checked
when a file is read, and building a dataclass costs nothing more. A function among them checks a value that has its
type; it returns it, or raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Range of a number, or of the length of a text, a list or a mapping. None: no limit."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    min_length: int | None = None
    max_length: int | None = None


@dataclass(frozen=True)
class Names:
    """The words that a text may be, or a function that looks them up; without any, every word may be."""

    known: Collection[str] | Callable[[], Collection[str]]


@dataclass(frozen=True)
class Spelled:
    """Reading of a short spelling: the value as the file has it becomes the value that is checked."""

    read: Callable[[object], object]


class NoKey:
    """Marks a field that no run file states."""


Count = Annotated[int, Limits(gt=0, le=10**9)]
CountOrZero = Annotated[int, Limits(ge=0, le=10**9)]
Size = Annotated[int, Limits(gt=0, le=10**7)]
SizeOrZero = Annotated[int, Limits(ge=0, le=10**7)]
Tokens = Annotated[int, Limits(gt=0, le=10**17)]
Positive = Annotated[float, Limits(gt=0, le=1e12)]
NotNegative = Annotated[float, Limits(ge=0, le=1e12)]
Ratio = Annotated[float, Limits(ge=0, le=1)]
Share = Annotated[float, Limits(gt=0, le=1)]
BelowOne = Annotated[float, Limits(ge=0, lt=1)]
PER_LAYER = Limits(max_length=10_000)
