"""The rows of an accuracy report as CSV, for spreadsheets and further analysis."""

from __future__ import annotations

import math
from pathlib import Path

from meshwright.accuracy.report import AccuracyReport, RowReport
from meshwright.files import write_csv

COLUMNS: tuple[str, ...] = (
    "id", "source", "model", "accelerator", "num_devices", "plan", "predicted", "low", "high", "measured",
    "signed_error", "memory_predicted_bytes", "memory_measured_bytes", "memory_definition", "fits", "assumed",
    "reason", "reason_detail", "conditions", "unread",
)  # fmt: skip
"""Columns of the file. Rates in tokens/s per device; empty where not known."""


def write_rows(report: AccuracyReport, path: Path) -> None:
    """Write one line per published row. Raises InputError when the file cannot be written."""
    write_csv(path, [_line(row) for row in report.rows], columns=COLUMNS)


def _line(row: RowReport) -> dict[str, object]:
    conditions = row.run.conditions
    values = row.as_json() | {
        "model": row.run.model_name,
        "accelerator": row.run.accelerator_name,
        "num_devices": conditions.num_devices if conditions else "",
        "assumed": "; ".join(row.run.assumed),
        "unread": "; ".join(row.run.unread),
        "conditions": "; ".join(f"{k}={v}" for k, v in (conditions.stated if conditions else {}).items()),
    }
    return {key: _cell(value) for key, value in values.items()}


def _cell(value: object) -> object:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
