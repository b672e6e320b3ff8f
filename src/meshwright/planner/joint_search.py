"""Search for plans whose layers are in proportion to the speed of the parts of a cluster.

`search` ranks plans with equal shares. Here, for each pipeline degree whose stages lie on one part each, the best of
them get the layers that even out their stages (`generations.layers_by_speed`), and are costed part by part. It is no
exact search: a plan that ranks low with equal shares is not tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwright.planner.engines import Severity, engine_facts
from meshwright.planner.generations import layers_by_speed, mixed_step, part_of_stage
from meshwright.planner.legality import legality_context, violations
from meshwright.planner.objective import Goal
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import LAYOUT_COLUMNS, Distinct, PlanResult, RankedPlan, search
from meshwright.specs.plan import AxisOrder, Plan

TRIED = 4
"""Plans of each pipeline degree and each memory that get layers by speed."""

MEMORY_RATIOS = (1.0, 1.3)
"""Memory of the smallest part with which they are searched: with fewer layers on it, a rank needs less than an equal
share. What does not fit in the end is left out."""


def with_layers_by_speed(result: PlanResult, *, goal: Goal, top: int) -> PlanResult:
    """`result` with plans whose layers are in proportion to speed among its own, best first."""
    request = result.request
    if not request.cluster.parts or not engine_facts(request.engine).uneven_layers:
        return result
    if "layers_per_stage" in request.fixed:
        return result
    found = [ranked for plan in _candidates(request, goal) if (ranked := _ranked(request, plan, goal))]
    ordered = sorted((*result.plans, *found), key=lambda ranked: ranked.rank)
    of_layout: dict[tuple[int, ...], RankedPlan] = {}
    for ranked in ordered:
        of_layout.setdefault(tuple(getattr(ranked.plan, name) for name in LAYOUT_COLUMNS), ranked)
    plans = tuple(of_layout.values())[:top]
    return replace(result, plans=plans, least_memory=None if plans else result.least_memory)


def _candidates(request: PlanRequest, goal: Goal) -> Iterator[Plan]:
    """The best plans with equal shares by pipeline degree, with their layers changed."""
    most = min(request.num_devices, request.model.num_layers)
    free = {"virtual_pipeline": 1, "axis_order": AxisOrder.PIPELINE_OUTERMOST}
    if any(request.fixed.get(name, value) != value for name, value in free.items()):
        return
    device = request.cluster.accelerator
    seen = set[Plan]()
    for pipeline in (p for p in range(2, most + 1) if request.num_devices % p == 0):
        if request.fixed.get("pipeline", pipeline) != pipeline:
            continue
        if not part_of_stage(
            request.cluster, Plan(pipeline=pipeline, data_shard=request.num_devices // pipeline)
        ):
            continue
        for ratio in MEMORY_RATIOS:
            larger = replace(device, memory_bytes=int(ratio * device.memory_bytes))
            wider = replace(request, cluster=replace(request.cluster, accelerator=larger, parts=()))
            fixed = {"pipeline": pipeline, "loss_chunk": request.fixed.get("loss_chunk"), **free}
            equal = search(wider.fixing(**fixed), top=TRIED, goal=goal, distinct=Distinct.PLANS)
            for ranked in equal.plans:
                plan = replace(ranked.plan, layers_per_stage=None)
                if plan not in seen and part_of_stage(request.cluster, plan):
                    seen.add(plan)
                    yield replace(plan, layers_per_stage=layers_by_speed(request, plan))


def _ranked(request: PlanRequest, plan: Plan, goal: Goal) -> RankedPlan | None:
    """`plan` costed part by part; None where it is not legal or does not fit."""
    broken = violations(plan, context=legality_context(request))
    mixed = None if any(v.severity is Severity.REFUSED for v in broken) else mixed_step(request, plan)
    if mixed is None or not mixed.fits:
        return None
    return RankedPlan(
        plan=plan,
        value=float(np.ravel(goal.value(mixed.steps))[0]),
        step_s=mixed.step_s,
        closed_form_s=mixed.step_s,
        is_simulated=True,
        steps=mixed.steps,
        memory=mixed.fullest.memory,
    )
