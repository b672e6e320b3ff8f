"""Tables and the console, drawn with Rich. `meshwright.cli.output` opens this on the first use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, TextIO

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from meshwright.cli import column_widths as widths
from meshwright.errors import printable

PIPE_WIDTH = 120
"""Columns of a table that is not written to a terminal and has no COLUMNS in its environment."""

BLOCK_INDENT = 2
"""Spaces before the values of a row below its name."""


class _Console(Console):
    """A console that leaves a closed pipe to the caller; Rich would exit with 1, which means that the answer is no."""

    def on_broken_pipe(self) -> None:
        raise


def console(stream: TextIO) -> Console:
    """A Rich console on `stream`.

    Colour follows the terminal and NO_COLOR. Nothing in the text is read as markup or highlighted, so that a
    path or a list prints as it is.
    """
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return _Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def draw(shown: Any, *, stream: TextIO) -> None:
    """Draw on `stream`. A word that is longer than the console is wide goes to the terminal whole.

    Where `stream` is no terminal, lines end with their text: columns are not padded.
    """
    drawn = console(stream)
    if drawn.is_terminal:
        drawn.print(shown, crop=False)
        return
    with drawn.capture() as captured:
        drawn.print(shown, crop=False)
    stream.writelines(line.rstrip() + "\n" for line in captured.get().splitlines())


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """A text that wraps at words and breaks none."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self.text.copy()
        whole.overflow = "ignore"  # as a property, because the argument of `wrap` would also stop it at spaces
        yield from whole.wrap(console, options.max_width) or [Text()]


def paragraph(text: str, *, style: str = "") -> Paragraph:
    """The paragraph of a text in a Rich style."""
    return Paragraph(text=Text(printable(text), style=style))


def table(
    columns: Mapping[str, Any], rows: Iterable[Sequence[object]], *, title: str | None, caption: str | None
) -> TableOrBlocks:
    """A table. `columns` maps each heading to its alignment; a row may end early."""
    return TableOrBlocks(
        headings=list(map(printable, columns)),
        aligned=list(columns.values()),
        rows=[[_cell(value) for value, _ in zip_longest(row, columns)] for row in rows],
        title=Text(printable(title or ""), style="bold"),
        caption=Text(printable(caption or "")),
    )


def _cell(value: object) -> Text:
    return value if isinstance(value, Text) else Text("" if value is None else printable(str(value)).expandtabs())


@dataclass(frozen=True, kw_only=True)
class TableOrBlocks:
    """A table as wide as the console. If its words and numbers need more, each row is a block of lines."""

    headings: list[str]
    aligned: list[Literal["left", "right", "center"]]
    rows: list[list[Text]]
    title: Text
    caption: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        layout = self._layout(options.max_width)
        if layout is None:
            yield from self._blocks(options.max_width)
        else:
            yield from self._drawn(layout, options.max_width)

    @property
    def _is_text(self) -> list[bool]:
        return [align != "right" for align in self.aligned]

    def _layout(self, width: int) -> widths.Layout | None:
        columns = [
            widths.column_width(heading, [row[i].plain for row in self.rows], is_text=is_text)
            for i, (heading, is_text) in enumerate(zip(self.headings, self._is_text, strict=True))
        ]
        return widths.fitting_layout(columns, width)

    # --- table ---

    def _drawn(self, layout: widths.Layout, width: int) -> Iterator[Any]:
        """The table with its title and caption, which are wider than the table if a word of them is."""
        drawn = Table(
            box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False,
            padding=(0, 1) if layout.gap > widths.NARROW_GAP else (0, 1, 0, 0),
        )  # fmt: skip
        for heading, align, size in zip(self._headings_of(layout), self.aligned, layout.widths, strict=True):
            drawn.add_column(Text(heading), justify=align, width=size)
        for row in self.rows:
            drawn.add_row(*self._cells_of(row, layout))
        yield from _annotation(self.title, layout, width)
        yield drawn
        yield from _annotation(self.caption, layout, width)

    def _headings_of(self, layout: widths.Layout) -> list[str]:
        """The headings. The last lines of headings of numbers that wrap stand side by side."""
        wrapped = [
            widths.heading_lines(heading, size, is_text=is_text)
            for heading, size, is_text in zip(self.headings, layout.widths, self._is_text, strict=True)
        ]
        height = max(map(len, wrapped), default=0) if layout.wraps else 0
        return ["\n".join([""] * (height - len(lines)) + lines) for lines in wrapped]

    def _cells_of(self, row: Sequence[Text], layout: widths.Layout) -> list[Text]:
        return [
            Text("\n").join(_lines(cell, size, is_text=is_text, hangs=layout.wraps))
            for cell, size, is_text in zip(row, layout.widths, self._is_text, strict=True)
        ]

    # --- blocks ---

    def _blocks(self, width: int) -> Iterator[Text]:
        names = [" ".join(heading.split()) for heading in self.headings]
        yield from _lines(self.title, width)
        for i, row in enumerate(self.rows):
            if i:
                yield Text()
            yield from self._block(names, row, width)
        if not self.rows:
            for name in names:
                yield from _lines(Text(name, style="bold"), width)
        yield from _lines(self.caption, width)

    def _block(self, names: Sequence[str], row: Sequence[Text], width: int) -> Iterator[Text]:
        """A line for each value. The first value stands above the others if its column has no heading."""
        fields = [
            (name, cell, is_text)
            for name, cell, is_text in zip(names, row, self._is_text, strict=True)
            if cell.plain.strip()
        ]
        indent = 0
        if fields and not names[0] and fields[0][1] is row[0]:
            yield from _lines(Text(row[0].plain, style="bold"), width)
            fields, indent = fields[1:], BLOCK_INDENT
        label = indent + _label_width(names, width - indent)
        for name, cell, is_text in fields:
            heading = Text(" " * indent + name, style="bold")
            yield from _field(heading, cell, is_text=is_text, label=label, width=width)


def _annotation(text: Text, layout: widths.Layout, width: int) -> Iterator[Text]:
    """The title or caption of a table, as wide as the table."""
    most = layout.total if widths.longest_word(text.plain) <= layout.total else width
    for line in _lines(text, most):
        line.pad_right(max(most - line.cell_len, 0))
        yield line


def _label_width(names: Sequence[str], width: int) -> int:
    """Columns of the headings of blocks: a third, and more for a word that leaves half of them to the values."""
    sizes = [size for size in map(widths.longest_word, names) if size <= width // 2]
    return min(max(map(widths.text_width, names), default=0), max([width // 3, *sizes]))


def _field(heading: Text, cell: Text, *, is_text: bool, label: int, width: int) -> Iterator[Text]:
    """A heading and its value side by side, or below each other where a word is too long for that."""
    room = width - label - widths.NARROW_GAP
    if widths.longest_word(heading.plain) > label or widths.longest_unbroken(cell.plain, is_text=is_text) > room:
        yield from [*_lines(heading, width), *_lines(cell, width)]
        return
    names, values = _lines(heading, label, hangs=True), _lines(cell, room, is_text=is_text)
    for left, right in zip_longest(names, values):
        left, right = left or Text(), right or Text()
        left.pad_right(label + widths.NARROW_GAP - left.cell_len)
        yield left.append_text(right)


def _lines(text: Text, width: int, *, is_text: bool = True, hangs: bool = False) -> list[Text]:
    """The lines of a text. A word longer than `width` has a line of its own, and a number is next to its unit."""
    plain = text.plain
    lines = widths.text_lines(plain, width, hangs=hangs) if is_text else widths.number_lines(plain, width)
    return [Text(line, style=text.style, overflow="ignore") for line in lines]
