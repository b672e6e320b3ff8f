"""Record files: a CSV file that lines are appended to, and a JSON sidecar that describes its origin."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from meshwright.errors import InputError
from meshwright.records.fields import LARGEST, Count, Fields, check, read_rows
from meshwright.units import parse_count

Kind = TypeVar("Kind", bound=StrEnum)


DRIVERS = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))


def driver_version(device_type: str) -> str | None:
    """Version of the GPU driver if the Linux kernel reports it; None for a CPU."""
    if device_type == "cpu":
        return None
    return next((path.read_text().strip() for path in DRIVERS if path.exists()), None)


def csv_line(cells: Iterable[str]) -> str:
    """One line of a CSV file, with its line end."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def cell_text(value: object) -> str:
    """A value of a record as text; nine digits hold every fp32."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def cell_value(text: str, kind: str, *, enums: Mapping[str, type[StrEnum]]) -> Any:
    """Read a cell by the annotation of its field, such as "int | None". Raises ValueError or KeyError."""
    if not text and "None" in kind:
        return None
    if kind.startswith("bool"):
        return {"yes": True, "no": False}[text]
    if kind.startswith(("int", "float")):
        number = int(text) if kind.startswith("int") else float(text)
        if not 0 <= number <= LARGEST:
            raise ValueError(text)
        return number
    return enums.get(kind, str)(text)


def sidecar_text(document: Mapping[str, Any]) -> str:
    """Text of a sidecar file."""
    return json.dumps(document, indent=2) + "\n"


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
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError("no such file", got=str(path), hint=f"`{made_by}` makes it") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file") from None
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
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"{path}: cannot be read as JSON: {error}") from None
    except RecursionError:
        raise InputError(f"{path}: is nested too deeply") from None
    if not isinstance(found, dict) or found.get("schema") != schema:
        got = found.get("schema") if isinstance(found, dict) else type(found).__name__
        raise InputError(f"{path}: not the sidecar of bench records", got=got, allowed=schema)
    missing = [key for key in keys if key not in found]
    if missing:
        raise InputError(f"{path}: {'; '.join(f'{key} is missing' for key in missing)}")
    check(found, kind=kind, where=str(path))
    return found


@dataclass(frozen=True)
class Cells:
    """Cells of one line by column. `where` is its file and line number."""

    cells: Mapping[str, str]
    where: str

    def one_of(self, column: str, kind: type[Kind]) -> Kind:
        try:
            return kind(self.cells[column])
        except ValueError:
            raise InputError(f"{self.where}: {column}", got=self.cells[column], allowed=", ".join(kind)) from None

    def whole(self, column: str) -> int:
        text = self.cells[column]
        try:
            found = parse_count(text or "0")
        except ValueError:
            raise InputError(f"{self.where}: {column} is not a whole number", got=text) from None
        if found > LARGEST:
            raise InputError(f"{self.where}: {column} is out of range", got=text)
        return found

    def number(self, column: str, *, least: float = -math.inf, may_be_least: bool = True) -> float | None:
        """The number in a cell; None where the cell is empty and `may_be_least` allows it."""
        text = self.cells[column]
        if not text and may_be_least:
            return None
        try:
            found = float(text)
        except ValueError:
            raise InputError(f"{self.where}: {column} is not a number", got=text) from None
        if not (abs(found) <= LARGEST and (found > least or (may_be_least and found == least))):
            raise InputError(f"{self.where}: {column} is out of range", got=text, allowed=f"above {least:g}")
        return found


def read_lines(path: Path, *, columns: tuple[str, ...], what: str, made_by: str, whole: bool) -> list[Cells]:
    """Read the lines of the CSV file at `path`, whose header is `columns`.

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
    if tuple(header) != columns:
        got = ",".join(header)[:60]
        raise InputError(f"{path}:1: not the header of {what}", got=got, allowed=",".join(columns))

    def row(line: tuple[int, list[str]]) -> Cells:
        number, cells = line
        if len(cells) != len(columns):
            raise InputError(f"{path}:{number}: cells of this line", got=len(cells), allowed=len(columns))
        return Cells(dict(zip(columns, cells, strict=True)), f"{path}:{number}")

    return list(read_rows(lines[1:], row))
