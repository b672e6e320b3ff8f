"""Figures that others have published about their systems. They are reproduced or explained, never calibrated on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

from meshwright.catalog.entries import DATA, by_name
from meshwright.errors import UnknownNameError


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published figure. Text fields are empty and counts None where the document does not say."""

    claim_id: str
    document: str  # title, publisher, date
    kind: str  # rate, time, ratio, efficiency, price, spec, plan, capacity, spread, rule
    model: str
    method: str  # pretrain, lora, ...
    precision: str
    accelerator: str
    num_accelerators: int | None
    num_nodes: int | None
    baseline: str  # what a ratio is against
    metric: str
    value: float
    unit: str
    conditions: str
    quote_or_note: str


@cache
def all_claims() -> tuple[Claim, ...]:
    """All claims, in the order of the documents."""
    import csv

    with (DATA / "claims.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_claim(row) for row in csv.DictReader(file))


@by_name
def claim(claim_id: str) -> Claim:
    """The claim `claim_id`; raises UnknownNameError."""
    by_id = {c.claim_id: c for c in all_claims()}
    if claim_id not in by_id:
        raise UnknownNameError("claim", claim_id, known=by_id)
    return by_id[claim_id]


def _claim(row: dict[str, str]) -> Claim:
    values: dict[str, object] = {f.name: row[f.name] for f in fields(Claim)}
    for count in ("num_accelerators", "num_nodes"):
        values[count] = int(row[count]) if row[count] else None
    return Claim(**{**values, "value": float(row["value"])})  # pyright: ignore[reportArgumentType]
