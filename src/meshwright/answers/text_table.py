"""Tables of text: made once, printed on the terminal and drawn on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_UNBROKEN = 20
"""Shorter cells are quantities with a unit; longer ones are sentences, which may wrap."""


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """Headings and rows. The first column and those named in `text_columns` are aligned left, figures right."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    text_columns: tuple[str, ...] = ()


def unbroken(cell: str) -> str:
    """A quantity and its unit stay on one line.

    >>> unbroken("8.3 %") == "8.3\\N{NO-BREAK SPACE}%"
    True
    """
    return cell.replace(" ", "\N{NO-BREAK SPACE}") if len(cell) < LONGEST_UNBROKEN else cell
