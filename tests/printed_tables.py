"""Print tables at any width, and find what is lost."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable

import pytest
from rich.cells import cell_len

from meshwright.cli.drawing import TableOrBlocks, draw


def printed_at(width: int, shown: TableOrBlocks, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the text that a terminal of `width` columns gets."""
    stream = io.StringIO()
    monkeypatch.setitem(os.environ, "COLUMNS", str(width))
    draw(shown, stream=stream)
    return stream.getvalue()


def check_whole(shown: TableOrBlocks, printed: str, *, width: int) -> None:
    """Every word is printed once, headings in each block; no line is too long, except one of one long word."""
    found = words([printed])
    rest = Counter({word: number for word, number in found.items() if set(word) != {"─"}})
    cells = words([shown.title.plain, shown.caption.plain, *(cell.plain for row in shown.rows for cell in row)])
    assert not cells - rest
    rest -= cells
    is_table = any(set(word) == {"─"} for word in found) or not shown.rows
    headings = shown.headings if is_table else repeated_headings(shown)
    assert letters(rest.elements()) == letters(headings)  # a heading may break at a slash
    for line in printed.splitlines():
        assert cell_len(line.rstrip()) <= width or len(line.split()) == 1, line


def words(texts: Iterable[str]) -> Counter[str]:
    """The words of texts, with their numbers."""
    return Counter(word for text in texts for word in text.split())


def letters(texts: Iterable[str]) -> list[str]:
    """All characters but spaces, sorted."""
    return sorted("".join("".join(text.split()) for text in texts))


def repeated_headings(shown: TableOrBlocks) -> list[str]:
    """The headings of all values, row by row."""
    return [
        heading for row in shown.rows for heading, cell in zip(shown.headings, row, strict=True) if cell.plain.strip()
    ]
