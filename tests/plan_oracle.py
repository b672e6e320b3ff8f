"""All plans that are legal and fit, found by trying each: the oracle of the search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.cost.tables import PlanTable
from meshwright.planner.legality import legal_mask, legality_context
from meshwright.planner.request import PlanRequest
from meshwright.planner.savings import savings
from meshwright.planner.screen import CostModel
from meshwright.planner.space import Space, enumerate_plans, num_rows


def fitting_plans(request: PlanRequest, space: Space, model: CostModel) -> list[PlanTable]:
    """Plans without savings of memory that fit, and of the others those with each least set that makes them fit."""
    context, whole = legality_context(request), enumerate_plans(space)
    if not num_rows(whole):
        return []

    def possible(plan: PlanTable) -> np.ndarray:
        needed = np.broadcast_to(np.asarray(model.memory(plan).reserved_bytes), np.shape(plan.tensor))
        return legal_mask(plan, context=context) & np.asarray(model.memory_budget.fits(needed))

    legal = legal_mask(whole, context=context)
    by_saving = {frozenset[str](): (whole, possible(whole))}
    for saving in savings(space):
        tried = saving.applied(whole)
        by_saving[saving.members] = tried, possible(tried) & legal
    found = []
    for members, (plan, fits) in by_saving.items():
        smaller = [other for names, (_, other) in by_saving.items() if names < members]
        found.append(plan.take(np.flatnonzero(fits & ~np.any([np.zeros_like(fits), *smaller], axis=0))))
    found = [plan for plan in found if num_rows(plan)]
    if not space.grows_loss:
        return found
    return [_with_chunks(plan, model) for plan in found]


def _with_chunks(plan: PlanTable, model: CostModel) -> PlanTable:
    """Every plan with the fewest chunks of the loss that fit."""
    chunks, _ = model.loss_chunks(plan, model.memory(plan), model.memory_budget.usable_bytes)
    return replace(plan, loss_chunk=np.broadcast_to(chunks, np.shape(plan.tensor)))
