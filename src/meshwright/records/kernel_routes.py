"""Records of `bench kernels`: `kernels.json`, one row for each route of each call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from meshwright.files import require_format
from meshwright.records.fields import Fields, Number, Positive, check, read_json
from meshwright.records.training_fields import DeviceFields

SCHEMA = "meshwright kernel routes 1"
NAME = "kernels.json"
ROUNDING_FACTOR = 2.0
"""Largest error of a chosen route over the error of the reference; two correct summations differ by this factor."""


class PassTime(Fields):
    """Median of one pass and its 95 % interval, in seconds."""

    median: Positive
    low: Number
    high: Number


class TimedRoute(Fields):
    """One route on one call. Without `forward_s` it was not measured, for `reason`."""

    op: str
    model: str
    shape: str
    format: str
    route: str
    reason: str = ""
    forward_s: PassTime | None = None
    backward_s: PassTime | None = None
    flops: Number | None = None  # of both passes; None: the record is older than this field
    least_bytes: Number | None = None  # to read and write, of both passes
    roofline_ratio: Number | None = None
    peak_bytes: Number | None = None
    error: Number | None = None
    is_default: bool = False
    is_fastest: bool = False
    is_failure: bool = False  # it serves the call and failed; otherwise it refused, or the record is older

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, row: Any) -> Any:
        return {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else row

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


class RoutesFields(Fields):
    """The whole file."""

    schema_: Literal["meshwright kernel routes 1"] = Field(alias="schema")
    device: DeviceFields
    software: dict[str, Any]
    started: str
    command: list[str]
    rows: list[TimedRoute]


def read_kernel_routes(folder: Path) -> KernelRoutes:
    """Read `kernels.json` of a folder. Raises InputError with file and every wrong field."""
    path = folder / NAME
    document = read_json(path)
    require_format(document, where=path, schema=SCHEMA)
    found = check(document, kind=RoutesFields, where=str(path))
    return KernelRoutes(path=path, document=document, rows=tuple(found.rows))
