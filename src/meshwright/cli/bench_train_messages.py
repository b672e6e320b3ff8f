"""Messages of `meshwright bench train` while it trains: one line per training, and a bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from meshwright.answers.quantities import rate
from meshwright.cli.output import note
from meshwright.records.sweep import Configuration
from meshwright.records.trainings import TrainingRow, TrainingStatus
from meshwright.targets import load


class Watch:
    """Show on stderr which training runs now, and what the finished ones measured."""

    def __init__(self, found: Sequence[Configuration], *, num_runs: int, done: set[tuple[str, int]]) -> None:
        self.num_runs, self.width = num_runs, max(len(c.name) for c in found)
        asked = {(c.name, run) for c in found for run in range(1, num_runs + 1)}
        self.total, self.num_done = len(asked), len(asked & done)
        self.bar: Any = None
        for configuration in found:
            if configuration.refusal:
                note(f"{configuration.name}: {configuration.refusal}")
        if self.num_done:
            note(f"{self.num_done} of {self.total} runs were measured before")

    def __enter__(self) -> Watch:
        if sys.stderr.isatty():
            self.bar = load("meshwright.cli.bars:counted_bar")(stream=sys.stderr)
            self.task = self.bar.add_task("", total=self.total, completed=self.num_done)
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begin(self, configuration: Configuration, run: int) -> None:
        """Show that a training starts."""
        if self.bar is not None:
            self.bar.update(self.task, description=f"{configuration.name}, run {run} of {self.num_runs}")

    def end(self, row: TrainingRow) -> None:
        """Show what a training measured."""
        self.num_done += 1
        line = f"{row.configuration:<{self.width}}  run {row.run}  {_outcome(row)}"
        if self.bar is not None:
            self.bar.update(self.task, completed=self.num_done)
            self.bar.console.print(line)
        else:
            print(line, file=sys.stderr, flush=True)


def _outcome(row: TrainingRow) -> str:
    """The measured rate and its prediction, or the reason for none."""
    if row.status is not TrainingStatus.OK:
        return f"{row.status.replace('_', ' ')}: {row.reason}"
    measured = row.tokens_per_s_per_device or 0.0
    text = f"{rate(measured)} tokens/s/device"
    if row.error is None:
        return text
    return f"{text}, predicted {rate(measured / (1 + row.error))} ({100 * row.error:+.1f} %)"
