"""Record of one training: its run, environment and measurements (`record.json`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshwright.units import format_seconds


class Ending(StrEnum):
    """End of a training."""

    DONE = "done"  # all steps taken
    REACHED = "target"  # the validation loss reached the target
    NO_IMPROVEMENT = (
        "no_improvement"  # of the validation loss, for as many evaluations as the patience allows
    )
    STOPPED = "stopped"  # by a signal; states were saved if the run has a checkpoint folder
    DIVERGED = "diverged"  # a non-finite value or loss spike, with `train.faults` set to stop


@dataclass(frozen=True, kw_only=True)
class Record:
    """Run, environment and measurements of one training: the content of `record.json`.

    docs/reference/record.md explains every key.
    """

    run: dict[str, Any]
    device: dict[str, Any]
    software: dict[str, Any]
    ending: Ending
    statistics: dict[str, Any]
    time_s: dict[str, float]  # wall time by phase; `total` is their sum
    ranks: dict[str, Any]  # values of each process
    started: str  # ISO 8601, UTC
    ended: str
    predicted: dict[str, Any] | None = None  # None: the planner does not know this device
    git_commit: str | None = None  # of the folder in which the command ran
    command: tuple[str, ...] = ()
    sample: str | None = None  # text that the trained model wrote
    events: tuple[dict[str, Any], ...] = ()  # faults of the training, and the reaction to each
    profile: dict[str, Any] | None = None  # the content of `profile/summary.json`
    identity: dict[str, Any] | None = None  # of the run over all its resumptions (`training.run_identity`)
    notes: tuple[str, ...] = field(default=())


RECORD = "record.json"


def read_record(folder: Path) -> Record:
    """Read the record in `folder`."""
    record = Record(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
    return replace(
        record,
        ending=Ending(record.ending),
        command=tuple(record.command),
        events=tuple(record.events),
        notes=tuple(record.notes),
    )


def interval(estimate: dict[str, Any]) -> str:
    """Text of a predicted quantity of a record, with its 80 % interval.

    >>> interval({"value": 0.412, "low": 0.38, "high": 0.44, "unit": "ratio"})
    '41.2 % (38.0 % to 44.0 %)'
    """

    def text_of(value: float) -> str:
        if estimate["unit"] == "s":
            return format_seconds(value)
        return f"{100 * value:.1f} %" if estimate["unit"] == "ratio" else f"{value:,.0f}"

    return f"{text_of(estimate['value'])} ({text_of(estimate['low'])} to {text_of(estimate['high'])})"
