"""Search for plans whose layers are in proportion to the speed of the parts of a cluster.

`search` ranks plans with equal shares. Here, for each pipeline degree whose ranks lie on one part each, the best of
them, without virtual stages and with them, get the layers that even out their ranks (`generations.layers_by_speed`),
and are costed part by part. It is no exact search: a plan that ranks low with equal shares is not tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from meshwright.cost.pipeline.schedules import shape_of
from meshwright.cost.step import StepTable
from meshwright.planner.engines import engine_facts
from meshwright.planner.finalists import num_operations
from meshwright.planner.generations import layers_by_speed, mixed_step_of, on_parts, part_of_rank, steps_on
from meshwright.planner.legality import legal_mask, legality_context
from meshwright.planner.objective import Goal
from meshwright.planner.request import PlanRequest
from meshwright.planner.screen import step_rows
from meshwright.planner.search import LAYOUT_COLUMNS, Distinct, PlanResult, RankedPlan, best_first, search
from meshwright.planner.space import Space, default_space, plan_table
from meshwright.specs.plan import AxisOrder, Plan

TRIED = 4
"""Plans of each pipeline degree and each memory that get layers by speed."""

LAYERS_PER_STAGE = 2
"""Layers of a mean virtual stage, at least: of stages with one layer each, no part could have fewer than another."""

MEMORY_RATIOS = (1.0, 1.3)
"""Memory of the smallest part with which they are searched: with fewer layers on it, a rank needs less than an equal
share. What does not fit in the end is left out."""


def with_layers_by_speed(result: PlanResult, *, goal: Goal, top: int) -> PlanResult:
    """`result` with plans whose layers are in proportion to speed among its own, best first."""
    ordered = sorted((*result.plans, *by_speed(result.request, goal=goal)), key=best_first)
    of_layout: dict[tuple[int, ...], RankedPlan] = {}
    for ranked in ordered:
        of_layout.setdefault(tuple(getattr(ranked.plan, name) for name in LAYOUT_COLUMNS), ranked)
    plans = tuple(of_layout.values())[:top]
    return replace(result, plans=plans, least_memory=None if plans else result.least_memory)


def by_speed(request: PlanRequest, *, goal: Goal) -> list[RankedPlan]:
    """The best plans with equal shares by pipeline degree, their layers changed, where they are legal and fit."""
    plans = dict.fromkeys(_candidates(request, goal)) if _changes_layers(request) else {}
    return _costed(request, goal, _with_own_layers(request, list(plans)))


def each_on_parts(
    request: PlanRequest, *, goal: Goal, plans: Sequence[RankedPlan], most_operations: int
) -> list[RankedPlan]:
    """`plans` with their ranks on the parts, and the same ones with layers by speed.

    Left as they are: plans whose ranks do not lie on one part each, and what comes after `most_operations` operations
    of event graphs.
    """
    chosen, left, graphs = [], most_operations, 1 + _changes_layers(request)
    for plan in (ranked.plan for ranked in plans):
        operations = graphs * num_operations(
            shape_of(plan, num_micro_batches=plan.num_micro_batches(request.global_batch))
        )
        if operations <= left and on_parts(request, plan):
            chosen.append(plan)
            left -= operations
    own = _with_own_layers(request, chosen) if _changes_layers(request) else []
    costed = {ranked.plan: ranked for ranked in _costed(request, goal, [*chosen, *own])}
    changed = set(chosen)
    return [ranked for ranked in plans if ranked.plan not in changed] + list(costed.values())


def _changes_layers(request: PlanRequest) -> bool:
    is_open = "layers_per_stage" not in request.fixed
    return is_open and bool(request.cluster.parts) and engine_facts(request.engine).uneven_layers


def _with_own_layers(request: PlanRequest, plans: Sequence[Plan]) -> list[Plan]:
    """The legal ones of `plans`, each with layers in proportion to speed."""
    equal = list(dict.fromkeys(replace(plan, layers_per_stage=None) for plan in plans))
    steps = _steps_on_parts(request, equal)
    found = [
        replace(plan, layers_per_stage=layers_by_speed(request, plan, own))
        for plan, own in zip(equal, steps, strict=True)
    ]
    if not found:
        return []
    legal = legal_mask(plan_table(found), context=legality_context(request))
    return [plan for plan, is_legal in zip(found, legal, strict=True) if is_legal]


def _costed(request: PlanRequest, goal: Goal, plans: Sequence[Plan]) -> list[RankedPlan]:
    """Those of `plans` that fit, costed part by part."""
    found = []
    for plan, steps in zip(plans, _steps_on_parts(request, plans), strict=True):
        mixed = mixed_step_of(request, plan, steps)
        if mixed.fits:
            found.append(
                RankedPlan(
                    plan=plan,
                    value=float(np.ravel(goal.value(mixed.steps))[0]),
                    step_s=mixed.step_s,
                    closed_form_s=mixed.step_s,
                    is_simulated=True,
                    steps=mixed.steps,
                    memory=mixed.fullest.memory,
                )
            )
    return found


def _steps_on_parts(request: PlanRequest, plans: Sequence[Plan]) -> list[list[StepTable]]:
    """For each plan its step on each part, as if all devices were of that part: one evaluation a part."""
    if not plans:
        return []
    rows = plan_table(plans)
    on_each = [steps_on(request, part, rows) for part in request.cluster.parts]
    return [[step_rows(steps, np.array([i])) for steps in on_each] for i in range(len(plans))]


def _candidates(request: PlanRequest, goal: Goal) -> Iterator[Plan]:
    device = request.cluster.accelerator
    for pipeline in _pipelines(request):
        for ratio in MEMORY_RATIOS:
            larger = replace(device, memory_bytes=int(ratio * device.memory_bytes))
            wider = replace(request, cluster=replace(request.cluster, accelerator=larger, parts=()))
            asked = wider.fixing(
                pipeline=pipeline, loss_chunk=request.fixed.get("loss_chunk"), axis_order=AxisOrder.PIPELINE_OUTERMOST
            )
            for space in _spaces(asked):
                equal = search(asked, top=TRIED, goal=goal, space=space, distinct=Distinct.PLANS)
                yield from (r.plan for r in equal.plans if on_parts(request, r.plan))


def _pipelines(request: PlanRequest) -> Iterator[int]:
    """Pipeline degrees that put no rank on two parts."""
    if request.fixed.get("axis_order", AxisOrder.PIPELINE_OUTERMOST) is not AxisOrder.PIPELINE_OUTERMOST:
        return
    for pipeline in range(2, min(request.num_devices, request.model.num_layers) + 1):
        width, left = divmod(request.num_devices, pipeline)
        is_wanted = request.fixed.get("pipeline", pipeline) == pipeline and not left
        if is_wanted and part_of_rank(request.cluster, Plan(pipeline=pipeline, data_shard=width)):
            yield pipeline


def _spaces(request: PlanRequest) -> Iterator[Space]:
    """The space of `request` without virtual stages, and with those that have layers to give to other stages."""
    space = default_space(request)
    (pipeline,) = space.pipeline
    most = max(2, request.model.num_layers // (LAYERS_PER_STAGE * pipeline))
    counts = [v for v in space.virtual_pipeline if v > 1]
    for virtual in ((1,), tuple(v for v in counts if v <= most or len(counts) == 1)):
        if set(virtual) & set(space.virtual_pipeline):
            yield replace(space, virtual_pipeline=virtual)
