"""What every engine offers, and what it hands back. Imports no tensor framework.

check(run)   -> what this engine cannot do of the run, with reasons: nothing is ever silently ignored
train(run)   -> a Record: what was measured, on what, with which software
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from meshwright.errors import InputError
from meshwright.specs.run import Run
from meshwright.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """One key of a run file that an engine cannot honour."""

    key: str  # as in the run file: parallel.context
    reason: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


class Ending(StrEnum):
    """How a training ended."""

    DONE = "done"  # all steps taken
    REACHED = "target"  # the validation loss came down to the target
    STOPPED = "stopped"  # asked to by a signal; the states were saved where the run says where
    DIVERGED = "diverged"  # a step's numbers cannot be right, and `train.faults` says to stop


@dataclass(frozen=True, kw_only=True)
class ProfileSteps:
    """Which steps are profiled, counted from 1, both ends included."""

    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What a command line adds to a run."""

    folder: Path  # where results go: steps, record, resolved run
    resume: bool = False
    command: tuple[str, ...] = ()  # as the user typed it, for the record
    quiet: bool = False  # no progress on stderr
    max_restarts: int = 0  # after a worker was lost; needs checkpoints
    timeout_s: float = 600.0  # of one step; then the run counts as hung
    started_s: float = field(default_factory=time.time)  # Unix time at which the command began
    profile: bool = False  # write a trace of some steps
    profile_steps: ProfileSteps | None = None  # None: a few after the warm-up


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one training run was and what it measured; the content of `record.json`.

    docs/reference/record.md explains every key.
    """

    run: dict[str, Any]
    device: dict[str, Any]
    software: dict[str, Any]
    ending: Ending
    statistics: dict[str, Any]
    time_s: dict[str, float]  # wall time by phase; `total` is their sum
    ranks: dict[str, Any]  # what differs from process to process
    started: str  # ISO 8601, UTC
    ended: str
    predicted: dict[str, Any] | None = None  # None: the planner does not know this device
    git_commit: str | None = None  # of the folder in which the command ran
    command: tuple[str, ...] = ()
    sample: str | None = None  # text that the trained model wrote
    events: tuple[dict[str, Any], ...] = ()  # faults of the training, and what was done about them
    profile: dict[str, Any] | None = None  # the content of `profile/summary.json`
    notes: tuple[str, ...] = field(default=())


def interval(estimate: dict[str, Any]) -> str:
    """A predicted quantity of a record in words, with its 80 % interval.

    >>> interval({"value": 0.412, "low": 0.38, "high": 0.44, "unit": "ratio"})
    '41.2 % (38.0 % to 44.0 %)'
    """

    def words(value: float) -> str:
        if estimate["unit"] == "s":
            return format_seconds(value)
        return f"{100 * value:.1f} %" if estimate["unit"] == "ratio" else f"{value:,.0f}"

    return f"{words(estimate['value'])} ({words(estimate['low'])} to {words(estimate['high'])})"


class TrainingEngine(Protocol):
    """The contract, as the command line sees it."""

    def check(self, run: Run) -> tuple[Unsupported, ...]:
        """What this engine cannot do of `run`. Empty: it does all of it."""
        ...

    def train(self, run: Run, *, options: TrainOptions) -> Record:
        """Train as `run` says. Raises InputError for what `check` refuses."""
        ...


def refuse(engine: str, problems: Iterable[Unsupported]) -> None:
    """Raise one InputError that lists all `problems`; return when there is none."""
    problems = tuple(problems)
    if not problems:
        return
    words = "; ".join(str(p) for p in problems)
    hint = next((p.hint for p in problems if p.hint), None)
    raise InputError(f"the {engine} engine cannot do this run: {words}", hint=hint)
