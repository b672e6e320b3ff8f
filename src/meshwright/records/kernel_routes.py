"""Records of `bench kernels`: `kernels.json`, one row for each route of each call."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

SCHEMA = "meshwright kernel routes 1"
NAME = "kernels.json"
_TEXTS = ("op", "model", "shape", "format", "route")


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Median of one pass and its 95 % interval, in seconds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class TimedRoute:
    """One route on one call. Without `forward_s` it was not measured, for `reason`."""

    op: str
    model: str
    shape: str
    format: str
    route: str
    reason: str
    forward_s: PassTime | None
    backward_s: PassTime | None
    flops: float | None  # of both passes; None: the record is older than this field
    least_bytes: float | None  # to read and write, of both passes
    roofline_ratio: float | None
    peak_bytes: float | None
    error: float | None
    is_default: bool
    is_fastest: bool

    @property
    def call(self) -> str:
        """Operation and shape."""
        return f"{self.op} {self.format}, {self.shape} ({self.model})"

    @property
    def seconds(self) -> float:
        """Median of a forward and backward pass."""
        return sum(p.median for p in (self.forward_s, self.backward_s) if p is not None)


@dataclass(frozen=True, kw_only=True)
class KernelRoutes:
    """All rows of one record, and what it says about device, software, date and command."""

    path: Path
    document: Mapping[str, Any]
    rows: tuple[TimedRoute, ...]


def read_kernel_routes(folder: Path) -> KernelRoutes:
    """Read `kernels.json` of a folder. Raises InputError with file and field where it is absent or damaged."""
    path = folder / NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        got = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise InputError(f"{path}: schema", got=got, allowed=SCHEMA)
    for key, kind in {
        "device": dict,
        "software": dict,
        "started": str,
        "command": list,
        "rows": list,
    }.items():
        if not isinstance(document.get(key), kind):
            raise InputError(f"{path}: {key}", got=document.get(key), allowed=f"a {kind.__name__}")
    rows = tuple(_row(row, where=f"{path}: rows[{i}]") for i, row in enumerate(document["rows"]))
    return KernelRoutes(path=path, document=document, rows=rows)


def _row(row: object, *, where: str) -> TimedRoute:
    if not isinstance(row, dict):
        raise InputError(where, got=type(row).__name__, allowed="a mapping")
    for key in _TEXTS:
        if not isinstance(row.get(key), str):
            raise InputError(f"{where}.{key}", got=row.get(key), allowed="text")

    def number(key: str) -> float | None:
        value = row.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise InputError(f"{where}.{key}", got=value, allowed="a finite number, 0 or more")
        return float(value)

    return TimedRoute(
        **{key: row[key] for key in _TEXTS},
        reason=str(row.get("reason") or ""),
        forward_s=_time(row.get("forward_s"), where=f"{where}.forward_s"),
        backward_s=_time(row.get("backward_s"), where=f"{where}.backward_s"),
        flops=number("flops"),
        least_bytes=number("least_bytes"),
        roofline_ratio=number("roofline_ratio"),
        peak_bytes=number("peak_bytes"),
        error=number("error"),
        is_default=row.get("is_default") is True,
        is_fastest=row.get("is_fastest") is True,
    )


def _time(value: object, *, where: str) -> PassTime | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InputError(where, got=value, allowed="median, low and high in seconds")
    found = {}
    for key in ("median", "low", "high"):
        seconds = value.get(key)
        if (
            not isinstance(seconds, int | float)
            or isinstance(seconds, bool)
            or not 0 <= seconds < math.inf
            or (key == "median" and seconds == 0)
        ):
            raise InputError(f"{where}.{key}", got=seconds, allowed="finite seconds above 0")
        found[key] = float(seconds)
    return PassTime(**found)
