"""Two plans compared: the fields that differ, the components that take the time, the memory limit that binds.

Signs: a difference is the other plan's number minus this plan's, so a negative one is in favour of the other.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum, IntEnum

import numpy as np

from meshwright.planner import RankedPlan, compare, search
from meshwright.planner.estimate import PlanEstimate
from meshwright.planner.explain import Difference, PlanComparison
from meshwright.planner.objective import Goal
from meshwright.planner.request import PlanRequest
from meshwright.planner.screen import cost_model
from meshwright.specs.memory_budget import MemoryBudget
from meshwright.specs.plan import Plan, Recompute
from meshwright.units import gib


@dataclass(frozen=True, kw_only=True)
class Change:
    """One field in which two plans differ, in the run file's terms."""

    field: str
    this: str
    other: str

    def __str__(self) -> str:
        return f"{self.field} {self.this} → {self.other}"


@dataclass(frozen=True, kw_only=True)
class PlanDifference:
    """Two plans, compared by field, component and part of memory."""

    this: PlanEstimate
    other: PlanEstimate
    changes: tuple[Change, ...]
    comparison: PlanComparison  # this as its winner, other as its loser

    @property
    def step_ms(self) -> Difference:
        return self.comparison.step_ms

    @property
    def decided_by(self) -> Difference | None:
        """The component that moves the step most in the direction in which it moves; None: equal steps."""
        if abs(self.step_ms.delta) < 1e-9:
            return None
        sign = 1 if self.step_ms.delta > 0 else -1
        return max(self.comparison.components_ms, key=lambda d: sign * d.delta)


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """The best plan if memory had no limit."""

    plan: Plan
    step_s: float
    needed_gib: float
    available_gib: float


def differ(this: PlanEstimate, other: PlanEstimate, *, usable_bytes: float) -> PlanDifference:
    """Compare `other` with `this`; `usable_bytes` is the memory that a plan may reserve."""
    return PlanDifference(
        this=this,
        other=other,
        changes=changes(this.plan, other.plan),
        comparison=compare(_ranked(this), _ranked(other), usable_bytes=usable_bytes),
    )


def changes(this: Plan, other: Plan) -> tuple[Change, ...]:
    """The fields in which two plans differ. A schedule counts where both have a pipeline."""
    first, second = _field_values(this), _field_values(other)
    if min(this.pipeline, other.pipeline) == 1:
        first["schedule"] = second["schedule"]
    return tuple(Change(field=n, this=first[n], other=second[n]) for n in first if first[n] != second[n])


def memory_limit(request: PlanRequest, *, goal: Goal, best: RankedPlan) -> MemoryLimit | None:
    """The plan that would win if memory had no limit; None when `best` wins anyway."""
    boundless = replace(cost_model(request), memory_budget=MemoryBudget(capacity_bytes=float("inf")))
    free = search(request, top=1, goal=goal, model=boundless).best
    if free is None or free.value >= best.value or free.plan == best.plan:
        return None
    return MemoryLimit(
        plan=free.plan,
        step_s=free.step_s,
        needed_gib=gib(float(np.ravel(free.memory.reserved_bytes)[0])),
        available_gib=gib(request.usable_bytes),
    )


def _ranked(estimate: PlanEstimate) -> RankedPlan:
    step_s = estimate.step.step.value
    return RankedPlan(
        plan=estimate.plan,
        value=step_s,
        step_s=step_s,
        closed_form_s=float(np.ravel(estimate.steps.step_s)[0]),
        is_simulated=estimate.timeline is not None,
        steps=estimate.steps,
        memory=estimate.memory,
    )


def _field_values(plan: Plan) -> dict[str, str]:
    """Every field in the run file's terms; recomputation is one of them."""
    values = {f.name: _word(getattr(plan, f.name)) for f in fields(Plan) if not f.name.startswith("recompute")}
    recompute = plan.recompute.value
    if plan.recompute is Recompute.SELECTIVE:
        recompute = "+".join(plan.recompute_modules)
    elif plan.recompute is Recompute.FULL and plan.recompute_layers is not None:
        recompute = f"full in {plan.recompute_layers} layers of a rank"
    stored = "+".join(plan.stored_activations or ()) or "none"
    cache, chunk = (str(value or "as the engine does") for value in (plan.weight_cache, plan.loss_chunk))
    return {**values, "recompute": recompute, "stored_activations": stored, "weight_cache": cache, "loss_chunk": chunk}


def _word(value: object) -> str:
    if isinstance(value, Enum):
        return value.name.lower() if isinstance(value, IntEnum) else str(value.value)
    return "as even as can be" if value is None else str(value)
