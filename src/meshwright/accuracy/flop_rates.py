"""Token rates of rows that print only FLOP/s or a utilisation, where the count of FLOPs is known.

    tokens/s/device = printed FLOP/s per device / F        F: FLOPs per token as the source counts them

A prediction in the printed unit has the same relative error as one in tokens/s. The count is known where the row names
it (`flops_convention`), or where other rows of the same software print both units and agree with one count
(`frameworks.toml`, [[flops]]). Hardware FLOPs also hold the repeated forward pass of fully recomputed layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from meshwright.accuracy.csvfile import CsvRow
from meshwright.accuracy.primus_flops import primus_flops_per_token
from meshwright.accuracy.shipped import frameworks
from meshwright.cost.flops import (
    AttentionCount,
    attention_core_flops_per_token,
    count_parameters,
    model_flops_per_token,
)
from meshwright.cost.tables import ModelTable, model_row
from meshwright.specs.hardware import Stack
from meshwright.specs.model import Lora, Model
from meshwright.specs.plan import Plan, Recompute


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Count of FLOPs that a source uses."""

    attention: AttentionCount
    recomputed: bool  # full recomputation counts too
    streams: bool  # GEMMs of every residual stream count (`accuracy.primus_flops`)
    name: str


def flop_count_of(row: CsvRow, stack: Stack) -> FlopCount | None:
    """The count of `row`; None where it is not known."""
    for entry in frameworks()["flops"]:
        if "convention" in entry:
            known = re.search(entry["convention"], row.text("flops_convention"), re.IGNORECASE)
        else:
            dated = entry.get("since", 0) <= (stack.vintage or 9999) < entry.get("until", 10_000)
            known = not row.text("flops_convention") and stack.framework in entry["stacks"] and dated
        if known:
            return FlopCount(
                attention=AttentionCount(entry["attention"]),
                recomputed=entry.get("recomputed", False),
                streams=entry.get("streams", False),
                name=entry["name"],
            )
    return None


def flops_per_token(model: ModelTable, *, seq_len: int, count: FlopCount) -> float:
    """FLOPs of one token as `count` counts them."""
    if count.streams:
        return primus_flops_per_token(model, seq_len=seq_len)
    flops = model_flops_per_token(model, seq_len=seq_len, count=count.attention)
    if count.recomputed:
        flops = flops + _recomputed_flops(model, seq_len=seq_len, attention=count.attention)
    return float(flops)


def _recomputed_flops(model: ModelTable, *, seq_len: int, attention: AttentionCount) -> float:
    """FLOPs of a token's second forward pass under full recomputation."""
    layers = count_parameters(model).active - model.vocab * model.hidden
    return float(2 * layers + attention_core_flops_per_token(model, seq_len=seq_len, count=attention))


def least_flops_per_token(model: Model, plan: Plan, *, seq_len: int, lora: Lora | None = None) -> float:
    """FLOPs that a token takes at least: causal scores once, and the second forward pass of full recomputation."""
    return _least_flops(model, lora, seq_len, plan.recompute is Recompute.FULL and plan.recompute_layers is None)


@lru_cache(maxsize=4096)  # many rows of a table have the same model
def _least_flops(model: Model, lora: Lora | None, seq_len: int, is_recomputed: bool) -> float:
    row = model_row(model, lora=lora)
    flops = float(model_flops_per_token(row, seq_len=seq_len))
    return flops + is_recomputed * _recomputed_flops(row, seq_len=seq_len, attention=AttentionCount.CAUSAL)


def rate_of_flops(
    row: CsvRow, model: ModelTable, *, seq_len: int, stack: Stack, usual_peak_tflops: float | None = None
) -> tuple[float, str] | None:
    """(tokens/s per device, a note on its origin) of a row without a token rate; None where the count is not known.

    usual_peak_tflops: peak of a utilisation if the row names none; None if two peaks are possible.
    """
    count = flop_count_of(row, stack)
    if count is None:
        return None
    flop_rate, percent = row.number("tflops_per_gpu"), row.number("mfu_pct")
    peak = row.number("mfu_peak_tflops") or usual_peak_tflops
    if not flop_rate and percent and peak:
        flop_rate = percent / 100 * peak
    if not flop_rate:
        return None
    rate = flop_rate * 1e12 / flops_per_token(model, seq_len=seq_len, count=count)
    return rate, f"rate from {flop_rate:g} TFLOP/s, counted as {count.name}"
