"""Scored plans as rows of scalars: for `--json`, `--csv`, DataFrames and the page."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from meshwright.cost.flops import model_flops_per_token
from meshwright.planner.request import PlanRequest
from meshwright.planner.scored import ScoredPlan, ScoredPlans
from meshwright.specs.plan import Plan


def plan_fields(plan: Plan) -> dict[str, Any]:
    """Every field of a plan as a scalar, as `--fix` names them; an empty text for a field without a value."""
    found: dict[str, Any] = {}
    for name, value in vars(plan).items():
        if isinstance(value, IntEnum):
            found[name] = value.name.lower()
        elif isinstance(value, tuple):
            found[name] = " ".join(map(str, value))
        else:
            found[name] = "" if value is None else getattr(value, "value", value)
    return found


def scored_rows(scored: ScoredPlans) -> list[dict[str, Any]]:
    """One flat row for each plan: rank, estimates with their interval, fields, seconds and bytes by part."""
    tokens, peak = tokens_per_device(scored.request), mfu_per_rate(scored.request)
    return [_row(rank, done, tokens=tokens, mfu_per_rate=peak) for rank, done in enumerate(scored, start=1)]


def _row(rank: int, done: ScoredPlan, *, tokens: float, mfu_per_rate: float) -> dict[str, Any]:
    rate = tokens / done.step_s
    return {
        "rank": rank,
        "plan": done.plan.describe(),
        "objective_value": done.value,
        "step_s": done.step_s,
        "step_s_low": done.step_s / done.spread,
        "step_s_high": done.step_s * done.spread,
        "tokens_per_s_per_device": rate,
        "tokens_per_s_per_device_low": rate / done.spread,
        "tokens_per_s_per_device_high": rate * done.spread,
        "mfu_ratio": rate * mfu_per_rate,
        "reserved_bytes": done.reserved_bytes,
        "on_front": done.on_front,
        "is_simulated": done.is_simulated,
        **plan_fields(done.plan),
        **{f"{name}_s": seconds for name, seconds in done.components_s.items()},
        **{f"{name.replace(' ', '_')}_bytes": size for name, size in done.memory_bytes.items()},
    }


def tokens_per_device(request: PlanRequest) -> float:
    """Tokens of a step over devices."""
    return request.global_batch * request.seq_len / request.num_devices


def mfu_per_rate(request: PlanRequest) -> float:
    """MFU of one token a second and device."""
    flops = float(model_flops_per_token(request.model_table, seq_len=request.seq_len))
    return flops / request.peak_flops_per_s
