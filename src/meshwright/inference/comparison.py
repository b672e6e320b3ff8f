"""Predictions of published points beside what was measured, and their errors by group.

e = predicted / measured - 1     error: median and 90th percentile of |e|; bias: median of e
coverage                         share of points inside their 80 % interval
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.inference.points import PointConditions, PublishedPoint
from meshwright.inference.predict import ServingPredictions

GROUPS = ("source", "accelerator", "engine", "model", "precision", "metric", "evidence")
"""Kinds of groups that have errors of their own."""

TAIL_QUANTILE = 0.9

PredictPoints = Callable[[Sequence[PublishedPoint]], ServingPredictions]
"""Function that predicts points with conditions, in order."""


@dataclass(frozen=True, kw_only=True)
class PointErrors:
    """Errors of one group of points. Ratios; NaN where no point is predicted."""

    num_rows: int
    num_predicted: int
    median_abs_error: float
    p90_abs_error: float
    bias: float
    interval_coverage: float


@dataclass(frozen=True)
class PointReport:
    """One point with its prediction, in SI units; NaN where there is none."""

    point: PublishedPoint
    predicted: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")

    @property
    def measured(self) -> float:
        """Published value; NaN of a point that cannot be predicted."""
        return self.point.conditions.measured if self.point.conditions else float("nan")

    @property
    def signed_error(self) -> float:
        """Relative error of the prediction: above 0 it is too high."""
        return self.predicted / self.measured - 1

    def as_json(self) -> dict[str, Any]:
        point = self.point
        row: dict[str, Any] = {"id": point.id, "line": point.line, **point.groups}
        if point.conditions is None:
            assert point.reason is not None
            return {**row, "reason": point.reason.value, "reason_detail": point.detail}
        return {**row, **self._prediction(point.conditions), "assumed": point.assumed, "unread": point.unread}

    def _prediction(self, conditions: PointConditions) -> dict[str, Any]:
        return {
            "quantity": conditions.quantity.value, "layout": conditions.served.layout.describe(),
            "input_tokens": conditions.load.input_tokens, "output_tokens": conditions.load.output_tokens,
            "concurrency": conditions.load.concurrency, "batch": conditions.limit.sequences,
            "batch_bound_by": conditions.limit.binds, "measured": self.measured, "predicted": self.predicted,
            "low": self.low, "high": self.high, "signed_error": self.signed_error,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PointComparison:
    """All points with their predictions, and errors by group."""

    summary: PointErrors
    groups: dict[str, dict[str, PointErrors]]
    rows: list[PointReport]
    unpredicted: dict[str, int]  # reason -> rows


def compare_points(points: Sequence[PublishedPoint], predict: PredictPoints) -> PointComparison:
    """Predict all points that say enough, and compare."""
    known = [p for p in points if p.conditions is not None]
    found = predict(known)
    values = {
        id(p): (float(v), float(low), float(high))
        for p, v, low, high in zip(known, found.value, found.low, found.high, strict=True)
    }
    rows = [PointReport(p, *values.get(id(p), ())) for p in points]
    by: dict[str, dict[str, list[PointReport]]] = {kind: defaultdict(list) for kind in GROUPS}
    for row in rows:
        for kind in GROUPS:
            by[kind][row.point.groups[kind]].append(row)
    return PointComparison(
        summary=errors_of(rows),
        groups={k: {name: errors_of(part) for name, part in sorted(v.items())} for k, v in by.items()},
        rows=rows,
        unpredicted=dict(Counter(p.reason.value for p in points if p.reason).most_common()),
    )


def errors_of(rows: Sequence[PointReport]) -> PointErrors:
    """Errors of a group."""
    rated = [row for row in rows if np.isfinite(row.predicted)]
    error = np.array([row.signed_error for row in rated] or [np.nan])
    inside = np.array([row.low <= row.measured <= row.high for row in rated] or [np.nan])
    return PointErrors(
        num_rows=len(rows), num_predicted=len(rated), median_abs_error=float(np.median(np.abs(error))),
        p90_abs_error=float(np.quantile(np.abs(error), TAIL_QUANTILE)), bias=float(np.median(error)),
        interval_coverage=float(inside.mean()),
    )  # fmt: skip
