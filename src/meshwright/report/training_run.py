"""A training as its folder tells it: `record.json` and `steps.jsonl`, read back without a tensor framework.

docs/reference/record.md explains every key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.accuracy.rows import PublishedRun, read_runs
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.errors import InputError
from meshwright.specs.estimate import Estimate, Tier

WARM_UP_STEPS = 3
"""Steps that the engine leaves out of its statistics at the beginning."""


@dataclass(frozen=True, kw_only=True)
class MeasuredQuantity:
    """One measured quantity beside what was predicted. `measured_low` and `measured_high` are the extreme steps."""

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
        """Whether the interval holds the measured value; None where there is no interval."""
        p = self.predicted
        return None if p is None or p.low == p.high else p.low <= self.measured <= p.high


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingRun:
    """What one training left behind."""

    record: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]  # one line a step, in order
    text: str  # the run file

    @property
    def statistics(self) -> Mapping[str, Any]:
        return self.record["statistics"]

    @property
    def run(self) -> Mapping[str, Any]:
        return self.record["run"]

    def measured_quantities(self) -> list[MeasuredQuantity]:
        """Measured beside predicted, quantity by quantity; nothing that was not measured."""
        s = self.statistics
        rows = []
        if s["step_s"]["n"]:
            step, rates = s["step_s"], s["throughput"]
            scale = s["mfu"] / rates["median"]
            rows = [
                self._row("step", "step time", "s", step["median"], step["low"], step["high"]),
                self._row(
                    "tokens_per_s_per_device", "tokens/s/device", "tokens/s",
                    rates["median"], rates["low"], rates["high"],
                ),
                self._row("mfu", "MFU", "ratio", s["mfu"], rates["low"] * scale, rates["high"] * scale),
            ]  # fmt: skip
        return [*rows, self._row("memory_bytes", "memory per device", "bytes", s["peak_memory_bytes"])]

    def _row(
        self,
        key: str,
        name: str,
        unit: str,
        measured: float,
        low: float | None = None,
        high: float | None = None,
    ) -> MeasuredQuantity:
        found = (self.record["predicted"] or {}).get(key)
        predicted = None
        if isinstance(found, Mapping):
            predicted = Estimate(
                value=found["value"], low=found["low"], high=found["high"], unit=unit,
                tier=Tier[found["tier"].upper()],
            )  # fmt: skip
        elif found is not None:  # a value without an interval
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
    """The training that `folder` holds. Raises InputError when there is none, or its files are not what they were."""
    try:
        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        lines = (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [json.loads(line) for line in lines]
        text = (folder / "run.yaml").read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"no whole training in {folder}: {error.strerror or error}", got=str(error.filename or folder),
            hint="name the folder that `meshwright train` printed",
        ) from None  # fmt: skip
    except ValueError as error:
        raise InputError(f"a file of {folder} is no JSON: {error}") from None
    missing = [key for key in ("run", "device", "statistics", "ending") if key not in record]
    if missing:
        raise InputError(f"{folder / 'record.json'} lacks {', '.join(missing)}")
    return TrainingRun(record=record, steps=steps, text=text)
