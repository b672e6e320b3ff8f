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
    """The inverse, by the annotation of the field, such as "int | None". Raises ValueError or KeyError."""
    if not text and "None" in kind:
        return None
    if kind.startswith("bool"):
        return {"yes": True, "no": False}[text]
    if kind.startswith("int"):
        return int(text)
    if kind.startswith("float"):
        number = float(text)
        if not math.isfinite(number):
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


def read_sidecar(path: Path, *, schema: str, keys: Iterable[str], made_by: str) -> dict[str, Any]:
    """Read the sidecar at `path`. Raises InputError if one of `keys` is missing."""
    text = read_text(path, made_by=made_by)
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None
    except RecursionError:
        raise InputError(f"{path}: is nested too deeply") from None
    if not isinstance(found, dict) or found.get("schema") != schema:
        got = found.get("schema") if isinstance(found, dict) else type(found).__name__
        raise InputError(f"{path}: not the sidecar of bench records", got=got, allowed=schema)
    for key in keys:
        if key not in found:
            raise InputError(f"{path}: {key} is missing")
    if not isinstance(found.get("device"), dict | None):
        raise InputError(f"{path}: device", got=found["device"], allowed="a mapping, or null")
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
            raise InputError(
                f"{self.where}: {column}", got=self.cells[column], allowed=", ".join(kind)
            ) from None

    def whole(self, column: str) -> int:
        text = self.cells[column]
        try:
            return parse_count(text or "0")
        except ValueError:
            raise InputError(f"{self.where}: {column} is not a whole number", got=text) from None

    def number(self, column: str, *, least: float = -math.inf, may_be_least: bool = True) -> float | None:
        """The number in a cell; None where the cell is empty and `may_be_least` allows it."""
        text = self.cells[column]
        if not text and may_be_least:
            return None
        try:
            found = float(text)
        except ValueError:
            raise InputError(f"{self.where}: {column} is not a number", got=text) from None
        if not (math.isfinite(found) and (found > least or (may_be_least and found == least))):
            raise InputError(f"{self.where}: {column} is out of range", got=text, allowed=f"above {least:g}")
        return found


def read_lines(path: Path, *, columns: tuple[str, ...], what: str, made_by: str, whole: bool) -> list[Cells]:
    """Read the lines of the CSV file at `path`, whose header is `columns`.

    With `whole` false an incomplete last line is ignored. Raises InputError with file and line for another header and
    for lines that are too short or too long.
    """
    text = read_text(path, made_by=made_by)
    lines = csv.reader(io.StringIO(text if whole else whole_lines(text)))
    header = next(lines, [])
    if tuple(header) != columns:
        got = ",".join(header)[:60]
        raise InputError(f"{path}:1: not the header of {what}", got=got, allowed=",".join(columns))
    found = []
    for cells in lines:
        where = f"{path}:{lines.line_num}"
        if len(cells) != len(columns):
            raise InputError(f"{where}: cells of this line", got=len(cells), allowed=len(columns))
        found.append(Cells(dict(zip(columns, cells, strict=True)), where))
    return found
