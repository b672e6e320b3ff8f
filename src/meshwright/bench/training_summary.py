"""Summary of the runs of each configuration, and the error of their predictions.

The step time of a configuration is the median of its runs' medians, with the 95 % interval of the median by
order statistics (`records.measurement`). Fewer than six runs give their whole range. Rates are tokens of a
step over its time and devices. If each run has its own prediction, their median counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.json_values import picked
from meshwright.records.device import FEWEST_SAMPLES
from meshwright.records.measurement import Measurement, ValueRange
from meshwright.records.trainings import TrainingRow, TrainingStatus


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One configuration. `rows` are its measured runs, `failures` all others."""

    name: str
    rows: tuple[TrainingRow, ...]
    failures: tuple[TrainingRow, ...]

    @property
    def is_measured(self) -> bool:
        return bool(self.rows)

    @property
    def has_confidence(self) -> bool:
        """Return True if the intervals have 95 % confidence, False if they are the range of few runs."""
        return len(self.rows) >= FEWEST_SAMPLES

    @property
    def _measurement(self) -> Measurement:
        return Measurement(seconds=tuple(_known(row.step_s_median) for row in self.rows))

    @property
    def step_s(self) -> ValueRange:
        """Median of the runs, with its interval."""
        low, high = self._measurement.interval
        return ValueRange(value=self._measurement.median, low=low, high=high)

    @property
    def tokens_per_s_per_device(self) -> ValueRange:
        """Throughput with its interval, from the step time."""
        return self._as_rate(self.step_s)

    @property
    def extremes(self) -> ValueRange:
        """Tokens/s/device of the median, the slowest and the fastest run."""
        seconds = self._measurement.seconds
        return self._as_rate(ValueRange(value=self._measurement.median, low=min(seconds), high=max(seconds)))

    @property
    def mfu(self) -> float:
        """Median of the runs."""
        return self._median("mfu")

    @property
    def peak_memory_bytes(self) -> float:
        """Peak of the fullest process of any run."""
        return max(_known(row.peak_memory_bytes) for row in self.rows)

    @property
    def last_loss(self) -> float | None:
        """Median of the runs' last losses."""
        found = [row.last_loss for row in self.rows if row.last_loss is not None]
        return statistics.median(found) if found else None

    @property
    def predicted_step_s(self) -> ValueRange | None:
        """Predicted step time with its 80 % interval; None: not predicted."""
        if any(row.predicted_step_s is None for row in self.rows) or not self.rows:
            return None
        ends = ("predicted_step_s", "predicted_step_s_low", "predicted_step_s_high")
        value, low, high = (self._median(end) for end in ends)
        return ValueRange(value=value, low=low, high=high)

    @property
    def predicted_rate(self) -> ValueRange | None:
        """Tokens/s/device."""
        return None if self.predicted_step_s is None else self._as_rate(self.predicted_step_s)

    @property
    def predicted_memory_bytes(self) -> float | None:
        return None if self.predicted_step_s is None else self._median("predicted_memory_bytes")

    @property
    def error(self) -> float | None:
        """Measured over predicted tokens/s/device, minus one."""
        p = self.predicted_rate
        return None if p is None else self.tokens_per_s_per_device.value / p.value - 1

    @property
    def is_inside(self) -> bool | None:
        """Return True if the predicted interval holds the measured step time."""
        p = self.predicted_step_s
        return None if p is None else p.low <= self.step_s.value <= p.high

    @property
    def num_inside(self) -> int:
        """Number of runs inside the interval of their own prediction."""
        return sum(row.inside == "yes" for row in self.rows)

    @property
    def outliers(self) -> tuple[TrainingRow, ...]:
        """Runs far from the others."""
        return tuple(self.rows[outlier.sample - 1] for outlier in self._measurement.outliers)

    def as_json(self) -> dict[str, Any]:
        """Fields of `--json`."""
        fields: dict[str, Any] = {
            "configuration": self.name,
            "num_runs": len(self.rows),
            "failures": [{"run": r.run, "status": r.status, "reason": r.reason} for r in self.failures],
            "engine": (*self.rows, *self.failures)[0].engine,
        }
        if not self.is_measured:
            return fields
        same = ("model", "precision", "plan", "num_devices", "sequence_length", "global_batch", "micro_batch")
        return fields | picked(self.rows[0], *same) | {
            "interval": "95 % of the median" if self.has_confidence else "range of the runs",
            **picked(self, "step_s", "tokens_per_s_per_device"),
            "slowest": self.extremes.low,
            "fastest": self.extremes.high,
            "mfu": self.mfu,
            "mfu_convention": self.rows[0].mfu_convention,
            **picked(self, "peak_memory_bytes", "last_loss"),
            "predicted": self.predicted_rate
            and {
                "step_s": self.predicted_step_s,
                "tokens_per_s_per_device": self.predicted_rate,
                "memory_bytes": self.predicted_memory_bytes,
            },
            **picked(self, "error", "is_inside"),
            "runs_inside": self.num_inside,
            "outliers": [{"run": row.run, "step_s": row.step_s_median} for row in self.outliers],
        }  # fmt: skip

    def _median(self, column: str) -> float:
        return statistics.median(_known(getattr(row, column)) for row in self.rows)

    def _as_rate(self, step: ValueRange) -> ValueRange:
        """Tokens/s/device: the slowest step is the lowest rate."""
        row = self.rows[0]
        per_device = row.tokens_per_step / row.num_devices
        return ValueRange(value=per_device / step.value, low=per_device / step.high, high=per_device / step.low)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One configuration on several engines, in the order of the command line."""

    name: str  # of the configuration, without its engine
    by_engine: dict[str, Summary]

    @property
    def measured(self) -> dict[str, Summary]:
        """Engines that trained at least once."""
        return {engine: summary for engine, summary in self.by_engine.items() if summary.is_measured}

    @property
    def ratios(self) -> dict[str, float]:
        """Tokens/s/device of each engine, relative to the first measured engine."""
        rates = {engine: s.tokens_per_s_per_device.value for engine, s in self.measured.items()}
        first = next(iter(rates.values()), 0.0)
        return {engine: rate / first for engine, rate in rates.items()}

    def as_json(self) -> dict[str, Any]:
        """Fields of `--json`."""
        return {"configuration": self.name, "over_the_first": self.ratios}


def contests(found: Sequence[Summary]) -> list[Contest]:
    """Configurations that ran on more than one engine."""
    groups: dict[str, dict[str, Summary]] = {}
    for summary in found:
        engine = (*summary.rows, *summary.failures)[0].engine
        groups.setdefault(summary.name.replace(f" engine={engine}", ""), {})[engine] = summary
    return [Contest(name=name, by_engine=group) for name, group in groups.items() if len(group) > 1]


@dataclass(frozen=True, kw_only=True)
class PredictionVerdict:
    """Errors of the predictions of all configurations."""

    num_configurations: int
    num_measured: int
    num_predicted: int
    median_error: float | None  # of the absolute errors
    num_inside: int


def summaries(rows: Iterable[TrainingRow], *, names: Sequence[str]) -> list[Summary]:
    """One summary for each of `names` with a run, in that order."""
    found = sorted(rows, key=lambda row: row.run)
    made = [
        Summary(
            name=name,
            rows=tuple(r for r in found if r.configuration == name and r.status is TrainingStatus.OK),
            failures=tuple(r for r in found if r.configuration == name and r.status is not TrainingStatus.OK),
        )
        for name in names
    ]
    return [summary for summary in made if summary.rows or summary.failures]


def verdict(found: Sequence[Summary]) -> PredictionVerdict:
    """Errors of the configurations that were measured and predicted, each counted once."""
    errors = [abs(s.error) for s in found if s.is_measured and s.error is not None]
    return PredictionVerdict(
        num_configurations=len(found),
        num_measured=sum(s.is_measured for s in found),
        num_predicted=len(errors),
        median_error=statistics.median(errors) if errors else None,
        num_inside=sum(s.is_measured and s.is_inside is True for s in found),
    )


def _known(value: float | None) -> float:
    assert value is not None  # rows of this kind have it
    return value
