"""What `meshwright bench train` says while it trains: a line for each run, and a bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from meshwright.records.trainings import TrainingRow, TrainingStatus
from meshwright.report.quantities import rate

if TYPE_CHECKING:
    from meshwright.records.sweep import Configuration


class Watch:
    """Shows on stderr which run is under way and what the last ones measured."""

    def __init__(self, found: Sequence[Configuration], *, num_runs: int, done: set[tuple[str, int]]) -> None:
        self.num_runs, self.width = num_runs, max(len(c.name) for c in found)
        asked = {(c.name, run) for c in found for run in range(1, num_runs + 1)}
        self.total, self.num_done = len(asked), len(asked & done)
        self.bar: Any = None
        for configuration in found:
            if configuration.refusal:
                print(f"note: {configuration.name}: {configuration.refusal}", file=sys.stderr)
        if self.num_done:
            print(f"note: {self.num_done} of {self.total} runs were measured before", file=sys.stderr)

    def __enter__(self) -> Watch:
        if sys.stderr.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            from meshwright.cli.output import console

            words = TextColumn("{task.description}", markup=False)
            parts = (words, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*parts, console=console(sys.stderr), transient=True)
            self.task = self.bar.add_task("", total=self.total, completed=self.num_done)
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begin(self, configuration: Configuration, run: int) -> None:
        """A run is about to start."""
        if self.bar is not None:
            self.bar.update(self.task, description=f"{configuration.name}, run {run} of {self.num_runs}")

    def tell(self, row: TrainingRow) -> None:
        """A run has ended."""
        self.num_done += 1
        words = f"{row.configuration:<{self.width}}  run {row.run}  {_outcome(row)}"
        if self.bar is not None:
            self.bar.update(self.task, completed=self.num_done)
            self.bar.console.print(words)
        else:
            print(words, file=sys.stderr, flush=True)


def _outcome(row: TrainingRow) -> str:
    """What a run measured, or why it did not."""
    if row.status is not TrainingStatus.OK:
        return f"{row.status.replace('_', ' ')}: {row.reason}"
    words = f"{rate(row.tokens_per_s_per_device or 0.0)} tokens/s/device"
    return (
        words
        if row.error is None
        else f"{words}, predicted {rate(_predicted(row))} ({100 * row.error:+.1f} %)"
    )


def _predicted(row: TrainingRow) -> float:
    return (row.tokens_per_s_per_device or 0.0) / (1 + (row.error or 0.0))
