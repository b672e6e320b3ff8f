"""The accuracy report: every published row with its prediction, and errors by group."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.accuracy.failed import FailedReport, judge, states_memory
from meshwright.accuracy.metrics import TAIL_QUANTILE, Metrics, Predictions, measure, memory_errors
from meshwright.accuracy.rows import PublishedRun
from meshwright.accuracy.shipped import blind_predictions, blind_sources
from meshwright.files import write_csv
from meshwright.json_values import picked
from meshwright.specs.memory_budget import FitVerdict, verdict_of

Predict = Callable[[Sequence[PublishedRun]], Predictions]
"""Function that predicts a non-empty sequence of runs with conditions, in order."""

GROUP_KINDS = (
    "subset", "source", "accelerator", "architecture", "size", "precision", "framework", "task", "quality",
)  # fmt: skip
"""Kinds of groups that the report gives metrics for."""

HEADLINE = "quality A, GPU, no sweep"
"""The subset that the documentation quotes."""
LATER = "sources that came after the code"
"""The subset of rows that were predicted before they were read: fitted or not, their errors are not comparable."""


@dataclass(frozen=True, kw_only=True)
class RowReport:
    """One published row: rates in tokens/s per device, memory in bytes per device. NaN: not known."""

    run: PublishedRun
    predicted: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    memory_predicted_bytes: float = float("nan")
    fit_probability: float = float("nan")

    @property
    def measured(self) -> float:
        return self.run.tokens_per_s_per_device or float("nan")

    @property
    def signed_error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def fits(self) -> bool | None:
        """True if the estimate of memory is within the device's; None if there is none."""
        return None if self.verdict is None else self.verdict is FitVerdict.FITS

    @property
    def verdict(self) -> FitVerdict | None:
        """Verdict on the memory of the run; None if it was not estimated."""
        return verdict_of(self.fit_probability) if isfinite(self.fit_probability) else None

    def as_json(self) -> dict[str, Any]:
        run = self.run
        row: dict[str, Any] = {
            "id": run.id,
            "line": run.line,
            "source": run.source_key,
            **picked(
                self, "predicted", "low", "high", "measured", "signed_error", "fits", "verdict", "fit_probability"
            ),
            **picked(run, "assumed", "unread"),
        }
        if run.memory_bytes:
            row["memory_measured_bytes"] = run.memory_bytes
            row["memory_predicted_bytes"] = self.memory_predicted_bytes
            row["memory_definition"] = run.memory_definition
        if run.conditions:
            row["plan"] = run.conditions.plan.describe()
            row["conditions"] = run.conditions.stated
        if run.reason:
            row["reason"] = run.reason.value
            row["reason_detail"] = run.reason_detail
        return row


@dataclass(frozen=True, kw_only=True)
class AccuracyReport:
    """Result of `meshwright accuracy`."""

    summary: Metrics
    groups: dict[str, dict[str, Metrics]]  # kind of group -> group -> metrics
    rows: list[RowReport]
    unpredicted: dict[str, int]  # reason -> rows
    memory: dict[str, dict[str, float]]  # definition of memory in the source -> errors
    failed: FailedReport | None
    blind: dict[str, Metrics]
    """Errors of the shipped predictions that were made before their source was read; empty if there is no such row."""

    @property
    def headline(self) -> Metrics | None:
        return self.groups["subset"].get(HEADLINE)

    @property
    def by_subset(self) -> dict[str, Metrics]:
        """Errors of the subsets, the headline first, and of all rows, which the largest sweep decides, last."""
        first = {HEADLINE: self.headline} if self.headline else {}
        return first | self.groups["subset"] | {"all rows": self.summary}

    @property
    def rejected(self) -> dict[str, list[str]]:
        """Runs that worked though the verdict is that they do not fit: source -> rows.

        The source of a row in parentheses does not state recomputation or offloading.
        """
        rows: dict[str, list[str]] = defaultdict(list)
        for row in self.rows:
            if row.verdict is FitVerdict.DOES_NOT_FIT:
                rows[row.run.source_key].append(row.run.id if states_memory(row.run) else f"({row.run.id})")
        return dict(rows)

    def as_json(self) -> dict[str, Any]:
        return {
            **picked(self, "summary", "headline", "groups", "blind", "memory", "unpredicted", "failed", "rejected"),
            "units": {"predicted": "tokens/s per device", "memory": "bytes per device", "errors": "ratio"},
            "rows": self.rows,
        }


def compare(
    runs: Sequence[PublishedRun], *, predict: Predict, failed: Sequence[PublishedRun] | None = None
) -> AccuracyReport:
    """Predict all `runs` (and `failed` configurations) that have conditions and compare."""
    known = [run for run in runs if run.conditions is not None]
    predictions = predict(known) if known else Predictions.none()
    return AccuracyReport(
        summary=measure(known, predictions, num_rows=len(runs)),
        groups=_groups(runs, known, predictions),
        rows=_row_reports(runs, predictions),
        unpredicted=dict(Counter(run.reason.value for run in runs if run.reason).most_common()),
        memory={
            definition: {
                "num_rows": len(errors),
                "median_abs_error": float(np.median(np.abs(errors))),
                "p90_abs_error": float(np.quantile(np.abs(errors), TAIL_QUANTILE)),
                "bias": float(np.median(errors)),
            }
            for definition, errors in memory_errors(known, predictions).items()
        },
        failed=None if failed is None else _judge(failed, known, predictions, predict),
        blind=_blind(known),
    )


def _blind(known: Sequence[PublishedRun]) -> dict[str, Metrics]:
    """Errors of what was said of the rows among `known` before they were read: all, by kind of model, by source."""
    said = blind_predictions()
    runs = [run for run in known if run.id in said and run.source_key == said[run.id].source_key]
    members: dict[str, list[PublishedRun]] = {"all rows": runs} if runs else {}
    for kind in ("architecture", "source"):
        for group in sorted({run.groups[kind] for run in runs}):
            members[group] = [run for run in runs if run.groups[kind] == group]
    return {name: measure(own, _as_said(own), num_rows=len(own)) for name, own in members.items()}


def _as_said(runs: Sequence[PublishedRun]) -> Predictions:
    said = [blind_predictions()[run.id] for run in runs]
    unknown = np.full(len(runs), np.nan)
    return Predictions(
        tokens_per_s_per_device=np.array([one.predicted for one in said]),
        low=np.array([one.low for one in said]),
        high=np.array([one.high for one in said]),
        memory_allocated_bytes=unknown,
        memory_reserved_bytes=unknown,
        fit_probability=np.array([float(one.fits) for one in said]),
    )


def _row_reports(runs: Sequence[PublishedRun], predictions: Predictions) -> list[RowReport]:
    reports, i = [], 0
    for run in runs:
        if run.conditions is None:
            reports.append(RowReport(run=run))
            continue
        reserved = run.memory_definition == "reserved"
        memory = predictions.memory_reserved_bytes if reserved else predictions.memory_allocated_bytes
        reports.append(
            RowReport(
                run=run,
                predicted=float(predictions.tokens_per_s_per_device[i]),
                low=float(predictions.low[i]),
                high=float(predictions.high[i]),
                memory_predicted_bytes=float(memory[i]),
                fit_probability=float(predictions.fit_probability[i]),
            )
        )
        i += 1
    return reports


def _groups(
    runs: Sequence[PublishedRun], known: Sequence[PublishedRun], predictions: Predictions
) -> dict[str, dict[str, Metrics]]:
    """Metrics of every group that holds a row, by kind of group."""
    num_rows = Counter(pair for run in runs for pair in _memberships(run))
    members: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, run in enumerate(known):
        for pair in _memberships(run):
            members[pair].append(i)
    groups: dict[str, dict[str, Metrics]] = {kind: {} for kind in GROUP_KINDS}
    for kind, group in sorted(num_rows):
        index = np.array(members[kind, group], dtype=np.intp)
        groups[kind][group] = measure(
            [known[i] for i in index], predictions.take(index), num_rows=num_rows[kind, group]
        )
    return groups


def _memberships(run: PublishedRun) -> list[tuple[str, str]]:
    return [*run.groups.items(), ("subset", subset_of(run))]


def subset_of(run: PublishedRun) -> str:
    """Return the subset of rows with which `run` is reported."""
    if run.source_key in blind_sources():
        return LATER
    if run.is_sweep:
        return f"sweep {run.source_key}"
    if not run.is_gpu:
        return "other accelerators"
    return HEADLINE if run.quality_letter == "A" else "other quality, GPU, no sweep"


def _judge(
    failed: Sequence[PublishedRun], known: Sequence[PublishedRun], predictions: Predictions, predict: Predict
) -> FailedReport:
    predictable = [run for run in failed if run.reason is None and run.conditions is not None]
    excluded = Counter(run.reason.value for run in failed if run.reason)
    judged = predict(predictable) if predictable else Predictions.none()
    return judge(predictable, judged, known, predictions, excluded=excluded)


# --- the rows as CSV ---


COLUMNS: tuple[str, ...] = (
    "id", "source", "model", "accelerator", "num_devices", "plan", "predicted", "low", "high", "measured",
    "signed_error", "memory_predicted_bytes", "memory_measured_bytes", "memory_definition", "fits", "assumed",
    "reason", "reason_detail", "conditions", "unread",
)  # fmt: skip
"""Columns of the file. Rates in tokens/s per device; empty where not known."""


def write_rows(report: AccuracyReport, path: Path) -> None:
    """Write one line per published row. Raises InputError when the file cannot be written."""
    write_csv(path, [_line(row) for row in report.rows], columns=COLUMNS)


def _line(row: RowReport) -> dict[str, object]:
    conditions = row.run.conditions
    values = row.as_json() | {
        "model": row.run.model_name,
        "accelerator": row.run.accelerator_name,
        "num_devices": conditions.num_devices if conditions else "",
        "assumed": "; ".join(row.run.assumed),
        "unread": "; ".join(row.run.unread),
        "conditions": "; ".join(f"{k}={v}" for k, v in (conditions.stated if conditions else {}).items()),
    }
    return {key: _cell(value) for key, value in values.items()}


def _cell(value: object) -> object:
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
