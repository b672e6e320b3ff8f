"""`meshwright accuracy`: predictions and published measurements side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.accuracy.columns import notes_on_columns
from meshwright.accuracy.export import write_rows
from meshwright.api.accuracy import accuracy
from meshwright.api.question import ask
from meshwright.cli.output import emit_json, note, print_text_tables, progress, write, write_page
from meshwright.report.accuracy import accuracy_tables, rows_table


def run(
    *, asked: dict[str, Any], by: str, show_rows: bool, csv_path: Path | None, html_path: Path | None, as_json: bool
) -> None:
    """Predict, compare, and write the report in the formats asked for."""
    with progress("predicting") as advance:
        study = ask(accuracy, asked, advance=advance)
    for path in filter(None, (asked["runs"], asked["failed"])):
        for line in notes_on_columns(Path(path)):
            note(f"{path}: {line}")
    if asked["runs"] is not None and (unread := sum(bool(row.run.unread) for row in study.report.rows)):
        rows = "row says" if unread == 1 else "rows say"
        note(f"{unread} {rows} something that is not understood: see `unread` in --json or --csv")
    write(csv_path, lambda path: write_rows(study.report, path))
    page, is_refitted = "meshwright.report.accuracy:accuracy_page", asked["leave_one_source_out"]
    write_page(page, study.report, path=html_path, leave_one_source_out=is_refitted)
    if as_json:
        emit_json(study.to_dict())
    else:
        tables = accuracy_tables(study.report, by=by)
        print_text_tables([rows_table(study.report), *tables] if show_rows else tables)
