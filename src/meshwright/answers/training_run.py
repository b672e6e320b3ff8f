"""A training read back from its folder: `record.json` and `steps.jsonl`. Imports no tensor framework.

docs/reference/record.md explains every key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.accuracy.rows import PublishedRun, read_runs
from meshwright.accuracy.shapes import may_be_published
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.answers.quantities import rate, seconds
from meshwright.errors import InputError
from meshwright.files import require_format
from meshwright.json_values import jsonable, load_json, load_text, parse_json
from meshwright.records.fields import check
from meshwright.records.training_fields import STEPS, RecordFields
from meshwright.result import Result
from meshwright.specs.estimate import Estimate, Tier

WARM_UP_STEPS = 3
"""Steps that the engine leaves out of its statistics at the beginning."""


@dataclass(frozen=True, kw_only=True)
class MeasuredQuantity:
    """One measured quantity and its prediction. `measured_low` and `measured_high` are the extreme steps."""

    name: str
    measured: float
    measured_low: float | None = None
    measured_high: float | None = None
    unit: str
    predicted: Estimate | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if self.predicted is None else self.measured / self.predicted.value

    @property
    def is_inside(self) -> bool | None:
        """Return True if the interval holds the measured value; None where there is no interval."""
        p = self.predicted
        return None if p is None or p.low == p.high else p.low <= self.measured <= p.high


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TrainingRun(Result):
    """The results of one training.

    Attributes:
        folder: the folder that they were read from.
        record: the content of `record.json`; docs/reference/record.md explains every key.
        steps: one mapping for each optimizer step, in order.
        text: the run file.
    """

    folder: Path
    record: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Return the document of `meshwright train --json`: the record."""
        return jsonable(self.record)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each optimizer step: step, loss, step_s, tokens_per_s_per_device and more."""
        return [dict(step) for step in self.steps]

    def summary(self) -> str:
        """Return model, plan, number of steps, loss and median step time."""
        s, run = self.statistics, self.run
        parts = [f"{s['steps']:,} steps"]
        if s["last_loss"] is not None:
            parts.append(f"loss {s['first_loss']:.3f} to {s['last_loss']:.3f}")
        if s["step_s"]["n"]:
            parts.append(f"{seconds(s['step_s']['median'])} a step")
            parts.append(f"{rate(s['tokens_per_s_per_device'])} tokens/s/device")
        return f"{run['model']['name']}, {run['plan_in_words']}: {', '.join(parts)}"

    @property
    def statistics(self) -> Mapping[str, Any]:
        """Medians and totals over the steps."""
        return self.record["statistics"]

    @property
    def run(self) -> Mapping[str, Any]:
        """The resolved run."""
        return self.record["run"]

    def measured_quantities(self) -> list[MeasuredQuantity]:
        """Return each measured quantity with its prediction: step time, throughput, MFU, memory."""
        s = self.statistics
        rows = []
        if s["step_s"]["n"]:
            step, rates = s["step_s"], s["throughput"]
            rows = [
                self._row("step", "step time", "s", step["median"], step["low"], step["high"]),
                self._row(
                    "tokens_per_s_per_device", "tokens/s/device", "tokens/s",
                    rates["median"], rates["low"], rates["high"],
                ),
            ]  # fmt: skip
            if s["mfu"] is not None:
                scale = s["mfu"] / rates["median"]
                rows.append(self._row("mfu", "MFU", "ratio", s["mfu"], rates["low"] * scale, rates["high"] * scale))
        peak = s["peak_memory_bytes"]
        return rows + ([] if peak is None else [self._row("memory_bytes", "memory per device", "bytes", peak)])

    def _row(
        self, key: str, name: str, unit: str, measured: float, low: float | None = None, high: float | None = None
    ) -> MeasuredQuantity:
        found = (self.record.get("predicted") or {}).get(key)
        predicted = None
        if isinstance(found, Mapping):
            predicted = Estimate(
                value=found["value"], low=found["low"], high=found["high"], unit=unit,
                tier=Tier[found["tier"].upper()],
            )  # fmt: skip
        elif found:  # a value without an interval
            predicted = Estimate(value=found, low=found, high=found, unit=unit, tier=Tier.DATASHEET)
        return MeasuredQuantity(
            name=name, measured=measured, measured_low=low, measured_high=high, unit=unit, predicted=predicted
        )

    def published(self) -> list[PublishedRun]:
        """Published runs of the same model and task: same accelerator first, then same number format, then newest.

        Empty for a device that the catalogue does not know: its rates compare with nothing.
        """
        accelerator = self.record["device"]["accelerator"]
        if accelerator is None:
            return []
        model, task = self.run["model"]["name"], self.run["task"]
        if not may_be_published(model):
            return []
        same = [
            run
            for run in read_runs(measured_runs_path())
            if run.conditions is not None
            and run.tokens_per_s_per_device
            and run.conditions.model.name == model
            and run.task == task
        ]
        same.sort(key=lambda run: run.date, reverse=True)
        precision = self.run["precision"]["name"]
        same.sort(key=lambda r: (r.groups["accelerator"] != accelerator, r.groups["precision"] != precision))
        return same


def read_training(folder: Path) -> TrainingRun:
    """Read the training in `folder`. Raises InputError when there is none, or with every damaged field of a file."""
    where = folder / "record.json"
    try:
        record = load_json(where)
        where = folder / "steps.jsonl"
        lines = load_text(where).splitlines()
        steps = [parse_json(line) for line in lines]
        where = folder / "run.yaml"
        text = load_text(where)
    except OSError as error:
        raise InputError(
            f"no whole training in {folder}: {error.strerror or error}", got=str(error.filename or folder),
            hint="name the folder that `meshwright train` printed",
        ) from None  # fmt: skip
    except ValueError as error:
        raise InputError(f"{where} cannot be read: {error}") from None
    require_format(record, where=folder / "record.json")
    check(record, kind=RecordFields, where=str(folder / "record.json"))
    check(steps, kind=STEPS, where=str(folder / "steps.jsonl"), is_by_line=True)
    return TrainingRun(folder=folder, record=record, steps=steps, text=text)
