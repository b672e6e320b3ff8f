"""Tables of published runs: strict reading into typed cells. An empty cell is an unknown value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from meshwright.accuracy.tablefile import Line, read_lines
from meshwright.accuracy.wording import plain_number, stated
from meshwright.errors import InputError
from meshwright.units import digits_hint, parse_number

MAX_COUNT = 10**7
"""Largest count of devices, layers, sequences and the like: the limit of a run file. Multiplied counts then fit
into 64 bits."""
MAX_TOKENS = 10**12
"""Largest count of tokens."""
MAX_FAULTS = 20
"""Faults of one file that a message lists."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column as it is read: `scale` times its numbers are in our unit."""

    name: str
    scale: float = 1.0
    is_ratio: bool = False  # shares where no value exceeds 1, else percent


@dataclass(frozen=True)
class CsvRow:
    """One line of a file of published runs. Empty cells read as None."""

    file: str
    line: int
    cells: dict[str, str]

    def text(self, column: str) -> str:
        """The stripped cell; "" when it is empty or the file has no such column."""
        return self.cells.get(column, "")

    def number(self, column: str) -> float | None:
        """The cell as a positive number, None when empty.

        Raises InputError for anything else.
        """
        text = self.cells.get(column)
        if not text or _is_unknown(text):
            return None
        if column == "seq_len" and (thousands := re.fullmatch(r"(\d+) ?[kK]", text)):
            return float(int(thousands[1]) * 1024)  # sequences of 8k tokens have 8,192
        value = _number(text)
        if value is None or value < 0:
            hint = digits_hint(text)
            raise self._error(column, "is not a number", allowed="a finite number, not negative, or empty", hint=hint)
        return value

    def count(self, column: str, *, limit: int = MAX_COUNT) -> int | None:
        """The cell as a count of at least 1, None when empty (0 also means that there are none).

        Raises InputError when it has a fraction or exceeds `limit`.
        """
        value = self.number(column)
        if value is None:
            return None
        if value != int(value):
            raise self._error(column, "is not a whole number", allowed="a whole number or empty")
        if value > limit:
            raise self._error(column, "is out of range", allowed=f"<= {limit:,}")
        return int(value) or None

    def _error(self, column: str, what: str, *, allowed: str, hint: str | None = None) -> InputError:
        text = self.text(column)
        return InputError(f"{self.file}:{self.line}: {column} {what}", got=text, allowed=allowed, hint=hint)


def read_table(
    path: str | Path,
    *,
    required: tuple[str, ...],
    numbers: Sequence[str] = (),
    counts: Mapping[str, int] | None = None,
    shipped: str = "the shipped measured runs",
    columns: Callable[[Sequence[str]], Sequence[Column]] | None = None,
) -> list[CsvRow]:
    """All rows of a table with a header line (`tablefile`) in the columns of the file `shipped`.

    Raises InputError when the file cannot be read, is empty, lacks a required column, names a column twice, has a
    row that is longer or shorter than its header, or a cell of the columns `numbers` or `counts` (with their largest
    value) that is none: all faults of the cells at once. Further columns are fine. `columns` gives the header our
    names and units.
    """
    name, table = str(path), read_lines(Path(path))
    known = columns(table.header) if columns else [Column(name=column) for column in table.header]
    header = [column.name for column in known]
    _check_header(name, header, required, shipped)
    rows, faults = _rows(name, header, table.lines)
    rows = _in_our_units(rows, known)
    for row in rows:
        faults += _cell_faults(row, numbers, counts or {})
    if faults:
        raise faults[0] if len(faults) == 1 else _all_of(name, faults)
    return rows


def _in_our_units(rows: list[CsvRow], columns: Sequence[Column]) -> list[CsvRow]:
    """The rows with the numbers of scaled columns in our unit. Cells that are no numbers stay as they are."""
    for column in columns:
        if not column.is_ratio and column.scale == 1.0:
            continue
        found = [number for row in rows if (number := _number(row.text(column.name))) is not None]
        scale = 100.0 if column.is_ratio and max(found, default=0.0) <= 1 else column.scale
        if scale == 1.0:
            continue
        for row in rows:
            if (number := _number(row.text(column.name))) is not None:
                row.cells[column.name] = repr(number * scale)
    return rows


@lru_cache(maxsize=16384)  # a large table repeats a few thousand numbers
def _is_unknown(text: str) -> bool:
    return not stated(text) or text.lower() in ("none", "null")


@lru_cache(maxsize=16384)
def _number(text: str) -> float | None:
    try:
        return parse_number(plain_number(text))
    except ValueError:
        return None


def _cell_faults(row: CsvRow, numbers: Sequence[str], counts: Mapping[str, int]) -> list[InputError]:
    found = []
    for column in (*numbers, *counts):
        try:
            row.count(column, limit=counts[column]) if column in counts else row.number(column)
        except InputError as fault:
            found.append(fault)
    return found


def _all_of(name: str, faults: Sequence[InputError]) -> InputError:
    lines = [str(fault).replace("\n", "; ") for fault in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        lines.append(f"and {len(faults) - MAX_FAULTS} more")
    return InputError("\n  ".join([f"{name} has {len(faults)} faults:", *lines]))


def _check_header(name: str, header: list[str], required: tuple[str, ...], shipped: str) -> None:
    faults = []
    if missing := [column.partition("|")[0] for column in required if not _is_there(column, header)]:
        faults.append(f"missing column{'s' if len(missing) > 1 else ''} {', '.join(missing)}")
    if twice := sorted({column for column in header if column and header.count(column) > 1}):
        faults.append(f"column named twice: {', '.join(twice)}")
    if faults:
        hint = f"the file needs the columns of {shipped}; further columns are fine" if missing else None
        raise InputError(f"{name}: {'; '.join(faults)}", hint=hint)


def _is_there(column: str, header: list[str]) -> bool:
    """True if a column is there, or all of one of its alternatives: "a|b+c"."""
    return any(set(names.split("+")) <= set(header) for names in column.split("|"))


def _rows(name: str, header: list[str], lines: Sequence[Line]) -> tuple[list[CsvRow], list[InputError]]:
    rows: list[CsvRow] = []
    faults: list[InputError] = []
    for line in lines:
        cells = line.cells
        if len(cells) == len(header):
            rows.append(CsvRow(name, line.number, dict(zip(header, cells, strict=True))))
            continue
        fault = InputError(
            f"{name}:{line.number}: row has {len(cells)} {'cell' if len(cells) == 1 else 'cells'}, the header has "
            f"{len(header)}",
            hint="quote cells that hold commas",
        )
        faults.append(fault)
    return rows, faults
