"""Progress bars on a terminal, drawn with Rich. Opened on the first use: a pipe draws none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshwright.cli.drawing import console


@contextmanager
def bar(description: str, *, total: float | None, stream: TextIO) -> Iterator[Callable[[float], None]]:
    """A progress bar; yields `advance(amount)`."""
    parts = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*parts, console=console(stream), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda amount: progress.advance(task, amount)


def counted_bar(*, stream: TextIO) -> Progress:
    """A progress bar with a count and the remaining time, not started yet."""
    parts = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    return Progress(*parts, TimeRemainingColumn(), console=console(stream), transient=True)
