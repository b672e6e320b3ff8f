"""Tables and the console, drawn with Rich. `meshwright.cli.output` opens this on the first use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 120
"""Columns of a table that is not written to a terminal and has no COLUMNS in its environment."""


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


def table(
    columns: Mapping[str, Any], rows: Iterable[Sequence[object]], *, title: str | None, caption: str | None
) -> Table:
    """A table. `columns` maps each heading to its alignment."""
    drawn = Table(
        title=title and Text(title), caption=caption and Text(caption), box=box.SIMPLE_HEAD,
        title_justify="left", caption_justify="left", title_style="bold", header_style="bold",
        show_edge=False, pad_edge=False,
    )  # fmt: skip
    # Numbers do not wrap. Nor does the only column of text, which names the rows.
    has_one_text = sum(align == "left" for align in columns.values()) == 1
    for name, align in columns.items():
        no_wrap = align == "right" or has_one_text
        drawn.add_column(Text(name), justify=align, overflow="fold", no_wrap=no_wrap)
    for row in rows:
        drawn.add_row(*(_cell(value) for value in row))
    return drawn


def _cell(value: object) -> Any:
    if hasattr(value, "__rich_console__") or hasattr(value, "__rich__"):
        return value
    return Text("" if value is None else str(value))
