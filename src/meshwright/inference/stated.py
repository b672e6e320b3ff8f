"""Statements of a published point in free text: its note, and words next to its engine, format and layout."""

from __future__ import annotations

import re
from typing import Any

from meshwright.accuracy.csvfile import CsvRow
from meshwright.accuracy.statements import Statements, read_statements
from meshwright.files import toml_table
from meshwright.inference.formats import DATA

_LABELS = re.compile(r"\b(?:ttft_ms|measured|model_path)=\S*")
"""Facts that a note repeats from elsewhere."""


def spellings() -> dict[str, Any]:
    """Words of published points (`points.toml`)."""
    return toml_table(DATA / "points.toml")


def read_stated(row: CsvRow) -> Statements:
    """Everything that the note of a point states, and its other cells next to a name or a number."""
    cells = (row.text(column) for column in ("framework", "precision", "parallelism"))
    parts = [part.strip() for cell in cells for part in re.split(r"[,;()+]", cell)]
    used = spellings()["used"]
    known = [part for part in parts if any(m.switch in used for c in read_statements(part).clauses for m in c.mentions)]
    return read_statements("; ".join([_LABELS.sub("", row.text("note")), *known]))


def unused(said: Statements) -> tuple[str, ...]:
    """Clauses that no condition of a point takes."""
    unread = {*said.unread}
    clauses = (
        c for c in said.clauses if c.text in unread or any(m.switch not in spellings()["used"] for m in c.mentions)
    )
    return (*(c.text for c in clauses), *said.not_modelled)


def share(stated: str | None) -> float:
    """The share that "80 %" or "0.8" states; 0 where nothing is stated."""
    number = float((stated or "0").rstrip("% "))
    return number / 100 if number > 1 or (stated or "").endswith("%") else number
