"""All plans that the search scored, best first: for tables and pages in which one filters, sorts and compares.

search          the `most` best plans by the closed form, all of them, and the front of speed against memory
event graphs    step times again, first of the front, then best first, until `MOST_OPERATIONS` operations are simulated
parts           on clusters of several, half of these operations are of ranks on their own parts (`joint_search`)
intervals       from the calibration's spread, for all plans in one evaluation
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.arrays import FloatArray
from meshwright.calibration.parameters import fitted
from meshwright.cost.memory import memory_parts
from meshwright.cost.pipeline.schedules import shape_of
from meshwright.cost.uncertainty import spread
from meshwright.planner.estimate import steps_and_variances
from meshwright.planner.finalists import MAX_OPERATIONS, num_operations, simulated_steps_s
from meshwright.planner.generations import budget_of_rank
from meshwright.planner.joint_search import by_speed, each_on_parts
from meshwright.planner.objective import Goal
from meshwright.planner.request import PlanRequest
from meshwright.planner.screen import cost_model, no_event_graphs
from meshwright.planner.search import Counts, Distinct, RankedPlan, StageClock, best_first, search
from meshwright.planner.space import plan_table
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
    usable_bytes: float  # of its device


@dataclass(frozen=True, kw_only=True)
class ScoredPlans:
    """Scored plans, best first.

    Attributes:
        plans: the best plans, and the slower plans of the front.
        counts: what the search enumerated and scored.
        seconds: processor time by stage.
        is_complete: True if every plan that is legal and fits is listed; on clusters of several parts, every one with
            equal shares of the layers.
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


def scored_plans(request: PlanRequest, *, goal: Goal, most: int, simulated: Sequence[RankedPlan] = ()) -> ScoredPlans:
    """The `most` best plans of `request`, and the front of speed against memory; empty where nothing fits.

    `simulated`: plans that a search of layouts ranks by their event graphs, listed whatever their closed forms say.
    """
    model = replace(cost_model(request), refine=no_event_graphs)
    result = search(request, top=most, goal=goal, model=model, distinct=Distinct.PLANS, slack=FRONT_SLACK)
    listed = {ranked.plan: ranked for ranked in (*result.plans, *result.front, *simulated)}
    ranked = sorted(listed.values(), key=best_first)  # stable: ties keep the search's order
    if not ranked:
        return ScoredPlans(request=request, plans=(), counts=result.counts, seconds=result.seconds, is_complete=True)
    clock = StageClock()
    first = {r.plan for r in result.front}
    rows, operations = sorted(ranked, key=lambda r: r.plan not in first), MOST_OPERATIONS
    if request.cluster.parts:
        operations //= 2
        rows = each_on_parts(request, goal=goal, plans=rows, most_operations=operations)
        rows = list({r.plan: r for r in (*rows, *by_speed(request, goal=goal))}.values())
    rows = _simulated(rows, operations=operations)
    clock.lap("event graphs")
    spreads = _spreads(request, [r.plan for r in rows])
    clock.lap("intervals")
    order = sorted(range(len(rows)), key=lambda i: (rows[i].rank, rows[i].reserved_bytes))
    scored, lowest = [], np.inf
    for i in order:
        done = rows[i]
        scored.append(_scored(request, done, spread=float(spreads[i]), on_front=done.reserved_bytes < lowest))
        lowest = min(lowest, done.reserved_bytes)
    num_simulated = sum(p.is_simulated for p in scored)
    return ScoredPlans(
        request=request,
        plans=tuple(scored),
        counts=replace(result.counts, simulated=num_simulated),
        seconds={**result.seconds, **clock.seconds},
        is_complete=len(result.plans) < most,
    )


def _simulated(plans: Sequence[RankedPlan], *, operations: int) -> list[RankedPlan]:
    """The same plans; those with a pipeline have the step time of its event graph while the budget lasts."""
    found, tried, left = list(plans), [], operations
    for i, ranked in enumerate(plans):
        num_micro = round(float(np.ravel(ranked.steps.num_micro_batches)[0]))
        cost = num_operations(shape_of(ranked.plan, num_micro_batches=num_micro))
        if ranked.plan.pipeline > 1 and cost <= min(left, MAX_OPERATIONS) and not ranked.is_simulated:
            tried.append(i)
            left -= cost
    steps_s = simulated_steps_s([found[i].plan for i in tried], [found[i].steps for i in tried])
    for i, step_s in zip(tried, steps_s, strict=True):
        if step_s is not None:
            value = found[i].value * step_s / found[i].closed_form_s
            found[i] = replace(found[i], value=value, step_s=step_s, is_simulated=True)
    return found


def _spreads(request: PlanRequest, plans: Sequence[Plan]) -> FloatArray:
    calibration = request.calibration or fitted()
    parts = []
    for start in range(0, len(plans), BLOCK_ROWS):
        table = plan_table(plans[start : start + BLOCK_ROWS])
        parts.append(spread(steps_and_variances(request, table, calibration=calibration)[1]))
    return np.concatenate([np.ravel(p) for p in parts])


def _scored(request: PlanRequest, ranked: RankedPlan, *, spread: float, on_front: bool) -> ScoredPlan:
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
        usable_bytes=budget_of_rank(request, ranked.plan, ranked.memory_rank).usable_bytes,
    )
