"""Choice of software: the switches with which the best plan of a request is fastest.

Switches decide which layout is best: with a dispatcher that sends one copy to each node, experts over many nodes pay.
So searches with all degrees free find where to begin: with the fastest value of each switch, and without those that
exclude layouts. In the degrees of the plan that is found, each switch goes back to what the engine sets by itself
unless it gains `LEAST_GAIN`. A free search with the kept switches follows, until nothing changes. It is no exact search
over all combinations.

Where nothing fits, and only there, activations or optimizer states go to host memory, whichever is faster, or both
where neither suffices. Of activations it is, of the shares that are tried and that the hosts hold, the smallest, unless
a larger one gains enough. Where the memory of the hosts is not known it is the smallest with which a plan fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from meshwright.planner.objective import Goal
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import PlanResult, RankedPlan, search
from meshwright.planner.switches import (
    HELD,
    LEAST_GAIN,
    Values,
    applying,
    offloading,
    open_values,
    with_offloaded_states,
    with_values,
)

MOST_ROUNDS = 3
"""Free searches with what the one before has kept."""

EXCLUDING = ("overlaps_experts", "cuda_graphs")
"""Switches with which an engine does not run all layouts, or recomputes less."""


def search_with_software(request: PlanRequest, *, goal: Goal, top: int = 1, slack: float = 0.0) -> PlanResult:
    """Return the `top` best plans under one set of switches, which the request of the result has.

    Only switches that `open_values` names are chosen, and what `offloading` and `with_offloaded_states` name where no
    plan fits. `slack`: as in `search`.
    """
    wanted = partial(search, goal=goal, top=top, slack=slack)
    result = _fastest(request, goal=goal, wanted=wanted)
    if result.best is None and result.least_memory is not None:
        tried = [_offloading(request, result, wanted)]
        if (held := with_offloaded_states(request)) is not None:
            tried.append(wanted(held))
            if all(found.best is None for found in tried):
                tried.append(_offloading(held, tried[1], wanted))
        fitting = [(found.best.rank, n) for n, found in enumerate(tried) if found.best is not None]
        result = tried[min(fitting)[1]] if fitting else _nearest(tried)
    return result


def _nearest(tried: Sequence[PlanResult]) -> PlanResult:
    """The first result for which hosts are too small and devices are not, else the first."""
    return next((found for found in tried if found.lacks_host_memory), tried[0])


def _offloading(request: PlanRequest, result: PlanResult, wanted: Callable[..., PlanResult]) -> PlanResult:
    """The best of the shares, of which a larger one has to gain enough; `result`, in which nothing fits, without one.

    Where hosts are too small for a share, the result says so.
    """
    for values in offloading(request):
        found = wanted(with_values(request, values))
        if found.best is None:
            lacks_host = result.best is None and found.lacks_host_memory
            result = found if lacks_host and not result.lacks_host_memory else result
        elif request.cluster.host_bytes_per_device is None:
            return found
        elif result.best is None or found.best.rank * LEAST_GAIN <= result.best.rank:
            result = found
    return result


def _fastest(request: PlanRequest, *, goal: Goal, wanted: Callable[..., PlanResult]) -> PlanResult:
    options = open_values(request)
    if not options:
        return wanted(request)
    is_moe = request.model.experts is not None
    first: Values = options if is_moe else {}  # likely to stay
    result = wanted(with_values(request, first), wants_least=False)
    best, values = _beginning(request, (result.best, first), options, goal)
    if best is None:
        return wanted(request)
    if not values:
        return result
    searched = first
    for _ in range(MOST_ROUNDS):
        values = _kept(request, best, values, options, goal)
        if values != searched:
            result, searched = wanted(with_values(request, values)), values
        if result.best is None or _degrees(result.best) == _degrees(best):
            break
        best = result.best
    return result


def _beginning(
    request: PlanRequest, first: tuple[RankedPlan | None, Values], options: Values, goal: Goal
) -> tuple[RankedPlan | None, Values]:
    """The best plan and its switches: `first`, unless a set of `_other_sets` gains enough."""
    best, values = first
    for others in _other_sets(request, options):
        found = _faster(with_values(request, others), goal, than=best)
        best, values = (best, values) if found is None else (found, others)
    return best, values


def _other_sets(request: PlanRequest, options: Values) -> list[Values]:
    """All switches for a dense model; for a mixture, which begins with all, those that exclude no layouts."""
    if request.model.experts is None:
        return [options]
    less = ({k: v for k, v in options.items() if k not in EXCLUDING[:count]} for count in (1, 2))
    return [values for values in less if values != options]


def _faster(request: PlanRequest, goal: Goal, *, than: RankedPlan | None = None) -> RankedPlan | None:
    """The best plan of `request` if it gains enough over another one."""
    limit = np.inf if than is None else than.rank / LEAST_GAIN
    best = search(request, goal=goal, top=1, limit=limit, wants_least=False).best
    return best if best is not None and best.rank <= limit else None


def _degrees(best: RankedPlan) -> dict[str, object]:
    return {name: getattr(best.plan, name) for name in HELD}


def _kept(request: PlanRequest, best: RankedPlan, values: Values, options: Values, goal: Goal) -> Values:
    """Those of `options` that gain enough in the degrees of `best`, which has `values`. Each is tried alone."""
    held, useful, now = request.fixing(**_degrees(best)), applying(request, best.plan), best.rank
    kept = {name: value for name, value in values.items() if name in useful}
    for name in [name for name in options if name in useful]:
        other = {**kept, name: options[name]}
        if name in kept:
            del other[name]
        found = search(with_values(held, other), goal=goal, top=1, wants_least=False).best
        rank = np.inf if found is None else found.rank
        with_it, without = (now, rank) if name in kept else (rank, now)
        if (with_it * LEAST_GAIN <= without) != (name in kept):
            kept, now = other, rank
    return kept
