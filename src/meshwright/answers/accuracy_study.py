"""Predictions of published measured runs and their errors: what `meshwright accuracy` prints."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.accuracy.predict import predict
from meshwright.accuracy.report import HEADLINE, AccuracyReport, RowReport, compare
from meshwright.accuracy.rows import PublishedRun, read_failed, read_runs
from meshwright.accuracy.shipped import failed_configs_path, measured_runs_path
from meshwright.answers.quantities import percent
from meshwright.calibration.parameters import fitted
from meshwright.json_values import jsonable
from meshwright.result import Advance, Result, ignore

if TYPE_CHECKING:
    from meshwright.accuracy.metrics import Metrics, Predictions


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AccuracyStudy(Result):
    """Errors of the predictions of measured runs.

    Attributes:
        report: errors of all rows, of each group, of memory; one `RowReport` for each row.
        leave_one_source_out: True if each source was predicted by a calibration fitted without it.
    """

    report: AccuracyReport
    leave_one_source_out: bool = False

    @property
    def overall(self) -> Metrics:
        """Errors of all rows."""
        return self.report.summary

    @property
    def headline(self) -> Metrics | None:
        """Errors of the best documented rows: quality A, GPU, no sweep. None if there is no such row."""
        return self.report.headline

    @property
    def groups(self) -> dict[str, dict[str, Metrics]]:
        """Errors by kind of group (source, accelerator, precision, ...) and group."""
        return self.report.groups

    @property
    def rows(self) -> list[RowReport]:
        """Each measured run with its prediction. Rates are tokens/s per device, NaN if unknown."""
        return self.report.rows

    def to_dict(self) -> dict[str, Any]:
        return jsonable({**self.report.as_json(), "each_source_left_out": self.leave_one_source_out})

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each measured run: groups, measured and predicted tokens/s per device, error."""
        return [
            {
                "id": row.run.id,
                **row.run.groups,
                "measured_tokens_per_s_per_device": row.measured,
                "predicted_tokens_per_s_per_device": row.predicted,
                "predicted_tokens_per_s_per_device_low": row.low,
                "predicted_tokens_per_s_per_device_high": row.high,
                "error_ratio": row.signed_error,
                "fits": row.fits,
                "reason": None if row.run.reason is None else row.run.reason.value,
            }
            for row in self.rows
        ]

    def summary(self) -> str:
        """Return number of rows, median error, bias and coverage of the interval, of the headline rows if there are."""
        m, rows = self.overall, "measured runs"
        if self.headline and self.headline.num_predicted:
            m, rows = self.headline, f"{rows} of {HEADLINE}"
        fit = "leave-one-source-out" if self.leave_one_source_out else "calibration fitted on these rows"
        return (
            f"{m.num_predicted:,} of {m.num_rows:,} {rows} predicted ({fit}): median error "
            f"{percent(m.median_abs_error)}, bias {100 * m.bias:+z.1f} %, {percent(m.interval_coverage)} inside "
            "the 80 % interval"
        )


def accuracy_study(
    *,
    runs: str | os.PathLike[str] | None = None,
    failed: str | os.PathLike[str] | None = None,
    leave_one_source_out: bool = False,
    advance: Advance = ignore,
) -> AccuracyStudy:
    """Predict the measured runs of a CSV file, or the shipped ones, and compare.

    `failed` lists configurations that ran out of memory; the shipped list goes with the shipped runs.
    `advance` is called with the number of rows that a leave-one-source-out fit has predicted. Raises InputError for
    a file that cannot be read.
    """
    if failed is None and runs is None:
        failed = failed_configs_path()
    rows = read_runs(Path(runs or measured_runs_path()))
    rejected = None if failed is None else read_failed(Path(failed))
    predictor = _leave_one_source_out_predictor(advance) if leave_one_source_out else predict
    report = compare(rows, predict=predictor, failed=rejected)
    return AccuracyStudy(report=report, leave_one_source_out=leave_one_source_out)


def _leave_one_source_out_predictor(advance: Advance) -> Callable[[Sequence[PublishedRun]], Predictions]:
    """Predict by calibrations of the shipped runs, each fitted without the source that it predicts."""
    from meshwright.fitting.leave_one_source_out import predict_leave_one_source_out
    from meshwright.fitting.published_runs import fit

    known = [row for row in read_runs(measured_runs_path()) if row.reason is None]
    whole = fit(known, made="refitted")

    def predictor(runs: Sequence[PublishedRun]) -> Predictions:
        return predict_leave_one_source_out(runs, whole, intervals=fitted(), progress=advance)

    return predictor
