"""`meshwright inference accuracy`: predictions and published points side by side."""

from __future__ import annotations

from typing import Any

from meshwright.answers.serving_accuracy import ServingAccuracy
from meshwright.answers.text_table import TextTable
from meshwright.api.inference import inference_accuracy
from meshwright.api.question import ask
from meshwright.cli.output import emit_json, note, print_line, print_text_tables


def run(*, asked: dict[str, Any], by: str, show_rows: bool, as_json: bool, **served: str | None) -> None:
    """Predict, compare and print."""
    found = ask(inference_accuracy, asked, **served)
    for reason, count in found.unused_loads.items():
        note(f"{count} loads {reason} are not used")
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
            rows.append((*about, "", "", "", "", "", row.point.reason.value if row.point.reason else ""))
            continue
        conditions = row.point.conditions
        layout = conditions.served.layout.describe()
        load = conditions.load
        lengths = f"{load.input_tokens}/{load.output_tokens}"
        in_flight = "full" if load.concurrency is None else f"{load.concurrency:g}"
        rows.append(
            (
                *about,
                layout,
                lengths,
                in_flight,
                f"{row.measured:.4g}",
                f"{row.predicted:.4g} ({row.low:.4g} to {row.high:.4g})",
                f"{100 * row.signed_error:+.0f} %",
            )
        )
    headings = (
        "point",
        "model",
        "device",
        "engine",
        "layout",
        "lengths",
        "in flight",
        "measured",
        "predicted",
        "error",
    )
    return TextTable(title="", headings=headings, rows=rows, text_columns=("model", "device", "engine", "layout"))
