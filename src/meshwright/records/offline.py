"""Records of `bench offline`: `offline.json`, one entry for each pair of input and output lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from meshwright.files import require_format
from meshwright.records.fields import Count, Fields, Number, Whole, check, read_json

SCHEMA = "meshwright bench offline 1"
NAME = "offline.json"


class PointFields(Fields):
    """Measured values of one batch."""

    wall_s: Number
    num_ok: Count
    input_tokens: Count
    output_tokens: Count
    output_tokens_per_s: Number
    total_tokens_per_s: Number
    refusal: str


POINT_KEYS = tuple(PointFields.model_fields)


class ExtrapolatedFields(Fields):
    """A rate multiplied by a number of replicas."""

    output_tokens_per_s: Number
    label: str = ""


class PairFields(Fields):
    """One pair of input and output lengths."""

    name: str
    num_replicas: Whole
    point: PointFields
    extrapolated: ExtrapolatedFields | None = None


class OfflineFields(Fields):
    """The whole file."""

    schema_: Literal["meshwright bench offline 1"] = Field(alias="schema")
    model: str
    num_replicas: Whole
    started: str
    pairs: list[PairFields]
    num_requests: Count = 0  # absent: what needs it names it
    server: str | None = None
    command: list[str] = Field(default_factory=list)


def read_offline(path: Path) -> dict[str, Any]:
    """Read the file. Raises InputError when it is absent, damaged or of another kind, with every wrong field."""
    document = read_json(path)
    require_format(document, where=path, schema=SCHEMA)
    check(document, kind=OfflineFields, where=str(path))
    return document
