"""Completion of rows from duplicate rows of the file.

Two rules apply. Each adds a note to the row that it completes:

- Degrees. Partners of a vendor run the vendor's MLPerf configuration. Among results of one round with the
  same model, accelerator, devices, batch and accumulation steps, a result without
  degrees gets the degrees of the others if all of them are equal.
- Virtual stages. A row without them gets the number of the rows of its source (of any MLPerf round) with the same task,
  model, accelerator, degrees and micro-batch, if all of them are equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from meshwright.accuracy.csvfile import CsvRow
from meshwright.accuracy.software import is_mlperf

DUPLICATE_NOTE = "duplicate_note"
"""Extra cell of a row with values from its duplicates."""

_DEGREES = ("tp", "pp", "vpp", "cp", "ep")
_SAME_RESULT = ("source_key", "model", "gpu", "num_gpus", "seq_len", "gbs", "grad_accum")
_SAME_RECIPE = ("task", "model", "gpu", "tp", "pp", "mbs")

Key = tuple[str, ...]


def with_duplicates_layout(rows: list[CsvRow]) -> list[CsvRow]:
    """Fill degrees and virtual stages from duplicate rows where these are unambiguous."""
    rows = _fill(rows, _DEGREES, key=_result, states="tp", note="parallelism {} of the other results like it")
    return _fill(rows, ("vpp",), key=_recipe, states="vpp", note="virtual stages {}, as its other rows state")


def _result(row: CsvRow) -> Key | None:
    return _cells(row, _SAME_RESULT) if is_mlperf(row) else None


def _recipe(row: CsvRow) -> Key | None:
    if row.count("pp") in (None, 1) or "1f1b" in row.text("notes").lower():
        return None  # a row that names its schedule is not a duplicate of one with another schedule
    return ("mlperf" if is_mlperf(row) else row.text("source_key"), *_cells(row, _SAME_RECIPE))


def _cells(row: CsvRow, columns: Iterable[str]) -> Key:
    return tuple(row.text(column) for column in columns)


def _fill(
    rows: list[CsvRow], columns: Key, *, key: Callable[[CsvRow], Key | None], states: str, note: str
) -> list[CsvRow]:
    """Fill `columns` of rows with an empty `states` column from the rows of equal `key` that state it."""
    stated: dict[Key, set[Key]] = defaultdict(set)
    for row in rows:
        if row.text(states) and (found := key(row)):
            stated[found].add(_cells(row, columns))
    return [row if row.text(states) else _filled(row, columns, stated.get(key(row) or (), set()), note) for row in rows]


def _filled(row: CsvRow, columns: Key, variants: set[Key], note: str) -> CsvRow:
    if len(variants) != 1:
        return row
    values = dict(zip(columns, next(iter(variants)), strict=True))
    degrees = " ".join(f"{name.upper()}{width}" for name, width in values.items() if width not in ("", "1"))
    notes = [row.text(DUPLICATE_NOTE), note.format(degrees or "1")]
    return replace(row, cells=row.cells | values | {DUPLICATE_NOTE: "; ".join(filter(None, notes))})
