"""`meshwright inference accuracy`: predictions and published points side by side."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli.output import emit_json, print_line, print_text_tables
from meshwright.report.serving_accuracy import ServingAccuracy, serving_accuracy
from meshwright.report.text_table import TextTable


def run(*, points_path: Path | None, by: str, leave_out: bool, show_rows: bool, as_json: bool) -> None:
    """Predict, compare and print."""
    found = serving_accuracy(points=points_path, leave_one_source_out=leave_out)
    if as_json:
        emit_json(found.to_dict())
        return
    tables = found.tables(by)
    print_text_tables([_rows(found), *tables] if show_rows else tables)
    print_line()
    print_line(found.summary())


def _rows(found: ServingAccuracy) -> TextTable:
    rows = []
    for row in found.rows:
        groups = row.point.groups
        about = (row.point.id, groups["model"], groups["accelerator"], groups["engine"])
        if row.point.conditions is None:
            rows.append((*about, "", "", "", "", row.point.reason.value if row.point.reason else ""))
            continue
        conditions = row.point.conditions
        layout = conditions.served.layout.describe()
        lengths = f"{conditions.load.input_tokens}/{conditions.load.output_tokens}"
        rows.append(
            (
                *about,
                layout,
                lengths,
                f"{row.measured:.4g}",
                f"{row.predicted:.4g}",
                f"{100 * row.signed_error:+.0f} %",
            )
        )
    headings = ("point", "model", "device", "engine", "layout", "lengths", "measured", "predicted", "error")
    return TextTable(
        title="", headings=headings, rows=rows, text_columns=("model", "device", "engine", "layout")
    )
