"""Records of `bench kernels`: `kernels.json`, one row for each route of each call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from meshwright.records.fields import Fields, Number, Positive, check, read_json
from meshwright.records.training_fields import DeviceFields

SCHEMA = "meshwright kernel routes 1"
NAME = "kernels.json"
ROUNDING_FACTOR = 2.0
"""Largest error of a chosen route over the error of the reference; two correct summations differ by this factor."""
_TEXTS = ("op", "model", "shape", "format", "route")
_NUMBERS = ("flops", "least_bytes", "roofline_ratio", "peak_bytes", "error")


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
    is_failure: bool = False  # it serves the call and failed; otherwise it refused, or the record is older

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
    """All rows of one record, and its device, software, date and command."""

    path: Path
    document: Mapping[str, Any]
    rows: tuple[TimedRoute, ...]


class TimeFields(Fields):
    """Seconds of one pass."""

    median: Positive
    low: Number
    high: Number


class RouteFields(Fields):
    """One row."""

    op: str
    model: str
    shape: str
    format: str
    route: str
    reason: str | None = None
    forward_s: TimeFields | None = None
    backward_s: TimeFields | None = None
    flops: Number | None = None
    least_bytes: Number | None = None
    roofline_ratio: Number | None = None
    peak_bytes: Number | None = None
    error: Number | None = None
    is_default: bool | None = None
    is_fastest: bool | None = None
    is_failure: bool | None = None


class RoutesFields(Fields):
    """The whole file."""

    schema_: Literal["meshwright kernel routes 1"] = Field(alias="schema")
    device: DeviceFields
    software: dict[str, Any]
    started: str
    command: list[str]
    rows: list[RouteFields]


def read_kernel_routes(folder: Path) -> KernelRoutes:
    """Read `kernels.json` of a folder. Raises InputError with file and every wrong field."""
    path = folder / NAME
    document = read_json(path)
    check(document, kind=RoutesFields, where=str(path))
    return KernelRoutes(path=path, document=document, rows=tuple(map(_row, document["rows"])))


def _row(row: Mapping[str, Any]) -> TimedRoute:
    values: dict[str, Any] = {key: row[key] for key in _TEXTS}
    values |= {key: None if row.get(key) is None else float(row[key]) for key in _NUMBERS}
    return TimedRoute(
        **values, reason=row.get("reason") or "", forward_s=_time(row.get("forward_s")),
        backward_s=_time(row.get("backward_s")), is_default=bool(row.get("is_default")),
        is_fastest=bool(row.get("is_fastest")), is_failure=bool(row.get("is_failure")),
    )  # fmt: skip


def _time(value: Mapping[str, float] | None) -> PassTime | None:
    return None if value is None else PassTime(**{k: float(value[k]) for k in ("median", "low", "high")})
