"""Output of commands: one JSON document or tables on stdout; notes and progress on stderr.

Data goes to stdout and everything else to stderr, so that `meshwright ... --json | jq` always works.
`meshwright.cli.drawing`, which imports Rich, is opened by the first table, because `--json` draws none.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import click

from meshwright.errors import InputError, printable
from meshwright.files import write_atomically
from meshwright.json_values import jsonable
from meshwright.result import Result
from meshwright.targets import load

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from meshwright.answers.text_table import TextTable
    from meshwright.specs.hardware import Cluster


from meshwright.training.cpu_libraries import require_torch

Align = Literal["left", "right", "center"]

AS_JSON = "as_json"
"""Name of the option --json, which `verbs.verb` adds to every command."""

_written: list[object] = []
"""The JSON document of the running command, once it is written."""


def emit_json(document: object) -> None:
    """Write `document` to stdout as the one JSON document of this command (see `jsonable`)."""
    text = json.dumps(jsonable(document), indent=2, sort_keys=True, allow_nan=False)
    sys.stdout.write(text + "\n")
    _written.append(document)


def wants_json() -> bool:
    """True if the running command writes its JSON document."""
    context = click.get_current_context(silent=True)
    return context is not None and context.params.get(AS_JSON, False)


def emitted_json(answer: Any) -> bool:
    """Write an answer, or its document, if the running command writes JSON; return True if it does."""
    if wants_json():
        emit_json(answer.to_dict() if isinstance(answer, Result) else answer)
    return wants_json()


def emit(answer: Any, show: Callable[[Any], None]) -> None:
    """Write an answer, or its document, as JSON, or show it on the terminal."""
    if not emitted_json(answer):
        show(answer)


def exit_unless(passes: bool) -> None:
    """End the command with exit code 1, which means that the answer is no, unless it `passes`."""
    if not passes:
        raise click.exceptions.Exit(1)


def write(path: Path | None, by: Callable[..., None], **about: Any) -> None:
    """Write the file at `path` by a function, and say so; None: it is not asked for."""
    if path is not None:
        by(path, **about)
        note(f"wrote {path}")


def write_document(document: object, path: Path) -> None:
    """Write a JSON document to a file, in a folder that may be new. Raises InputError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r} ({error.strerror})") from None


def emit_json_error(error: object) -> None:
    """Write `error` as the JSON document, unless the command has written its own before it failed."""
    if not _written:
        emit_json(error)


def begin_json() -> None:
    """Begin a command: it has written no JSON document yet."""
    _written.clear()


def write_html(page: str, *arguments: Any, path: Path | None, **named: Any) -> None:
    """Draw a page and write it to `path`. `page` is the `module:function` that draws it from the arguments.

    A path that is None is not asked for. Raises InputError when the file cannot be written.
    """
    if path is None:
        return
    drawn = load(page)(*arguments, **named)
    load("meshwright.report.html:write_page")(drawn, path=path)


def console(stream: TextIO | None = None) -> Console:
    """A Rich console on `stream`, or on stdout."""
    return load("meshwright.cli.drawing:console")(stream or sys.stdout)


def print_table(
    columns: Mapping[str, Align] | Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    caption: str | None = None,
) -> None:
    """Print a table on stdout. `columns` maps each heading to its alignment, or lists headings, all left.

    Cells are printed with `str`, None as an empty cell; a Rich text keeps its style (see `styled`). If the
    terminal is too narrow for the numbers and words of a row, each row is a block of lines.
    """
    aligned = columns if isinstance(columns, Mapping) else dict.fromkeys(columns, "left")
    table = load("meshwright.cli.drawing:table")
    _draw(table(aligned, rows, title=title, caption=caption))


def print_text_tables(tables: Iterable[TextTable]) -> None:
    """Print the tables of a report with blank lines between them; text is aligned left, numbers right."""
    for number, shown in enumerate(tables):
        if number:
            print_line()
        columns: dict[str, Align] = {
            heading: "left" if i == 0 or heading in shown.text_columns else "right"
            for i, heading in enumerate(shown.headings)
        }
        print_table(columns, shown.rows, title=shown.title, caption=shown.caption or None)


def print_hardware(cluster: Cluster | None) -> None:
    """Print the hardware that a run or the options state in place of the catalogue's, if any."""
    if cluster is not None and (line := load("meshwright.answers.cluster:hardware_line")(cluster)) is not None:
        print_line(line)


def bar_width(widest: int, *, table: int) -> int:
    """Columns of a table's longest bar: a third of `widest` if the console is narrower than the table."""
    return widest if console().width >= table else widest // 3


def print_line(text: str = "", *, style: str = "") -> None:
    """Print one paragraph on stdout, wrapped at words to the console, in a Rich style such as `bold`."""
    _draw(load("meshwright.cli.drawing:paragraph")(text, style=style))


def _draw(shown: Any) -> None:
    load("meshwright.cli.drawing:draw")(shown, stream=sys.stdout)


def say(text: str, *, stream: TextIO | None = None) -> None:
    """Print a line on stderr, or on `stream`, without control characters."""
    print(printable(text), file=stream or sys.stderr, flush=True)


def emit_text(text: str) -> None:
    """Write text on stdout at once, as it is; on a terminal without control characters."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def styled(text: str, style: str) -> Text:
    """The text of a table's cell, in a Rich style."""
    return load("rich.text:Text")(printable(text), style=style)


def note(*messages: str) -> None:
    """Print notes on stderr, where they cannot disturb the answer."""
    for message in messages:
        say(f"note: {message}")


@contextmanager
def progress(description: str, *, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr; yields `advance(amount)`. Without a terminal nothing is drawn.

    `total` is the amount at which the work is done; None draws an indeterminate bar.
    """
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    with load("meshwright.cli.bars:bar")(description, total=total, stream=sys.stderr) as advance:
        yield advance


class LiveLine:
    """A line on a terminal's stderr that says what runs; --json draws none."""

    def __init__(self) -> None:
        self.is_live = sys.stderr.isatty() and not wants_json()

    def draw(self, text: str) -> None:
        """Put `text` in the place of what the line had."""
        if self.is_live:
            print(f"\r{text} ...\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        if self.is_live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def load_with_torch(target: str, *, what: str) -> Any:
    """Import "module:attribute", whose module imports PyTorch (seconds); otherwise as `require_torch`."""
    require_torch(what)
    with progress("starting PyTorch"):
        return load(target)


def typed() -> str:
    """The command line that is running, as it is typed."""
    return shlex.join(["meshwright", *sys.argv[1:]])


def write_page(found: Result, path: Path | None) -> None:
    """Write the page of an answer to this command line if it is asked for, and say so."""
    write(path, found.write_html, command=typed())


def write_forms(found: Result, *, markdown: str, figures: str, options: Mapping[str, Any]) -> bool:
    """Write the forms that `options` name, and say so; True if there is one.

    `markdown` and `figures` are the functions that draw them, each as "module:function".
    """
    write_page(found, options["html_path"])
    write(
        options["markdown_path"],
        lambda path: load("meshwright.report.html:write_page")(load(markdown)(found), path=path),
    )
    for form in ("png", "svg"):
        if folder := options[f"{form}_folder"]:
            draw = load("meshwright.report.figures:write_figures")
            for path in draw(load(figures)(found), folder=folder, form=form):
                note(f"wrote {path}")
    return any(options[name] for name in ("html_path", "markdown_path", "png_folder", "svg_folder"))
