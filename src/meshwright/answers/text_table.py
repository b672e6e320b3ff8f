"""Tables of text: made once, printed on the terminal and drawn on a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

Item = TypeVar("Item")

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

    @classmethod
    def of(
        cls, title: str, items: Iterable[Item], columns: Mapping[str, Callable[[Item], object]], *,
        caption: str = "", text_columns: tuple[str, ...] = (),
    ) -> TextTable:  # fmt: skip
        """Return a table of a row for each item; `columns` has the cell of an item by its heading."""
        rows = [tuple(cell(item) for cell in columns.values()) for item in items]
        return cls(title=title, headings=tuple(columns), rows=rows, caption=caption, text_columns=text_columns)

    def without_empty_columns(self) -> TextTable:
        """Return the same table without the columns in which every cell is empty."""
        kept = [i for i in range(len(self.headings)) if any(row[i] not in ("", None) for row in self.rows)]
        rows = [tuple(row[i] for i in kept) for row in self.rows]
        return replace(self, headings=tuple(self.headings[i] for i in kept), rows=rows)


def unbroken(cell: str) -> str:
    """A quantity and its unit stay on one line.

    >>> unbroken("8.3 %") == "8.3\\N{NO-BREAK SPACE}%"
    True
    """
    return cell.replace(" ", "\N{NO-BREAK SPACE}") if len(cell) < LONGEST_UNBROKEN else cell
