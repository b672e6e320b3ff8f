"""Predictions of published inference points and their errors: what `meshwright inference accuracy` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.answers.quantities import percent
from meshwright.answers.serving_question import check_calibrated, server_calibration
from meshwright.answers.text_table import TextTable
from meshwright.errors import InputError
from meshwright.inference.comparison import PointComparison, PointErrors, PointReport, compare_points
from meshwright.inference.constants import ServingCalibration, shipped_constants
from meshwright.inference.fit import fit, spread_as
from meshwright.inference.measured import ServedGiven, measured_server
from meshwright.inference.points import PublishedPoint, read_points, shipped_points_path
from meshwright.inference.predict import ServingPredictions, predict_points
from meshwright.inference.server_fit import ServerCalibration, of_server
from meshwright.json_values import jsonable
from meshwright.result import Result
from meshwright.runfile import named_cluster
from meshwright.runfile.hardware import stated_cluster

LONGEST_NAME = 40


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServingAccuracy(Result):
    """Errors of the predictions of published inference points.

    Attributes:
        comparison: each point with its prediction, and errors by group.
        leave_one_source_out: True if each source was predicted by constants fitted without it.
        num_fitted: points of the file whose source is among those that the constants were fitted to.
        calibration: the calibrated server whose constants predicted records; None for those shipped.
        unused_loads: loads of records that were not used, by the reason.
    """

    comparison: PointComparison
    leave_one_source_out: bool
    num_fitted: int
    calibration: str | None = None
    unused_loads: Mapping[str, int] = field(default_factory=dict)

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
        return jsonable(
            {
                "summary": self.overall, "groups": self.groups, "unpredicted": self.comparison.unpredicted,
                "leave_one_source_out": self.leave_one_source_out, "rows_of_fitted_sources": self.num_fitted,
                "calibration": self.calibration, "unused_loads": self.unused_loads,
                "units": {"rates": "tokens/s of all devices", "times": "s", "errors": "ratio"}, "rows": self.rows,
            }
        )  # fmt: skip

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each point."""
        return [
            {k: v for k, v in jsonable(row.as_json()).items() if not isinstance(v, list | dict)} for row in self.rows
        ]

    def summary(self) -> str:
        """Return number of points, median error, bias and coverage of the interval."""
        m = self.overall
        if not m.num_predicted:
            return f"none of {m.num_rows:,} points says enough to be predicted"
        seen = "leave-one-source-out" if self.leave_one_source_out else self.calibration or "constants as shipped"
        return (
            f"{m.num_predicted:,} of {m.num_rows:,} points predicted ({seen}): median error "
            f"{percent(m.median_abs_error)}, 90th percentile {percent(m.p90_abs_error)}, bias {100 * m.bias:+z.1f} %, "
            f"{percent(m.interval_coverage)} inside the 80 % interval"
        )

    def tables(self, by: str) -> list[TextTable]:
        """Errors by group, and the reasons of points that are not predicted."""
        rows = [(_short(name), m.num_rows, m.num_predicted, *_cells(m)) for name, m in self.groups[by].items()]
        rows.append(("all", self.overall.num_rows, self.overall.num_predicted, *_cells(self.overall)))
        headings = (by, "points", "predicted", "median", "p90", "bias", "in interval")
        found = [TextTable(title="", headings=headings, rows=rows)]
        if self.comparison.unpredicted:
            reasons = list(self.comparison.unpredicted.items())
            found.append(TextTable(title="", headings=("not predicted because", "points"), rows=reasons))
        return found


def _short(name: str) -> str:
    """A source's name as a table has room for it; the document has the whole."""
    name = name.removeprefix("https://")
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


def _cells(m: PointErrors) -> tuple[str, ...]:
    if not m.num_predicted:
        return ("", "", "", "")
    return (
        percent(m.median_abs_error), percent(m.p90_abs_error), f"{100 * m.bias:+z.1f} %", percent(m.interval_coverage),
    )  # fmt: skip


def serving_accuracy(
    *,
    points: Path | None = None,
    leave_one_source_out: bool = False,
    records: Sequence[Path] = (),
    calibration: Path | None = None,
    cluster: str | None = None,
    given: ServedGiven | None = None,
    hardware: Mapping[str, Any] | None = None,
) -> ServingAccuracy:
    """Predict the points of a CSV file, of records of `bench serve`, or the shipped ones, and compare.

    The shipped constants predict records on the devices of `cluster`; a calibration file brings its own.
    `hardware`: what is stated of the cluster, as keys of a run file.
    Raises InputError for files that cannot be read and for contradictions.
    """
    if records:
        if points is not None or leave_one_source_out:
            raise InputError("records are predicted on their own", hint="leave --points and --leave-one-source-out out")
        return _of_records(records, server_calibration(calibration), cluster, given, hardware or {})
    if calibration is not None or cluster is not None or any((hardware or {}).values()):
        raise InputError("a calibration, a cluster and its hardware belong to records", hint="--records DIR")
    found = read_points(points or shipped_points_path())
    seen = shipped_constants().sources
    predict = _leave_one_source_out if leave_one_source_out else partial(_predicted, shipped_constants())
    return ServingAccuracy(
        comparison=compare_points(found, predict),
        leave_one_source_out=leave_one_source_out,
        num_fitted=sum(p.conditions is not None and p.source in seen for p in found),
    )


def _of_records(
    folders: Sequence[Path], calibrated: ServerCalibration | None, cluster: str | None, given: ServedGiven | None,
    hardware: Mapping[str, Any],
) -> ServingAccuracy:  # fmt: skip
    """Own measurements, as points whose source is their configuration."""
    if cluster is None and calibrated is None:
        raise InputError("records do not say on which devices they were made", hint="--cluster, or --calibration FILE")
    name = cluster or f"{calibrated.accelerator}-1x1" if calibrated else str(cluster)
    place = named_cluster(stated_cluster(name, **hardware))
    found = measured_server(folders, cluster=place, given=given)
    points = [measured.point for measured in found.points]
    constants = shipped_constants()
    if calibrated is not None:
        check_calibrated(calibrated, accelerator=place.accelerator.name, engine=found.engine.name)
        points, constants = [of_server(p, calibrated.engine.server) for p in points], calibrated.constants
    fitted = {} if calibrated is None else calibrated.constants.sources

    return ServingAccuracy(
        comparison=compare_points(points, partial(_predicted, constants)),
        leave_one_source_out=False,
        num_fitted=sum(p.source in fitted for p in points),
        calibration=None if calibrated is None else calibrated.made,
        unused_loads=dict(found.unused),
    )


def _predicted(constants: ServingCalibration, points: Sequence[PublishedPoint]) -> ServingPredictions:
    return predict_points([p.conditions for p in points if p.conditions], constants)


def _leave_one_source_out(points: Sequence[PublishedPoint]) -> ServingPredictions:
    """Each source by constants fitted to the shipped points of all other sources."""
    shipped = [p for p in read_points(shipped_points_path()) if p.conditions is not None]
    columns = {name: np.full(len(points), np.nan) for name in ("value", "low", "high")}
    for source in sorted({p.source for p in points}):
        rows = [i for i, p in enumerate(points) if p.source == source]
        rest = [p for p in shipped if p.source != source]
        refit = spread_as(fit(rest, shipped_constants()), shipped_constants())
        part = predict_points([c for i in rows if (c := points[i].conditions)], refit)
        for name, values in columns.items():
            values[rows] = getattr(part, name)
    return ServingPredictions(**columns)
