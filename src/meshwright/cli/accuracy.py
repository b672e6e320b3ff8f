"""`meshwright accuracy`: predicted beside measured, for every published run that says enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.options import html_option, json_option, verb
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.accuracy.corrections import CorrectionsByKernel
    from meshwright.accuracy.metrics import Predictions
    from meshwright.accuracy.report import AccuracyReport
    from meshwright.accuracy.rows import PublishedRun

GROUP_CHOICES = ("source", "accelerator", "architecture", "size", "precision", "framework", "task", "quality")


def _file(name: str, destination: str, text: str) -> Any:
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option(name, destination, type=kind, metavar="FILE.csv", help=text)


@verb(
    "accuracy",
    examples=[
        "meshwright accuracy",
        "meshwright accuracy --by accelerator --rows",
        "meshwright accuracy --leave-one-source-out",
        "meshwright accuracy --runs mine.csv --json",
        "meshwright accuracy --calibration h100.json --leave-one-source-out --by accelerator",
    ],
)
@_file(
    "--runs", "runs_path", "Your measured runs, in the columns of the shipped ones, which are the default."
)
@_file("--failed", "failed_path", "Configurations that did not run; the shipped ones with the shipped runs.")
@click.option(
    "--by",
    type=click.Choice(GROUP_CHOICES),
    default="source",
    show_default=True,
    help="Group the table by this.",
)
@click.option(
    "--leave-one-source-out",
    "leave_out",
    is_flag=True,
    help="Predict each source by a calibration refitted without it (some minutes).",
)
@click.option(
    "--calibration", "calibrations", multiple=True, metavar="FILE",
    help="Kernel shapes that `meshwright calibrate --from-tables` learned of one accelerator. May be repeated.",
)  # fmt: skip
@click.option("--rows", "show_rows", is_flag=True, help="Also print every row.")
@_file("--csv", "csv_path", "Write one line a row: predicted, measured, error, or why not.")
@html_option
@json_option
def command(
    runs_path: Path | None,
    failed_path: Path | None,
    by: str,
    leave_out: bool,
    calibrations: tuple[str, ...],
    show_rows: bool,
    csv_path: Path | None,
    html_path: Path | None,
    as_json: bool,
) -> None:
    """Predict every published measured run that states enough conditions, and report the errors.

    Rates are tokens/s per device. Rows that cannot be predicted are counted with the reason. The calibration
    was fitted on the shipped rows; --leave-one-source-out tells the error on runs that it never saw.
    """
    from meshwright.cli.output import emit_json, note

    report = _report(runs_path, failed_path, leave_out=leave_out, corrections=_surfaces(calibrations))
    if csv_path is not None:
        from meshwright.accuracy.export import write_rows

        write_rows(report, csv_path)
        note(f"wrote {csv_path}")
    if html_path is not None:
        from meshwright.report.accuracy_page import accuracy_page
        from meshwright.report.html import write_page

        write_page(accuracy_page(report, leave_one_source_out=leave_out), path=html_path)
        note(f"wrote {html_path}")
    if as_json:
        emit_json({**report.as_json(), "each_source_left_out": leave_out})
    else:
        _print(report, by=by, show_rows=show_rows)


def _surfaces(calibrations: Sequence[str]) -> dict[str, CorrectionsByKernel]:
    """By accelerator, of files that `meshwright calibrate --from-tables` wrote."""
    from meshwright.calibration.device import load

    corrections: dict[str, CorrectionsByKernel] = {}
    for path in calibrations:
        found = load(path)
        if found.parameters:
            raise InputError(
                f"{path}: holds what one machine was measured to do, which says nothing of the published runs",
                got=found.made, allowed="files of `meshwright calibrate --from-tables`",
            )  # fmt: skip
        corrections[found.accelerator.name] = found.corrections
    return corrections


def _report(
    runs_path: Path | None,
    failed_path: Path | None,
    *,
    leave_out: bool,
    corrections: Mapping[str, CorrectionsByKernel],
) -> AccuracyReport:
    from functools import partial

    from meshwright.accuracy.predict import predict
    from meshwright.accuracy.report import compare
    from meshwright.accuracy.rows import read_failed, read_runs
    from meshwright.accuracy.shipped import failed_configs_path, measured_runs_path

    if failed_path is None and runs_path is None:
        failed_path = failed_configs_path()
    runs = read_runs(runs_path or measured_runs_path())
    failed = None if failed_path is None else read_failed(failed_path)
    chosen = _left_out_predictor(corrections) if leave_out else partial(predict, corrections=corrections)
    return compare(runs, predict=chosen, failed=failed)


def _left_out_predictor(
    corrections: Mapping[str, CorrectionsByKernel],
) -> Callable[[Sequence[PublishedRun]], Predictions]:
    """Predicts by calibrations of the shipped runs, each without the source it predicts."""
    from meshwright.accuracy.rows import read_runs
    from meshwright.accuracy.shipped import measured_runs_path
    from meshwright.calibration.parameters import fitted
    from meshwright.cli.output import note, progress
    from meshwright.fitting.leave_one_source_out import predict_leave_one_source_out
    from meshwright.fitting.published_runs import fit

    note("fitting the shipped runs")
    whole = fit(
        [r for r in read_runs(measured_runs_path()) if r.reason is None],
        made="refitted",
        corrections=corrections,
    )

    def predictor(runs: Sequence[PublishedRun]) -> Predictions:
        with progress("leaving out each source", total=len(runs)) as advance:
            return predict_leave_one_source_out(
                runs, whole, interval_scale=fitted().interval_scale, progress=advance
            )

    return predictor


def _print(report: AccuracyReport, *, by: str, show_rows: bool) -> None:
    from meshwright.cli.output import print_text_tables
    from meshwright.report.accuracy_tables import accuracy_tables, rows_table

    tables = accuracy_tables(report, by=by)
    print_text_tables([rows_table(report), *tables] if show_rows else tables)
