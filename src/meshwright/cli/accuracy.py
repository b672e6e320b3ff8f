"""`meshwright accuracy`: predicted beside measured, for every published run that says enough."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.options import html_option, json_option, verb

if TYPE_CHECKING:
    from meshwright.accuracy.report import AccuracyReport

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
    from meshwright.cli.output import emit_json, note, progress
    from meshwright.report.accuracy_study import accuracy_study

    with progress("predicting") as advance:
        study = accuracy_study(
            runs=runs_path,
            failed=failed_path,
            calibrations=calibrations,
            leave_one_source_out=leave_out,
            advance=advance,
        )
    report = study.report
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
        emit_json(study.to_dict())
    else:
        _print(report, by=by, show_rows=show_rows)


def _print(report: AccuracyReport, *, by: str, show_rows: bool) -> None:
    from meshwright.cli.output import print_text_tables
    from meshwright.report.accuracy_tables import accuracy_tables, rows_table

    tables = accuracy_tables(report, by=by)
    print_text_tables([rows_table(report), *tables] if show_rows else tables)
