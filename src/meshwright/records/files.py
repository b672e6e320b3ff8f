"""Record files: CSV files that lines are appended to, and a JSON sidecar that describes their origin.

A `RowTable` is the one definition of a CSV file: a frozen dataclass whose fields are its columns.

    text, whole number, number, yes or no, name of an enumeration   a cell; with `| None` it may be empty
    dataclass                                                       a cell for each of its fields
    dataclass | None                                                likewise, named NAME_FIELD; all are empty for None
    counts by name, with the names as metadata `counted`            a cell num_NAME for each
    counts by name, with metadata `packed`                          one cell, NAME=COUNT with spaces between
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from meshwright.errors import InputError
from meshwright.files import append, document_of, write_atomically
from meshwright.json_values import load_text, parse_json
from meshwright.records.fields import LARGEST, Count, Fields, check, read_rows
from meshwright.units import parse_count

Row = TypeVar("Row")
YES_NO = {"yes": True, "no": False}

DRIVERS = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))


def driver_version(device_type: str) -> str | None:
    """Version of the GPU driver if the Linux kernel reports it; None for a CPU."""
    if device_type == "cpu":
        return None
    return next((path.read_text().strip() for path in DRIVERS if path.exists()), None)


def now() -> str:
    """The current time as ISO 8601 in UTC, to the second, as records have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def free_folder(name: str, *, mark: str) -> Path:
    """The first of `name`, `name`-2, `name`-3 and so on in this folder that has no file `mark`."""
    names = (name if n == 1 else f"{name}-{n}" for n in count(1))
    return next(Path(found) for found in names if not (Path(found) / mark).exists())


def csv_line(cells: Iterable[str]) -> str:
    """One line of a CSV file, with its line end."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def whole_lines(text: str) -> str:
    """`text` without an incomplete last line of a killed process."""
    return text if text.endswith("\n") else text[: text.rfind("\n") + 1]


def differing(before: Any, now: Any) -> str:
    """Text of the first difference between two flat mappings."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted({*before, *now}):
            if before.get(key) != now.get(key):
                return f"{key}: {before.get(key)!r} then, {now.get(key)!r} now"
    return f"{before!r} then, {now!r} now"


def read_text(path: Path, *, made_by: str) -> str:
    """Text of a record file. `made_by` is the command that writes it, for the error's hint."""
    try:
        return load_text(path)
    except FileNotFoundError:
        raise InputError("no such file", got=str(path), hint=f"`{made_by}` makes it") from None
    except ValueError as error:
        raise InputError(f"{path}: not a text file ({error})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


class SidecarDevice(Fields):
    """The device of measurements; a server's has a count."""

    name: str | None = None
    accelerator: str | None = None
    count: Count | None = None


class SidecarFields(Fields):
    """Keys of every sidecar."""

    started: str = ""
    ended: str | None = None
    command: list[str] | None = None
    software: dict[str, Any] | None = None
    device: SidecarDevice | None = None


def read_sidecar(
    path: Path, *, schema: str, keys: Iterable[str], made_by: str, kind: type[SidecarFields] = SidecarFields
) -> dict[str, Any]:
    """Read the sidecar at `path`. Raises InputError if one of `keys` is missing, or with every field not of `kind`."""
    text = read_text(path, made_by=made_by)
    try:
        found = parse_json(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None
    except ValueError as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from None
    found = document_of(found, schema=schema, refusal=f"{path}: not the sidecar of bench records")
    missing = [key for key in keys if key not in found]
    if missing:
        raise InputError(f"{path}: {'; '.join(f'{key} is missing' for key in missing)}")
    check(found, kind=kind, where=str(path))
    return found


def read_table(
    path: Path, table: RowTable[Row], *, schema: str, keys: Iterable[str], whole: bool
) -> tuple[Path, dict[str, Any], tuple[Row, ...]]:
    """Path, sidecar and rows of the records at `path`, the CSV file or its folder.

    With `whole` false an incomplete last line is ignored. Raises InputError with file and line for another schema.
    """
    path = path / table.name if path.is_dir() else path
    rows = table.read(path, whole=whole)
    return path, read_sidecar(path.with_suffix(".json"), schema=schema, keys=keys, made_by=table.made_by), rows


@dataclass(frozen=True)
class Cells:
    """Cells of one line by column. `where` is its file and line number."""

    cells: Mapping[str, str]
    where: str

    def one_of(self, column: str, kind: type[StrEnum]) -> StrEnum:
        try:
            return kind(self.cells[column])
        except ValueError:
            raise InputError(f"{self.where}: {column}", got=self.cells[column], allowed=", ".join(kind)) from None

    def is_yes(self, column: str) -> bool:
        if self.cells[column] not in YES_NO:
            raise InputError(f"{self.where}: {column}", got=self.cells[column], allowed=", ".join(YES_NO))
        return YES_NO[self.cells[column]]

    def whole(self, column: str) -> int:
        text = self.cells[column]
        try:
            found = parse_count(text)
        except ValueError:
            raise InputError(f"{self.where}: {column} is not a whole number", got=text) from None
        if found > LARGEST:
            raise InputError(f"{self.where}: {column} is out of range", got=text)
        return found

    def number(self, column: str, *, least: float) -> float:
        text = self.cells[column]
        try:
            found = float(text)
        except ValueError:
            raise InputError(f"{self.where}: {column} is not a number", got=text) from None
        if not (abs(found) <= LARGEST and found >= least):
            raise InputError(f"{self.where}: {column} is out of range", got=text, allowed=f"{least:g} or more")
        return found


def read_lines(
    path: Path, *, columns: Sequence[str], what: str, made_by: str, whole: bool, num_added: int = 0
) -> list[Cells]:
    """Read the lines of the CSV file at `path`, whose header is `columns` or lacks some of the last `num_added`.

    Cells of columns that the file lacks are empty.

    With `whole` false an incomplete last line is ignored. Raises InputError with file and line for another header and
    for lines that are too short or too long.
    """
    text = read_text(path, made_by=made_by)
    reader = csv.reader(io.StringIO(text if whole else whole_lines(text)))
    try:
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: not a CSV file ({error})") from None
    header = lines[0][1] if lines else []
    if header != [*columns[: len(header)]] or len(header) < len(columns) - num_added:
        got = ",".join(header)[:60]
        raise InputError(f"{path}:1: not the header of {what}", got=got, allowed=",".join(columns))

    def row(line: tuple[int, list[str]]) -> Cells:
        number, cells = line
        if len(cells) != len(header):
            raise InputError(f"{path}:{number}: cells of this line", got=len(cells), allowed=len(header))
        return Cells(dict.fromkeys(columns, "") | dict(zip(header, cells, strict=True)), f"{path}:{number}")

    return list(read_rows(lines[1:], row))


@dataclass(frozen=True)
class _CellField:
    """A field of a row: its type without None, and the least number that it may hold."""

    name: str
    kind: Any
    is_optional: bool
    least: float
    counted: tuple[str, ...]
    packed: bool

    def prefix(self, before: str) -> str:
        """Start of the columns of its parts."""
        return f"{before}{self.name}_" if self.is_optional else before


@cache
def _cell_fields(kind: type[Any]) -> tuple[_CellField, ...]:
    hints, found = get_type_hints(kind), []
    for f in fields(kind):
        of = [part for part in get_args(hints[f.name]) if part is not type(None)]
        is_optional = type(None) in get_args(hints[f.name])
        found.append(
            _CellField(
                name=f.name,
                kind=of[0] if is_optional else hints[f.name],
                is_optional=is_optional,
                least=f.metadata.get("least", 0.0),
                counted=f.metadata.get("counted", ()),
                packed=f.metadata.get("packed", False),
            )
        )
    return tuple(found)


def _values(row: object, kind: type[Any], prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Column and value of each cell, and whether it may be absent. `row` is None for cells that are."""
    for f in _cell_fields(kind):
        value = getattr(row, f.name, None)
        if is_dataclass(f.kind):
            yield from _values(value, f.kind, f.prefix(prefix))  # pyright: ignore[reportArgumentType]
        elif f.counted:
            yield from ((f"num_{name}", (value or {}).get(name, 0), False) for name in f.counted)
        elif f.packed:
            yield f.name, " ".join(f"{name}={count}" for name, count in (value or {}).items()), True
        else:
            yield prefix + f.name, value, f.is_optional or row is None


@dataclass(frozen=True, kw_only=True)
class RowTable(Generic[Row]):
    """A CSV file with a line for each row.

    Attributes:
        kind: the frozen dataclass of a row.
        name: of the file.
        what: its rows, in the plural; for messages.
        made_by: the command that writes it.
        empty_zeros: types whose zero is an empty cell.
        num_added: number of last columns that files of earlier releases lack; their cells may be empty.
        columns: their order; default: as the fields are. It may have those of `derived` too.
        derived: numbers that follow from a row; they are written, and not read.
        check: row, file and line number to the row that is kept. Raises InputError for values that contradict.
    """

    kind: type[Row]
    name: str
    what: str
    made_by: str
    empty_zeros: tuple[type, ...] = ()
    num_added: int = 0
    columns: tuple[str, ...] = ()
    derived: Mapping[str, Callable[[Row], float]] = field(default_factory=dict)
    check: Callable[[Row, str], Row] = lambda row, where: row

    @cached_property
    def header(self) -> tuple[str, ...]:
        """The columns in their order."""
        return self.columns or tuple(column for column, _, _ in _values(None, self.kind))

    def line(self, row: Row) -> str:
        """The line of a row, with its line end."""
        texts = {column: self._text(value, is_optional) for column, value, is_optional in _values(row, self.kind)}
        texts |= {column: f"{number(row):.9g}" for column, number in self.derived.items()}
        return csv_line([texts[column] for column in self.header])

    def _text(self, value: object, is_optional: bool) -> str:
        if value is None or (not value and not is_optional and type(value) in self.empty_zeros):
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{value:.9g}" if isinstance(value, float) else str(value)  # nine digits hold every fp32

    def row(self, line: Cells) -> Row:
        """Read one line. Raises InputError for a value of another kind."""
        return self.check(self._row(line, self.kind, ""), line.where)

    def _row(self, line: Cells, kind: type[Any], prefix: str) -> Any:
        return kind(**{f.name: self._value(line, f, prefix) for f in _cell_fields(kind)})

    def _value(self, line: Cells, f: _CellField, prefix: str) -> Any:
        column = prefix + f.name
        if is_dataclass(f.kind):
            first = f"{f.prefix(prefix)}{fields(f.kind)[0].name}"
            is_absent = f.is_optional and not line.cells[first]
            return None if is_absent else self._row(line, f.kind, f.prefix(prefix))  # pyright: ignore[reportArgumentType]
        if f.counted:
            counts = {name: line.whole(f"num_{name}") for name in f.counted}
            return {name: count for name, count in counts.items() if count}
        if f.packed:
            return self._packed(line, column)
        if not line.cells[column] and (f.is_optional or f.kind in self.empty_zeros):
            return None if f.is_optional else f.kind()
        if f.kind is bool:
            return line.is_yes(column)
        if f.kind is int:
            return line.whole(column)
        if f.kind is float:
            return line.number(column, least=f.least)
        return line.cells[column] if f.kind is str else line.one_of(column, f.kind)

    def _packed(self, line: Cells, column: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for part in line.cells[column].split():
            name, _, count = part.partition("=")
            counts[name] = Cells({column: count}, line.where).whole(column)
        return counts

    def read(self, path: Path, *, whole: bool) -> tuple[Row, ...]:
        """Read the rows in the file at `path`; with `whole` false an incomplete last line is ignored.

        Raises InputError with file and line for each line that is none of the table.
        """
        lines = read_lines(
            path, columns=self.header, what=self.what, made_by=self.made_by, whole=whole, num_added=self.num_added
        )
        return read_rows(lines, self.row)

    def write(self, path: Path, rows: Iterable[Row] = ()) -> None:
        """Replace the file by these rows."""
        write_atomically(path, csv_line(self.header) + "".join(map(self.line, rows)))

    def append(self, path: Path, row: Row) -> None:
        """Add one line; it is on the disk when this returns."""
        append(path, self.line(row))


def unfinished(schema: str) -> dict[str, Any]:
    """Keys of a sidecar whose measurement has begun."""
    return {"schema": schema, "device": None, "ended": None}


class Recorder:
    """Writer of tables and their sidecar in `folder`."""

    def __init__(self, folder: Path, *, name: str, sidecar: Mapping[str, Any]) -> None:
        self.folder, self._sidecar_path = folder, folder / name
        self.sidecar: dict[str, Any] = dict(sidecar)

    def begin(self, *tables: RowTable[Any], empty: Sequence[str] = (), hint: str = "name another --out") -> None:
        """Make the folder with the sidecar, `empty` files and empty tables. Raises InputError if it has the last table.

        That comes last, so a folder that has it is whole, and one that a killed process left without it begins anew.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if (path := self.folder / tables[-1].name).exists():
                raise InputError("there are records already", got=str(path), hint=hint)
            self.save()
            for name in empty:
                write_atomically(self.folder / name, "")
            for table in tables:
                table.write(self.folder / table.name)
        except OSError as error:
            raise InputError(
                f"records cannot be written: {error.strerror}", got=str(self.folder), allowed="a writable folder"
            ) from None

    def begin_or_resume(
        self, table: RowTable[Row], *, resume: bool, kept: Callable[[], list[Row]], what: str, hint: str
    ) -> list[Row]:
        """Write the sidecar and the table with the rows that are `kept` of an earlier one, and return them.

        Raises InputError for `what` is there already, unless it is to be resumed.
        """
        path = self.folder / table.name
        self.folder.mkdir(parents=True, exist_ok=True)
        if path.exists() and not resume:
            raise InputError(f"there are {what} already", got=str(path), hint=hint)
        rows = kept() if path.exists() else []
        self.save()
        table.write(path, rows)  # last: where it is, the sidecar is too
        return rows

    def save(self, **more: Any) -> None:
        """Write the sidecar with `more` keys."""
        self.sidecar |= more
        write_atomically(self._sidecar_path, json.dumps(self.sidecar, indent=2) + "\n")
