"""All plans that the search scored, best first: for tables and pages in which one filters, sorts and compares.

search          the `most` best plans by the closed form, all of them, and the front of speed against memory
event graphs    step times again, first of the front, then best first, until `MOST_OPERATIONS` operations are simulated
intervals       from the calibration's spread, for all plans in one evaluation
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from meshwright.arrays import FloatArray
from meshwright.calibration.parameters import fitted
from meshwright.cost.memory import memory_parts
from meshwright.cost.tables import PlanTable, plan_row
from meshwright.cost.uncertainty import spread
from meshwright.planner.estimate import steps_and_variances
from meshwright.planner.finalists import simulated_step_s
from meshwright.planner.objective import Goal
from meshwright.planner.request import PlanRequest
from meshwright.planner.screen import cost_model
from meshwright.planner.search import Counts, Distinct, RankedPlan, StageClock, search
from meshwright.specs.plan import Plan

FRONT_SLACK = 1.0
"""The front of speed against memory holds plans up to this share worse than the best: twice its time."""

MOST_OPERATIONS = 4_000_000
"""Operations of event graphs in all: about three seconds of one core. Other plans keep the closed form."""

BLOCK_ROWS = 1024
"""Plans whose intervals are computed at once: their columns stay in the cache of one core."""


@dataclass(frozen=True, kw_only=True)
class ScoredPlan:
    """One plan with its step and its memory. `value` is the objective's: the smaller, the better."""

    plan: Plan
    value: float
    step_s: float
    spread: float  # factor between the step time and either end of its 80 % interval
    is_simulated: bool  # step time from the event graph of the pipeline, and not from the closed form
    on_front: bool  # no listed plan is better in both value and memory
    components_s: Mapping[str, float]  # they sum to the step time
    memory_bytes: Mapping[str, float]  # by part, on the fullest pipeline stage
    reserved_bytes: float


@dataclass(frozen=True, kw_only=True)
class ScoredPlans:
    """Scored plans, best first.

    Attributes:
        plans: the best plans, and those of the front that are worse.
        counts: what the search enumerated and scored.
        seconds: processor time by stage.
        is_complete: True if every plan that is legal and fits is listed.
    """

    request: PlanRequest
    plans: tuple[ScoredPlan, ...]
    counts: Counts
    seconds: Mapping[str, float]
    is_complete: bool

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[ScoredPlan]:
        return iter(self.plans)


def scored_plans(request: PlanRequest, *, goal: Goal, most: int) -> ScoredPlans:
    """The `most` best plans of `request`, and the front of speed against memory; empty where nothing fits."""
    model = replace(cost_model(request), refine=lambda plan, steps: None)
    result = search(request, top=most, goal=goal, model=model, distinct=Distinct.PLANS, slack=FRONT_SLACK)
    listed = {ranked.plan: ranked for ranked in (*result.plans, *result.front)}
    ranked = sorted(listed.values(), key=lambda r: r.rank)  # stable: ties keep the search's order
    if not ranked:
        return ScoredPlans(
            request=request, plans=(), counts=result.counts, seconds=result.seconds, is_complete=True
        )
    clock = StageClock()
    rows = _simulated(ranked, front=[r.plan for r in result.front])
    clock.lap("event graphs")
    spreads = _spreads(request, [r.plan for r in rows])
    clock.lap("intervals")
    order = sorted(range(len(rows)), key=lambda i: (rows[i].rank, rows[i].reserved_bytes))
    scored, lowest = [], np.inf
    for i in order:
        done = rows[i]
        scored.append(_scored(done, spread=float(spreads[i]), on_front=done.reserved_bytes < lowest))
        lowest = min(lowest, done.reserved_bytes)
    num_simulated = sum(p.is_simulated for p in scored)
    return ScoredPlans(
        request=request,
        plans=tuple(scored),
        counts=replace(result.counts, simulated=num_simulated),
        seconds={**result.seconds, **clock.seconds},
        is_complete=len(result.plans) < most,
    )


def _simulated(plans: Sequence[RankedPlan], *, front: Sequence[Plan]) -> list[RankedPlan]:
    """The same plans; those with a pipeline have the step time of its event graph while the budget lasts."""
    found, first, left = list(plans), set(front), MOST_OPERATIONS
    for i in sorted(range(len(plans)), key=lambda i: plans[i].plan not in first):
        ranked, plan = plans[i], plans[i].plan
        num_micro = round(float(np.ravel(ranked.steps.num_micro_batches)[0]))
        cost = 0 if plan.pipeline == 1 else 3 * plan.pipeline * plan.virtual_pipeline * num_micro
        step_s = simulated_step_s(plan, ranked.steps) if 0 < cost <= left else None
        if step_s is not None:
            left -= cost
            value = ranked.value * step_s / ranked.closed_form_s
            found[i] = replace(ranked, value=value, step_s=step_s, is_simulated=True)
    return found


def _spreads(request: PlanRequest, plans: Sequence[Plan]) -> FloatArray:
    calibration = request.calibration or fitted()
    parts = []
    for start in range(0, len(plans), BLOCK_ROWS):
        table = _table(plans[start : start + BLOCK_ROWS])
        parts.append(spread(steps_and_variances(request, table, calibration=calibration)[1]))
    return np.concatenate([np.ravel(p) for p in parts])


def _table(plans: Sequence[Plan]) -> PlanTable:
    rows = [plan_row(plan) for plan in plans]
    return PlanTable(**{f.name: np.array([getattr(r, f.name) for r in rows]) for f in fields(PlanTable)})


def _scored(ranked: RankedPlan, *, spread: float, on_front: bool) -> ScoredPlan:
    components = ranked.components_s
    components["bubble"] += ranked.step_s - ranked.closed_form_s
    return ScoredPlan(
        plan=ranked.plan,
        value=ranked.value,
        step_s=ranked.step_s,
        spread=spread,
        is_simulated=ranked.is_simulated,
        on_front=on_front,
        components_s=components,
        memory_bytes=memory_parts(ranked.memory),
        reserved_bytes=ranked.reserved_bytes,
    )
