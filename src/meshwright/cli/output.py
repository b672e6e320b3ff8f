"""What a command prints: one JSON document or tables on stdout; notes and progress on stderr.

Data goes to stdout and everything else to stderr, so that `meshwright ... --json | jq` always works.
Rich is imported by the functions that draw, because `--help` and `--json` never draw.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TextIO

from meshwright.report.documents.json_values import jsonable

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.report.text_table import TextTable

PIPE_WIDTH = 120
"""Columns of a table that is not written to a terminal and has no COLUMNS in its environment."""

Align = Literal["left", "right", "center"]


def emit_json(document: object) -> None:
    """Write `document` to stdout as the one JSON document of this command (see `jsonable`)."""
    text = json.dumps(jsonable(document), indent=2, sort_keys=True, allow_nan=False)
    sys.stdout.write(text + "\n")


def console(stream: TextIO | None = None) -> Console:
    """A Rich console on `stream`, or on stdout.

    Colour follows the terminal and NO_COLOR. Nothing in the text is read as markup or highlighted, so that a
    path or a list prints as it is.
    """
    from rich.console import Console

    target = stream or sys.stdout
    width = None if target.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(file=target, width=width, highlight=False, markup=False, emoji=False)


def print_table(
    columns: Mapping[str, Align] | Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    caption: str | None = None,
) -> None:
    """Print a table on stdout. `columns` maps each heading to its alignment, or lists headings, all left.

    Cells are printed with `str`, None as an empty cell; a Rich renderable is drawn as it is.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not isinstance(columns, Mapping):
        columns = dict.fromkeys(columns, "left")
    table = Table(
        title=title and Text(title), caption=caption and Text(caption), box=box.SIMPLE_HEAD,
        title_justify="left", caption_justify="left", title_style="bold", header_style="bold",
        show_edge=False, pad_edge=False,
    )  # fmt: skip
    # Figures stay in one piece, and so does what names a row when no other words can give way.
    one_of_words = sum(align == "left" for align in columns.values()) == 1
    for name, align in columns.items():
        no_wrap = align == "right" or one_of_words
        table.add_column(Text(name), justify=align, overflow="fold", no_wrap=no_wrap)
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console().print(table)


def print_text_tables(tables: Iterable[TextTable]) -> None:
    """Print the tables of a report, a blank line between: words to the left, figures to the right."""
    for number, shown in enumerate(tables):
        if number:
            print_line()
        columns: dict[str, Align] = {
            heading: "left" if i == 0 or heading in shown.text_columns else "right"
            for i, heading in enumerate(shown.headings)
        }
        print_table(columns, shown.rows, title=shown.title, caption=shown.caption or None)


def _cell(value: object) -> Any:
    from rich.text import Text

    if hasattr(value, "__rich_console__") or hasattr(value, "__rich__"):
        return value
    return Text("" if value is None else str(value))


def print_line(text: str = "", *, style: str = "") -> None:
    """Print one paragraph on stdout, wrapped to the console, in a Rich style such as `bold`."""
    console().print(text, style=style or None)


def note(message: str) -> None:
    """Print a note on stderr, where it cannot disturb the answer."""
    print(f"note: {message}", file=sys.stderr)


@contextmanager
def progress(description: str, *, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr; yields `advance(amount)`. Without a terminal nothing is drawn or imported.

    `total` is the amount at which the work is done; None draws a bar without end.
    """
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    parts = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*parts, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.advance(task, amount)
