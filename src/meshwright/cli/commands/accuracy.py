"""`meshwright accuracy`: predictions and published measurements side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshwright.api.accuracy import accuracy
from meshwright.api.question import ask
from meshwright.cli.options import file_option, html_option
from meshwright.cli.output import emitted_json, note, print_text_tables, progress, write, write_page
from meshwright.cli.verbs import verb
from meshwright.targets import load

REPORT = "meshwright.report.accuracy"
GROUPS = ("source", "accelerator", "architecture", "size", "precision", "framework", "task", "quality")


@verb("accuracy", question="meshwright.api.accuracy:accuracy")
@click.option(
    "--by", type=click.Choice(GROUPS), default="source", show_default=True, help="Group the errors by this column.",
)  # fmt: skip
@click.option("--rows", "show_rows", is_flag=True, help="Also print every run.")
@file_option(
    "--csv",
    "csv_path",
    metavar="FILE.csv",
    help="Write one row per run: prediction, measurement, error, or the reason for none.",
)
@html_option
def command(*, asked: dict[str, Any], by: str, show_rows: bool, csv_path: Path | None, html_path: Path | None) -> None:
    """Predict published measured runs and report the errors.

    Predicts every published training run that states enough conditions, and compares the prediction with the
    published measurement. Rates are tokens/s per device. Runs that cannot be predicted are counted with the reason.

    The shipped calibration was fitted on the shipped runs. --leave-one-source-out gives the error on runs that the
    calibration has not seen.
    """
    with progress("predicting") as advance:
        study = ask(accuracy, asked, advance=advance)
    for path in filter(None, (asked["runs"], asked["failed"])):
        for line in load("meshwright.accuracy.columns:notes_on_columns")(Path(path)):
            note(f"{path}: {line}")
    if asked["runs"] is not None and (unread := sum(bool(row.run.unread) for row in study.report.rows)):
        rows = "row says" if unread == 1 else "rows say"
        note(f"{unread} {rows} something that is not understood: see `unread` in --json or --csv")
    write(csv_path, lambda path: load("meshwright.accuracy.report:write_rows")(study.report, path))
    write_page(study, html_path)
    if not emitted_json(study):
        tables = load(f"{REPORT}:accuracy_tables")(study.report, by=by)
        print_text_tables([load(f"{REPORT}:rows_table")(study.report), *tables] if show_rows else tables)
