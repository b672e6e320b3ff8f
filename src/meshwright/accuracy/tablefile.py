"""Lines of a table in a file: CSV in the ways that spreadsheets and programs write it, JSON and JSON lines.

Read as well: UTF-16 with its mark, tabs, semicolons or bars between cells, a first line `sep=;`, empty lines, empty
cells behind the last column, decimal commas in files with semicolons.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.json_values import load_bytes, parse_json

_DELIMITERS = ",;\t|"
_DECIMAL_COMMA = re.compile(r"^(?:\d+,(?:\d{1,2}|\d{4,})|\d{1,3}(?:\.\d{3})+,\d+) ?%?$")


@dataclass(frozen=True, kw_only=True)
class Line:
    """Cells of one line and its number in the file."""

    number: int
    cells: list[str]


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """Header and lines of a file, without empty ones."""

    header: list[str]
    lines: list[Line]


def read_lines(path: Path) -> TableFile:
    """The table in `path`. Raises InputError for a file that cannot be read, is empty, or is no table."""
    text = _text(path)
    if text.lstrip()[:1] in ("[", "{"):
        rows = list(_objects(path, text))
        header = list(dict.fromkeys(key.strip() for _, row in rows for key in row))
        lines = []
        for number, row in rows:
            cells = {key.strip(): _cell(value) for key, value in row.items()}
            lines.append(Line(number=number, cells=[cells.get(key, "") for key in header]))
        return TableFile(header=header, lines=lines)
    return _from_csv(path, text)


def _from_csv(path: Path, text: str) -> TableFile:
    skipped = 0
    if named := re.match(r"sep=(.)\r?\n", text):
        text, skipped = text[named.end() :], 1
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = named[1] if named else max(_DELIMITERS, key=lambda sign: len(next(csv.reader([first], delimiter=sign))))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        lines = [Line(number=reader.line_num + skipped, cells=cells) for cells in reader if any(map(str.strip, cells))]
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num + skipped}: not a CSV line ({error})") from None
    if not lines:
        raise InputError(f"{path} is empty", allowed="a CSV file with a header line")
    header, *rest = lines
    width = max((i + 1 for i, cell in enumerate(header.cells) if cell.strip()), default=0)
    stripped = [Line(number=line.number, cells=_fitted(line.cells, width)) for line in rest]
    if delimiter == ";" and any(_DECIMAL_COMMA.match(cell) for line in stripped for cell in line.cells):
        stripped = [Line(number=line.number, cells=list(map(_with_point, line.cells))) for line in stripped]
    return TableFile(header=[cell.strip() for cell in header.cells[:width]], lines=stripped)


def _fitted(cells: list[str], width: int) -> list[str]:
    """Stripped cells, without empty ones behind the last column."""
    cells = [cell.strip() for cell in cells]
    return cells[:width] if not any(cells[width:]) else cells


def _with_point(cell: str) -> str:
    if re.match(r"^(?:\d{1,3}(?:\.\d{3})+|\d+)(?:,\d+)? ?%?$", cell):
        return cell.replace(".", "").replace(",", ".")
    return cell


def _objects(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of each row of a JSON list, of an object that holds one, or of JSON lines."""
    try:
        found = parse_json(text)
        if isinstance(found, dict):
            lists = [value for value in found.values() if isinstance(value, list)]
            found = lists[0] if len(lists) == 1 else [found]
        rows = list(enumerate(found, start=1))
    except ValueError:
        rows = [(i, _object(path, i, line)) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    for number, row in rows:
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: not a row", got=str(row)[:60], allowed="an object of column: value")
        yield number, row


def _object(path: Path, number: int, line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise InputError(f"{path}:{number}: not JSON ({error})", allowed="a list of objects, or one a line") from None


def _cell(value: object) -> str:
    if value is None or value != value:  # NaN, which pandas writes for an empty cell
        return ""
    return str(value) if not isinstance(value, bool) else str(value).lower()


def _text(path: Path) -> str:
    try:
        content = load_bytes(path)
        if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return content.decode("utf-16")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start})", hint="save the file as UTF-8") from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
