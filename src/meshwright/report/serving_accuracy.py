"""Predictions of published inference points and their errors: what `meshwright inference accuracy` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.inference.comparison import (
    PointComparison,
    PointErrors,
    PointReport,
    PredictPoints,
    compare_points,
)
from meshwright.inference.constants import shipped_constants
from meshwright.inference.points import PublishedPoint, read_points, shipped_points_path
from meshwright.inference.predict import ServingPredictions, predict_points
from meshwright.report.quantities import percent
from meshwright.report.result import Result
from meshwright.report.text_table import TextTable

LONGEST_NAME = 40


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServingAccuracy(Result):
    """Errors of the predictions of published inference points.

    Attributes:
        comparison: each point with its prediction, and errors by group.
        leave_one_source_out: True if each source was predicted by constants fitted without it.
        num_fitted: points of the file whose source is among those that the constants were fitted to.
    """

    comparison: PointComparison
    leave_one_source_out: bool
    num_fitted: int

    @property
    def overall(self) -> PointErrors:
        """Errors of all points."""
        return self.comparison.summary

    @property
    def groups(self) -> dict[str, dict[str, PointErrors]]:
        """Errors by kind of group (source, accelerator, engine, ...) and group."""
        return self.comparison.groups

    @property
    def rows(self) -> list[PointReport]:
        """Each point with its prediction, in SI units."""
        return self.comparison.rows

    def to_dict(self) -> dict[str, Any]:
        """Return the document of `meshwright inference accuracy --json`."""
        from meshwright.report.documents.json_values import jsonable

        return jsonable(
            {
                "summary": self.overall,
                "groups": self.groups,
                "unpredicted": self.comparison.unpredicted,
                "leave_one_source_out": self.leave_one_source_out,
                "rows_of_fitted_sources": self.num_fitted,
                "units": {"rates": "tokens/s of all devices", "times": "s", "errors": "ratio"},
                "rows": self.rows,
            }
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each point."""
        from meshwright.report.documents.json_values import jsonable

        return [
            {k: v for k, v in jsonable(row.as_json()).items() if not isinstance(v, list | dict)}
            for row in self.rows
        ]

    def summary(self) -> str:
        """Return number of points, median error, bias and coverage of the interval."""
        m = self.overall
        if not m.num_predicted:
            return f"none of {m.num_rows:,} points says enough to be predicted"
        seen = "leave-one-source-out" if self.leave_one_source_out else "constants as shipped"
        return (
            f"{m.num_predicted:,} of {m.num_rows:,} points predicted ({seen}): median error "
            f"{percent(m.median_abs_error)}, 90th percentile {percent(m.p90_abs_error)}, bias {100 * m.bias:+.1f} %, "
            f"{percent(m.interval_coverage)} inside the 80 % interval"
        )

    def tables(self, by: str) -> list[TextTable]:
        """Errors by group, and the reasons of points that are not predicted."""
        rows = [
            (_short(name), m.num_rows, m.num_predicted, *_cells(m)) for name, m in self.groups[by].items()
        ]  # fmt: skip
        rows.append(("all", self.overall.num_rows, self.overall.num_predicted, *_cells(self.overall)))
        headings = (by, "points", "predicted", "median", "p90", "bias", "in interval")
        found = [TextTable(title="", headings=headings, rows=rows)]
        if self.comparison.unpredicted:
            reasons = list(self.comparison.unpredicted.items())
            found.append(TextTable(title="", headings=("not predicted because", "points"), rows=reasons))
        return found

    def _repr_html_(self) -> str:
        from meshwright.report.fragment import fragment
        from meshwright.report.html import text_table

        parts = [text_table(shown) for shown in self.tables("source")]
        return fragment("Accuracy of inference", parts, lead=self.summary())


def _short(name: str) -> str:
    """A source's name as a table has room for it; the document has the whole."""
    name = name.removeprefix("https://")
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


def _cells(m: PointErrors) -> tuple[str, ...]:
    if not m.num_predicted:
        return ("", "", "", "")
    return (
        percent(m.median_abs_error), percent(m.p90_abs_error), f"{100 * m.bias:+.1f} %", percent(m.interval_coverage),
    )  # fmt: skip


def serving_accuracy(*, points: Path | None = None, leave_one_source_out: bool = False) -> ServingAccuracy:
    """Predict the points of a CSV file, or the shipped ones, and compare.

    Raises InputError for a file that cannot be read.
    """
    found = read_points(points or shipped_points_path())
    seen = shipped_constants().sources
    predict: PredictPoints = _leave_one_source_out if leave_one_source_out else _as_shipped
    return ServingAccuracy(
        comparison=compare_points(found, predict),
        leave_one_source_out=leave_one_source_out,
        num_fitted=sum(p.conditions is not None and p.source in seen for p in found),
    )


def _as_shipped(points: Sequence[PublishedPoint]) -> ServingPredictions:
    return predict_points([p.conditions for p in points if p.conditions], shipped_constants())


def _leave_one_source_out(points: Sequence[PublishedPoint]) -> ServingPredictions:
    """Each source by constants fitted to the shipped points of all other sources."""
    from meshwright.inference.fit import fit, spread_as

    shipped = [p for p in read_points(shipped_points_path()) if p.conditions is not None]
    columns = {name: np.full(len(points), np.nan) for name in ("value", "low", "high")}
    for source in sorted({p.source for p in points}):
        rows = [i for i, p in enumerate(points) if p.source == source]
        refit = spread_as(fit([p for p in shipped if p.source != source]), shipped_constants())
        part = predict_points([c for i in rows if (c := points[i].conditions)], refit)
        for name, values in columns.items():
            values[rows] = getattr(part, name)
    return ServingPredictions(**columns)
