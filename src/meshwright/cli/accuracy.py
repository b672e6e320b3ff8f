"""`meshwright accuracy`: predicted beside measured, for every published run that says enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.options import html_option, json_option, verb

if TYPE_CHECKING:
    from meshwright.accuracy.failed import FailedReport
    from meshwright.accuracy.metrics import Metrics, Predictions
    from meshwright.accuracy.report import AccuracyReport
    from meshwright.accuracy.rows import PublishedRun
    from meshwright.cli.output import Align

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
    ],
)
@_file("--runs", "runs_path", "Measured runs; the schema of the shipped ones, which are the default.")
@_file("--failed", "failed_path", "Configurations that did not run; the shipped ones with the shipped runs.")
@click.option("--by", type=click.Choice(GROUP_CHOICES), default="source", help="Group the table by this.")
@click.option(
    "--leave-one-source-out",
    "leave_out",
    is_flag=True,
    help="Predict each source by a calibration refitted without it (about a minute).",
)
@click.option("--rows", "show_rows", is_flag=True, help="Also print every row.")
@_file("--csv", "csv_path", "Write one line a row: predicted, measured, error, or why not.")
@html_option
@json_option
def command(
    runs_path: Path | None,
    failed_path: Path | None,
    by: str,
    leave_out: bool,
    show_rows: bool,
    csv_path: Path | None,
    html_path: Path | None,
    as_json: bool,
) -> None:
    """Predict every published measured run that states enough conditions, and report the errors.

    Rates are tokens/s per device. Rows that cannot be predicted are counted with the reason. Nothing is tuned
    to a row while it is predicted.
    """
    from meshwright.cli.output import emit_json, note

    report = _report(runs_path, failed_path, leave_out=leave_out)
    if csv_path is not None:
        from meshwright.accuracy.export import write_rows

        write_rows(report, csv_path)
        note(f"wrote {csv_path}")
    if html_path is not None:
        from meshwright.accuracy.page import write_page

        write_page(report, html_path)
        note(f"wrote {html_path}")
    if as_json:
        emit_json(report)
    else:
        _print(report, by=by, show_rows=show_rows)


def _report(runs_path: Path | None, failed_path: Path | None, *, leave_out: bool) -> AccuracyReport:
    from meshwright.accuracy.predict import predict
    from meshwright.accuracy.report import compare
    from meshwright.accuracy.rows import read_failed, read_runs
    from meshwright.accuracy.shipped import failed_configs_path, measured_runs_path

    if failed_path is None and runs_path is None:
        failed_path = failed_configs_path()
    runs = read_runs(runs_path or measured_runs_path())
    failed = None if failed_path is None else read_failed(failed_path)
    return compare(runs, predict=_left_out_predictor() if leave_out else predict, failed=failed)


def _left_out_predictor() -> Callable[[Sequence[PublishedRun]], Predictions]:
    """Predicts by calibrations of the shipped runs, each without the source it predicts."""
    from meshwright.accuracy.fit import fit
    from meshwright.accuracy.left_out import predict_left_out
    from meshwright.accuracy.rows import read_runs
    from meshwright.accuracy.shipped import measured_runs_path
    from meshwright.catalog.calibration import fitted
    from meshwright.cli.output import note, progress

    note("fitting the shipped runs")
    whole = fit([r for r in read_runs(measured_runs_path()) if r.reason is None], made="refitted")

    def predictor(runs: Sequence[PublishedRun]) -> Predictions:
        with progress("leaving out each source", total=len(runs)) as advance:
            return predict_left_out(runs, whole, interval_scale=fitted().interval_scale, progress=advance)

    return predictor


# --- tables ---


def _print(report: AccuracyReport, *, by: str, show_rows: bool) -> None:
    if show_rows:
        _print_rows(report)
    _print_metrics("Error of tokens/s per device", {"all rows": report.summary, **report.groups["subset"]})
    _print_metrics(f"By {by}", report.groups[by])
    if report.memory:
        _print_memory(report.memory)
    if report.unpredicted:
        _table("Not predicted", ("reason", "rows"), report.unpredicted.items())
    if report.failed is not None:
        _print_failed(report.failed)


def _table(title: str, headings: tuple[str, ...], rows: Iterable[Sequence[object]]) -> None:
    """A table with words in its first column and figures in the others."""
    from meshwright.cli.output import print_table

    columns: dict[str, Align] = dict.fromkeys(headings, "right")
    columns[headings[0]] = "left"
    print_table(columns, rows, title=title)


def _print_metrics(title: str, groups: dict[str, Metrics]) -> None:
    from meshwright.accuracy.columns import HEADINGS, cells

    _table(title, ("", *HEADINGS), ((name, *cells(metrics)) for name, metrics in groups.items()))


def _print_memory(memory: dict[str, dict[str, float]]) -> None:
    from meshwright.accuracy.columns import percent, signed_percent

    _table(
        "Error of memory, by what the source counts",
        ("counts", "rows", "median", "p90", "bias"),
        (
            (
                kind,
                errors["num_rows"],
                percent(errors["median_abs_error"]),
                percent(errors["p90_abs_error"]),
                signed_percent(errors["bias"]),
            )
            for kind, errors in memory.items()
        ),
    )


def _print_rows(report: AccuracyReport) -> None:
    from meshwright.accuracy.columns import rate, signed_percent

    _table(
        "Rows",
        ("id", "predicted", "low", "high", "measured", "error", "not predicted because"),
        (
            (
                row.run.id,
                *(rate(value) for value in (row.predicted, row.low, row.high, row.measured)),
                signed_percent(row.signed_error),
                row.run.reason,
            )
            for row in report.rows
        ),
    )


def _print_failed(failed: FailedReport) -> None:
    from meshwright.accuracy.columns import percent

    listed = {
        "all": failed.total,
        "recomputation stated": failed.stated,
        "not stated": failed.unstated,
        "sources with failures": failed.same_sources,
        **failed.by_source,
    }
    _table(
        "Does it fit in memory",
        ("", "ran out of memory", "rightly rejected", "worked", "wrongly rejected"),
        (
            (
                name,
                shares.num_failed,
                percent(shares.correctly_rejected_ratio),
                shares.num_worked,
                percent(shares.wrongly_rejected_ratio),
            )
            for name, shares in listed.items()
        ),
    )
