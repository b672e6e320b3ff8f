"""MLPerf results that do not state their parallelism, beside equal results of the round that do.

Partners of a vendor run the vendor's configuration. Among results of one round with the same model,
accelerator, devices, batch and accumulation steps, where all that state degrees state the same ones, a result
without them gets them, with a note. That needs one benchmark with fixed rules: MLPerf results only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from meshwright.accuracy.csvfile import Row
from meshwright.accuracy.software import is_mlperf

TWIN_NOTE = "twin_note"
"""Extra cell of a row that got its degrees from its twins."""

_SAME = ("source_key", "model", "gpu", "num_gpus", "seq_len", "gbs", "grad_accum")
_DEGREES = ("tp", "pp", "vpp", "cp", "ep")


def with_twins_layout(rows: list[Row]) -> list[Row]:
    """`rows` with the degrees of their twins where those are the only ones stated."""
    stated: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
    for row in rows:
        if is_mlperf(row) and row.text("tp"):
            stated[_cells(row, _SAME)].add(_cells(row, _DEGREES))
    return [_filled(row, stated.get(_cells(row, _SAME), set())) if is_mlperf(row) else row for row in rows]


def _cells(row: Row, columns: Iterable[str]) -> tuple[str, ...]:
    return tuple(row.text(column) for column in columns)


def _filled(row: Row, variants: set[tuple[str, ...]]) -> Row:
    if row.text("tp") or len(variants) != 1:
        return row
    degrees = dict(zip(_DEGREES, next(iter(variants)), strict=True))
    words = " ".join(f"{name.upper()}{width}" for name, width in degrees.items() if width not in ("", "1"))
    note = f"parallelism ({words or 'data only'}) of the other results with this batch and system size"
    return replace(row, cells=row.cells | degrees | {TWIN_NOTE: note})
