"""The best replica: the planner's answer for each number of devices that may hold the model once.

A larger replica has less of the model on each device, so less to reduce and gather between replicas, and more
pipeline stages or wider collectives inside. "At-scale AI training on AMD Instinct MI350/MI300X series GPUs"
(whitepaper, AMD 2025, section "Replica size selection") looks for the largest that is still efficient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import PlanRequest
from meshwright.planner.scaling.sizes import Costed, replica_devices
from meshwright.planner.screen import cost_model, no_event_graphs
from meshwright.planner.search import RankedPlan, search
from meshwright.planner.space import default_space
from meshwright.specs.plan import Plan

NUM_LAYOUTS = 120
"""Best layouts of one search, in which most sizes are found; a search by widths finds the other sizes."""

NUM_NARROW = 4
"""Layouts looked at for one pair of widths: the best may hold the model on more devices than the pair."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Replica:
    """The best plan whose replica has `num_devices`; `relative_ratio`: its rate over the best one's."""

    num_devices: int
    costed: Costed
    relative_ratio: float


def rank_replicas(request: PlanRequest, sizes: Iterable[int]) -> tuple[Replica, ...]:
    """The best plan for every replica size of `sizes` that has one, best first."""
    wanted = set(sizes)
    model = replace(cost_model(request), refine=no_event_graphs)  # the winner of each size gets one
    best = _best_by_size(search(request, top=NUM_LAYOUTS, model=model).plans, wanted)
    for fixed in _width_pairs(request, wanted - best.keys()):
        narrow = search(request.fixing(**fixed), top=NUM_NARROW, model=model).plans
        for size, ranked in _best_by_size(narrow, wanted).items():
            if size not in best or ranked.value < best[size].value:
                best[size] = ranked
    found = {size: _costed(request, ranked.plan) for size, ranked in best.items()}
    fastest = max((c.rate.value for c in found.values()), default=1.0)
    replicas = (Replica(num_devices=size, costed=c, relative_ratio=c.rate.value / fastest) for size, c in found.items())
    return tuple(sorted(replicas, key=lambda r: -r.relative_ratio))


def _best_by_size(ranked: Iterable[RankedPlan], wanted: set[int]) -> dict[int, RankedPlan]:
    """The first plan of every wanted size; `ranked` is best first."""
    best: dict[int, RankedPlan] = {}
    for plan in ranked:
        size = replica_devices(plan.plan)
        if size in wanted:
            best.setdefault(size, plan)
    return best


def _width_pairs(request: PlanRequest, sizes: set[int]) -> list[dict[str, int]]:
    """Pipeline width with expert (or, in a dense model, tensor) width: their product is a wanted size."""
    space = default_space(request)
    axis = "expert" if request.model.experts is not None else "tensor"
    return [
        {axis: width, "pipeline": pipeline}
        for width in getattr(space, axis)
        for pipeline in space.pipeline
        if width * pipeline in sizes
    ]


def _costed(request: PlanRequest, plan: Plan) -> Costed:
    return Costed(request=request, estimate=estimate_plan(request, plan))
