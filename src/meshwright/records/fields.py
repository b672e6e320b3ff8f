"""Fields of record files, checked all at once: each wrong one is named with its path in the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from meshwright.errors import InputError
from meshwright.json_values import load_json

Item = TypeVar("Item")
Row = TypeVar("Row")

MOST_FAULTS = 12
"""Faults of one file in a message; the others are counted."""

LARGEST = 1e30
"""No quantity of a record is larger, in any of its units."""

Number = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
Loss = Annotated[float, Field(allow_inf_nan=True)]
"""A loss, or a norm of gradients. A training that diverges records NaN and infinities."""
Count = Annotated[int, Field(ge=0, le=10**18)]
Whole = Annotated[int, Field(ge=1, le=10**18)]


class Fields(BaseModel):
    """A mapping whose named keys have the stated types; others may be there."""

    model_config = ConfigDict(strict=True, extra="allow")


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in the file at `path`. Raises InputError where there is none."""
    try:
        found = load_json(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: is no record", got=type(found).__name__, allowed="a mapping")
    return found


def check(value: object, *, kind: TypeAdapter[Any] | type[Fields], where: str, is_by_line: bool = False) -> Any:
    """Return `value` as `kind`. Raises InputError with every wrong field; with `is_by_line` its items are lines."""
    try:
        if isinstance(kind, TypeAdapter):
            return kind.validate_python(value, strict=True)
        return kind.model_validate(value, strict=True)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        if is_by_line:
            lines = [(int(e["loc"][0]) + 1, {**e, "loc": e["loc"][1:]}) for e in faults]
            raise InputError(_listed([f"{where}:{n}: {_fault(e)}" for n, e in lines])) from None
        raise InputError(f"{where}: {_listed([_fault(e) for e in faults])}") from None


def read_rows(lines: Iterable[Item], read: Callable[[Item], Row]) -> tuple[Row, ...]:
    """`read` of each line. Raises InputError with the faults of all lines."""
    found: list[Row] = []
    faults: list[str] = []
    for line in lines:
        try:
            found.append(read(line))
        except InputError as error:
            faults.append(error.message)
    if faults:
        raise InputError(_listed(faults))
    return tuple(found)


_UNION = re.compile(r"Fields\]?$|^(constrained-)?float$|^function-")
"""Parts of pydantic's paths that are branches of a union, and no keys."""
_MODEL = re.compile(r"a valid dictionary( or (instance|object) .*)?$")


def _fault(error: Mapping[str, Any]) -> str:
    """
    >>> _fault({"loc": ("rows", 3, "flops"), "msg": "Input should be greater than 0", "type": "x", "input": -1})
    'rows[3].flops must be greater than 0, got -1'
    """
    parts = [part for part in error["loc"] if isinstance(part, int) or not _UNION.search(part)]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    if error["type"] == "missing":
        return f"{name} is missing"
    got = repr(error["input"])
    said = error["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
    said = _MODEL.sub("a mapping", said)
    return f"{name or 'it'} {said}, got {got if len(got) < 80 else got[:77] + '...'}"


def _listed(faults: list[str]) -> str:
    more = len(faults) - MOST_FAULTS
    return "; ".join(faults[:MOST_FAULTS]) + (f"; and {more:,} more" if more > 0 else "")
