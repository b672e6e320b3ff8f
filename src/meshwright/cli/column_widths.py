"""Widths of a table's columns that fit a terminal without cutting a number or a word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

WIDE_GAP = 3
"""Columns between two columns of a table."""

NARROW_GAP = 2
"""The same in a table whose headings wrap."""

_WORD = re.compile(r"(\s*)(\S+)")
_HEADING = re.compile(r"(\s*)(\S{4,}?[/-](?=\S{3})|\S+)")
"""`tokens/s/device` and `micro-batches` have two pieces, `GB/s` has one."""

_TEXT = re.compile(r"(\s*)(\d\S*\s(?:%|[nmµ]?s|min|h|days|[KMGTP]i?B(?:/s)?|USD)[,.;:)]*(?!\S)|\S+)")
"""A number in a text stays with its unit, too."""

_QUANTITY = re.compile(r"(\s*)([+-]?\d\S*\s[^\d\s]{1,4}(?!\S)|\S+)")
"""A number stays with a short unit: `95.7 % to 96.5 %` has three pieces."""


@dataclass(frozen=True, kw_only=True)
class ColumnWidth:
    """Widths at which a column cuts nothing."""

    natural: int
    """Nothing wraps."""

    headed: int
    """The heading wraps."""

    worded: int
    """Text wraps, too, and numbers do not."""

    narrowest: int
    """Everything wraps; a number stays with its unit."""

    is_text: bool


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Widths of all columns and the gap between them."""

    widths: Sequence[int]
    gap: int
    wraps: bool

    @property
    def total(self) -> int:
        """Columns of the whole table."""
        return sum(self.widths) + self.gap * (len(self.widths) - 1)


def column_width(heading: str, cells: Sequence[str], *, is_text: bool) -> ColumnWidth:
    """Measure a column."""
    pieces = _longest_piece(heading, _WORD if is_text else _HEADING)
    longest = max(map(text_width, cells), default=0)
    shortest = max((longest_unbroken(cell, is_text=is_text) for cell in cells), default=0)
    return ColumnWidth(
        natural=max(longest, text_width(heading)),
        headed=max(longest, pieces),
        worded=max(shortest if is_text else longest, pieces),
        narrowest=max(shortest, pieces),
        is_text=is_text,
    )


def text_width(text: str) -> int:
    """Width of the longest line."""
    return max(map(cell_len, text.splitlines()), default=0)


def longest_word(text: str) -> int:
    """Width of the longest word; spaces at the start of a line belong to its first word.

    >>> longest_word("DP8 recompute=full")
    14
    """
    return _longest_piece(text, _WORD)


def longest_unbroken(cell: str, *, is_text: bool) -> int:
    """Width of the longest word of a text, or of the longest number with its unit."""
    return _longest_piece(cell, _TEXT if is_text else _QUANTITY)


def _longest_piece(text: str, pattern: re.Pattern[str]) -> int:
    return max((cell_len(line) for line in _lines(text, 0, pattern)), default=0)


def heading_lines(heading: str, width: int, *, is_text: bool) -> list[str]:
    """A heading in lines of at most `width`, if no piece is longer.

    >>> heading_lines("tokens/s/device", 8, is_text=False)
    ['tokens/', 's/device']
    """
    return _lines(heading, width, _WORD if is_text else _HEADING)


def number_lines(cell: str, width: int) -> list[str]:
    """A cell of numbers in lines of at most `width`, if no piece is longer.

    >>> number_lines("95.7 % to 96.5 %", 9)
    ['95.7 % to', '96.5 %']
    """
    return _lines(cell, width, _QUANTITY)


def text_lines(text: str, width: int, *, hangs: bool = False) -> list[str]:
    """A text in lines of at most `width`, if no word is longer. A hanging text keeps its indentation.

    >>> text_lines("  passes over logits", 14, hangs=True)
    ['  passes over', '  logits']
    >>> text_lines("compute 81 %, bubble", 12)
    ['compute', '81 %, bubble']
    """
    indent = len(text) - len(text.lstrip()) if hangs else 0
    return _lines(text, width, _TEXT, indent=indent if longest_word(text.lstrip()) + indent <= width else 0)


def _lines(text: str, width: int, pattern: re.Pattern[str], *, indent: int = 0) -> list[str]:
    """Lines of the pieces that `pattern` finds with the space before them; no piece is broken."""
    lines = []
    for line in text.splitlines():
        lines.append("")
        for i, (space, piece) in enumerate(pattern.findall(line)):
            if i and cell_len(lines[-1] + space + piece) > width:
                lines.append(" " * indent + piece)
            else:
                lines[-1] += space + piece
    return lines


def fitting_layout(columns: Sequence[ColumnWidth], width: int) -> Layout | None:
    """The layout that wraps least in `width` columns; None if the narrowest one is wider.

    Texts wrap first where there are several; a text that names the rows wraps after the headings. Numbers wrap
    last.
    """
    wide, narrow = (width - gap * (len(columns) - 1) for gap in (WIDE_GAP, NARROW_GAP))
    found = _with_wrapped_texts(columns, wide)
    if found is not None:
        return Layout(widths=found, gap=WIDE_GAP, wraps=False)
    natural, headed, worded, narrowest = (
        [getattr(c, name) for c in columns] for name in ("natural", "headed", "worded", "narrowest")
    )
    for start, least, room, gap in (
        (natural, headed, wide, WIDE_GAP),
        (natural, headed, narrow, NARROW_GAP),
        (headed, worded, narrow, NARROW_GAP),
        (worded, narrowest, narrow, NARROW_GAP),
    ):
        found = _levelled(start, least, room)
        if found is not None:
            return Layout(widths=found, gap=gap, wraps=True)
    return None


def _with_wrapped_texts(columns: Sequence[ColumnWidth], room: int) -> list[int] | None:
    """The widest texts give their columns until the table fits; None if a text would lose a word.

    As in Rich, a column that has a neighbour on both sides is wider by the space on one more side.
    """
    wraps = [c.is_text and not _names_rows(columns) for c in columns]
    spaces = [(i > 0) + (i < len(columns) - 1) for i in range(len(columns))]
    padded = [c.natural + space for c, space in zip(columns, spaces, strict=True)]
    room += sum(spaces)
    start = [min(size, max(room, 0)) if wrap else size for size, wrap in zip(padded, wraps, strict=True)]
    least = [0 if wrap else size for size, wrap in zip(padded, wraps, strict=True)]
    found = _levelled(start, least, room)
    if found is None:
        return None
    widths = [size - space for size, space in zip(found, spaces, strict=True)]
    if any(c.is_text and size < c.narrowest for size, c in zip(widths, columns, strict=True)):
        return None
    return widths


def _names_rows(columns: Sequence[ColumnWidth]) -> bool:
    """True if the table has one text, which then names its rows."""
    return sum(column.is_text for column in columns) == 1


def _levelled(start: Sequence[int], least: Sequence[int], room: int) -> list[int] | None:
    """Widths that sum to at most `room`: the widest columns give first, down to their `least`."""
    widths = list(start)
    while (excess := sum(widths) - room) > 0:
        able = [i for i, width in enumerate(widths) if width > least[i]]
        if not able:
            return None
        most = max(widths[i] for i in able)
        widest = [i for i in able if widths[i] == most]
        next_ones = [widths[i] for i in able if widths[i] < most]
        floor = max([*next_ones, *(least[i] for i in widest)])
        for left, i in zip(range(len(widest), 0, -1), widest, strict=True):
            cut = min(round(excess / left), most - floor)
            widths[i] -= cut
            excess -= cut
    return widths
