"""Record of one training: its run, environment and measurements (`record.json`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshwright.files import FORMAT, require_format, toml_table
from meshwright.json_values import load_json
from meshwright.units import format_seconds


class Ending(StrEnum):
    """End of a training."""

    DONE = "done"  # all steps taken
    REACHED = "target"  # the validation loss reached the target
    NO_IMPROVEMENT = "no_improvement"  # of the validation loss, for as many evaluations as the patience allows
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
    environment: dict[str, str] = field(default_factory=dict)  # variables that libraries read (`records.environment`)
    predicted: dict[str, Any] | None = None  # None: the planner does not know this device
    git_commit: str | None = None  # of the folder in which the command ran
    command: tuple[str, ...] = ()
    sample: str | None = None  # text that the trained model wrote
    events: tuple[dict[str, Any], ...] = ()  # faults of the training, and the reaction to each
    profile: dict[str, Any] | None = None  # the content of `profile/summary.json`
    identity: dict[str, Any] | None = None  # of the run over all its resumptions (`training.run_identity`)
    kernels: tuple[dict[str, Any], ...] = ()  # routes of training kernels, with reasons (`kernels.dispatch.summary`)
    notes: tuple[str, ...] = field(default=())
    format: int = FORMAT


RECORD = "record.json"

_KEYS = toml_table(Path(__file__).with_name("record.toml"))
STATISTICS, STEP, STEP_OPTIONAL = (tuple(_KEYS[name]) for name in ("statistics", "step", "step_optional"))


def complete_statistics(measured: Mapping[str, Any], *, lacks: Collection[str] = ()) -> dict[str, Any]:
    """All `STATISTICS` in their order. Keys that the engine `lacks` are None; all others must be `measured`.

    >>> complete_statistics({"steps": 4}, lacks=STATISTICS[1:])["best"] is None
    True
    >>> complete_statistics({"step": 4}, lacks=STATISTICS[1:])
    Traceback (most recent call last):
    KeyError: "statistics: unknown ['step'], missing ['steps']"
    """
    _require_keys("statistics", measured.keys() | set(lacks), needed=STATISTICS)
    return {name: measured.get(name) for name in STATISTICS}


def step_line(measured: Mapping[str, Any]) -> dict[str, Any]:
    """A line of `steps.jsonl` with its keys in order. Raises KeyError for unknown and for missing ones."""
    _require_keys("a step", measured, needed=STEP, others=STEP_OPTIONAL)
    return {name: measured[name] for name in (*STEP, *STEP_OPTIONAL) if name in measured}


def _require_keys(what: str, found: Collection[str], *, needed: Sequence[str], others: Sequence[str] = ()) -> None:
    unknown, missing = sorted(set(found) - {*needed, *others}), sorted(set(needed) - set(found))
    if unknown or missing:
        raise KeyError(f"{what}: unknown {unknown}, missing {missing}")


def read_record(folder: Path) -> Record:
    """Read the record in `folder`. Raises NewerFormatError."""
    document = load_json(folder / RECORD)
    require_format(document, where=folder / RECORD)
    record = Record(**document)
    return replace(
        record,
        ending=Ending(record.ending),
        command=tuple(record.command),
        events=tuple(record.events),
        kernels=tuple(record.kernels),
        notes=tuple(record.notes),
    )


def predicted_text(predicted: dict[str, Any], name: str) -> str:
    """Text of the quantity `name` of a prediction: its value with the interval, or a range that has no best value.

    >>> predicted_text({"is_range": True, "step": {"value": 2.0, "low": 1.0, "high": 4.0, "unit": "s"}}, "step")
    'between 1.00 s and 4.00 s'
    """
    if predicted.get("is_range"):
        low, high = interval(predicted[name]).partition(" (")[2].rstrip(")").split(" to ")
        return f"between {low} and {high}"
    return interval(predicted[name])


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
