"""Best first, exact: every plan of the space is either scored or bounded away.

    shapes x micro-batches   lower bounds of step and memory, from one evaluation of the cost model each (`screen`)
    in order of the bound    expand sharding x replicas x recomputation x offload, score what is legal and
                             fits, if need be with what saves memory (`savings`); stop when the next bound
                             is worse than the k-th best plan; shapes whose states alone do not fit are expanded
                             only where nothing fits, to find the plan that needs least memory
    finalists                step time again from the pipeline's event graph

The result is what exhaustive search over `space.enumerate_plans` finds (tests compare them), and it is
deterministic: of plans of equal value those that shard over one rank are last, then come less memory, fewer degrees
above one, and the columns of the table.
With `Distinct.LAYOUTS` the k best plans differ in their degrees; otherwise recomputation single may differ.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Array, FloatArray, Mask
from meshwright.cost.memory import MemoryTable
from meshwright.cost.plan_rows import plan_from_row
from meshwright.cost.step import StepTable
from meshwright.cost.tables import PlanTable, cache_column
from meshwright.planner.engines import LegalityContext, Scope
from meshwright.planner.host_memory import host_bytes
from meshwright.planner.legality import legal_mask, legality_context
from meshwright.planner.objective import Goal
from meshwright.planner.request import PlanRequest
from meshwright.planner.savings import Saving, least_sets, may_fit, rank_of, ranking_value, savings, with_savings
from meshwright.planner.screen import CostModel, cost_model, step_rows
from meshwright.planner.space import (
    PlanChoices,
    Space,
    choices,
    combine,
    default_space,
    is_whole,
    num_rows,
    shapes,
    stacked,
)
from meshwright.specs.estimate import Shortfall
from meshwright.specs.plan import Plan, Sharding
from meshwright.units import gib

EXTRA_FINALISTS = 6
"""Simulated besides the k best, because the event graph may rank neighbours unlike the closed form."""

BLOCK_ROWS = 16_384
"""Candidates evaluated at once: their columns stay in the cache of one core."""

MOST_BLOCKS = 4
"""Blocks of candidates evaluated at once when many came before: what an evaluation costs besides its rows counts less,
and nodes that a falling threshold would exclude meanwhile are few beside those before."""

ROUNDING = 1 - 1e-9
"""The bound and the step add up the same terms in another order."""

LOSS_ROUNDING = 1 - 2e-3
"""The bound has all tokens in one chunk of the loss. GEMMs of chunks may fill their last wave of tiles better."""

LAYOUT_COLUMNS = ("tensor", "context", "pipeline", "virtual_pipeline", "expert", "expert_tensor")


class Distinct(Enum):
    """In what ranked plans must differ."""

    LAYOUTS = "layouts"  # in a degree: each layout is there once, with its best choices
    PLANS = "plans"  # in anything


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Number of plans in each stage of the search."""

    enumerated: int  # shapes x choices of the space, legal or not
    nodes: int  # legal pairs of shape and micro-batch, each bounded once
    expanded: int  # candidates of the nodes that the bound did not exclude
    legal: int
    fit: int
    scored: int
    simulated: int


@dataclass(frozen=True, kw_only=True)
class RankedPlan:
    """One plan of the result. `steps` and `memory` hold one row each; `value` is the objective's."""

    plan: Plan
    value: float
    step_s: float  # from the event graph where it was simulated
    closed_form_s: float
    is_simulated: bool
    steps: StepTable
    memory: MemoryTable

    @property
    def rank(self) -> float:
        """The number by which plans are ordered: `value`, unless the plan rounds what it keeps."""
        return rank_of(self.plan, self.value)

    @property
    def components_s(self) -> dict[str, float]:
        return {name: float(np.ravel(x)[0]) for name, x in self.steps.components_s.items()}

    @property
    def reserved_bytes(self) -> float:
        return float(np.ravel(self.memory.reserved_bytes)[0])

    @property
    def memory_rank(self) -> int:
        """The pipeline rank of which `memory` is."""
        return round(float(np.ravel(self.memory.rank)[0]))


def best_first(ranked: RankedPlan) -> tuple[float, bool, float]:
    """The key by which plans are sorted: of equal ones those that need less memory are first."""
    return ranked.rank, bool(_shards_nothing(ranked.plan)), ranked.reserved_bytes


def _shards_nothing(plan: Plan | PlanTable) -> Mask:
    """True where states are "sharded" over one rank."""
    return (plan.sharding > Sharding.NONE) & (plan.data_shard * plan.context == 1)


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The best plans, best first, or why there is none.

    `front`, best value first: plans of which each needs less reserved memory than those before it. It holds
    every such plan whose closed-form value is within the search's `slack` of the best, less those that the
    event graph finds beaten.
    """

    request: PlanRequest
    space: Space
    plans: tuple[RankedPlan, ...]
    front: tuple[RankedPlan, ...]
    counts: Counts
    seconds: dict[str, float]
    least_memory: RankedPlan | None = None  # when nothing fits: the legal plan that needs least memory

    @property
    def shortfall(self) -> Shortfall | None:
        """Memory needed and there, when a legal plan exists and none fits."""
        if self.least_memory is None:
            return None
        what, needed, there = "device memory", self.least_memory.reserved_bytes, self.request.usable_bytes
        if self.lacks_host_memory:
            what, there = "host memory of a device", self.request.usable_host_bytes
            needed = host_bytes(self.request, self.least_memory.plan)
        return Shortfall(what=what, needed=gib(needed), available=gib(there), unit="GiB")

    @property
    def lacks_host_memory(self) -> bool:
        """True when nothing fits, and the plan that needs least memory of a device needs too much of its host."""
        least = self.least_memory
        return least is not None and least.reserved_bytes <= self.request.usable_bytes

    @property
    def best(self) -> RankedPlan | None:
        return self.plans[0] if self.plans else None


@dataclass(kw_only=True)
class _Kept:
    """The scored plans that can still matter, and the smallest memory seen. Grows while the search runs.

    value: by which plans are ranked (`savings.ranking_value`).
    """

    top: int
    distinct: Distinct
    slack: float
    limit: float = np.inf  # plans with larger values are of no interest
    plan: PlanTable | None = None
    value: FloatArray | None = None
    reserved_bytes: FloatArray | None = None
    least: PlanTable | None = None  # one row: the legal plan that needs least memory
    least_bytes: float = np.inf

    @property
    def threshold(self) -> float:
        """No plan with a larger value can enter the result."""
        if self.value is None or self.plan is None:
            return self.limit
        ranked = self.value[self.leaders()]
        if len(ranked) < self.top:
            return self.limit
        return min(self.limit, max(float(ranked[self.top - 1]), float(ranked[0]) * (1 + self.slack)))

    def leaders(self) -> NDArray[np.intp]:
        """Rows best first, ties broken by the stated order; with LAYOUTS the best row of each layout only."""
        assert self.plan is not None
        assert self.value is not None
        assert self.reserved_bytes is not None
        order = np.lexsort((*_tie_keys(self.plan, self.reserved_bytes), self.value))
        if self.distinct is Distinct.PLANS:
            return order
        layout = np.stack([np.asarray(getattr(self.plan, name))[order] for name in LAYOUT_COLUMNS], axis=1)
        return order[np.sort(np.unique(layout, axis=0, return_index=True)[1])]

    def note_least(self, plan: PlanTable, reserved_bytes: FloatArray) -> None:
        """Remember the row that needs least memory."""
        lowest = int(np.argmin(reserved_bytes))
        if reserved_bytes[lowest] < self.least_bytes:
            self.least, self.least_bytes = plan.take(np.array([lowest])), float(reserved_bytes[lowest])

    def add(self, plan: PlanTable, value: FloatArray, reserved_bytes: FloatArray) -> None:
        """Merge new rows, keep leaders of the ranking and of the front."""
        if self.plan is not None and self.value is not None and self.reserved_bytes is not None:
            plan = stacked([self.plan, plan])
            value = np.concatenate([self.value, value])
            reserved_bytes = np.concatenate([self.reserved_bytes, reserved_bytes])
        self.plan, self.value, self.reserved_bytes = plan, value, reserved_bytes
        keep = np.zeros(len(value), dtype=bool)
        keep[self.leaders()[: self.top]] = True
        keep[_front_candidates(value, reserved_bytes)] = True
        index = np.flatnonzero(keep)
        self.plan, self.value, self.reserved_bytes = plan.take(index), value[index], reserved_bytes[index]


def search(
    request: PlanRequest,
    *,
    top: int = 10,
    goal: Goal | None = None,
    space: Space | None = None,
    model: CostModel | None = None,
    distinct: Distinct = Distinct.LAYOUTS,
    slack: float = 0.0,
    limit: float = np.inf,
    wants_least: bool = True,
) -> PlanResult:
    """The `top` best plans for `request`.

    `space` and `model` default to `default_space` and `cost_model` of the request. `slack`: the front is
    complete for plans up to this share worse than the best (0.1: 10 %). `limit`: plans whose closed-form value is
    larger may be missing. `wants_least`: find `PlanResult.least_memory` where nothing fits.
    """
    clock = StageClock()
    goal = goal or Goal(num_devices=request.num_devices)
    space = space or default_space(request)
    model = model or cost_model(request)
    context = legality_context(request)
    tree = _Tree.build(space, context)
    clock.lap("enumerate")
    least = tree.least_bytes(model)
    may_fit = np.asarray(model.memory_budget.fits(least))
    candidates = np.flatnonzero(may_fit)
    # The first block holds all of a small space, so that no bound excludes any of it.
    is_small = limit == np.inf and not wants_least and len(candidates) <= tree.nodes_at_once
    bound = np.where(may_fit, -np.inf, np.inf) if is_small else tree.bounds(candidates, model, goal)
    clock.lap("bound")
    kept = _Kept(top=top + EXTRA_FINALISTS, distinct=distinct, slack=slack, limit=limit)
    expand = partial(_expand, tree, kept=kept, model=model, goal=goal)
    order = candidates[np.argsort(bound[candidates], kind="stable")]
    tally = expand(order, bound, threshold=lambda: kept.threshold)
    if kept.plan is None and wants_least:
        others = np.flatnonzero(~may_fit)
        others = others[np.lexsort((tree.bounds(others, model, goal)[others], least[others]))]
        tally += expand(others, least, threshold=lambda: kept.least_bytes)
    clock.lap("score")
    finalists, front = _finish(kept, model, goal, space)
    plans = finalists[:top]
    clock.lap("simulate")
    return PlanResult(
        request=request,
        space=space,
        plans=plans,
        front=front,
        counts=Counts(
            enumerated=tree.num_candidates,
            nodes=len(bound),
            scored=tally["fit"],
            expanded=tally["expanded"],
            legal=tally["legal"],
            fit=tally["fit"],
            simulated=sum(p.is_simulated for p in finalists),
        ),
        seconds=clock.seconds,
        least_memory=None if plans or kept.least is None else _ranked(kept.least, model, goal, space)[0],
    )


@dataclass(frozen=True, kw_only=True)
class _Tree:
    """Nodes are pairs of a shape and a micro-batch; leaves add the other choices."""

    num_candidates: int
    space: Space
    context: LegalityContext
    shapes: PlanTable
    choices: PlanChoices
    node_shape: NDArray[np.intp]
    node_micro: NDArray[np.int64]

    @classmethod
    def build(cls, space: Space, context: LegalityContext) -> _Tree:
        table = shapes(space)
        legal = table.take(np.flatnonzero(legal_mask(table, context=context, scope=Scope.SHAPE)))
        micro = np.asarray(space.micro_batch, dtype=np.int64)
        shape = np.repeat(np.arange(num_rows(legal)), len(micro))
        sizes = np.tile(micro, num_rows(legal))
        rows = replace(legal.take(shape), micro_batch=sizes)
        keep = legal_mask(rows, context=context, scope=Scope.BATCH)
        options = choices(space)
        num_candidates = num_rows(table) * len(options)
        if num_candidates:  # what is legal with no shape is not tried with each
            rows = combine(table.take(np.zeros(len(options), dtype=np.intp)), options)
            options = options.take(legal_mask(rows, context=context, scope=Scope.CHOICE_ONLY))
        return cls(
            num_candidates=num_candidates,
            space=space,
            context=context,
            shapes=legal,
            choices=options,
            node_shape=shape[keep],
            node_micro=sizes[keep],
        )

    @property
    def nodes_at_once(self) -> int:
        """Nodes whose candidates are evaluated at once, where few came before."""
        per_node = max(1, len(self.choices) // max(1, len(self.space.micro_batch)))
        return max(1, BLOCK_ROWS // per_node)

    def nodes(self, index: NDArray[np.intp]) -> PlanTable:
        """The relaxed plans of some nodes."""
        return replace(self.shapes.take(self.node_shape[index]), micro_batch=self.node_micro[index])

    def bounds(self, index: NDArray[np.intp], model: CostModel, goal: Goal) -> FloatArray:
        """A lower bound of the objective for the nodes at `index`; the others have infinity."""
        found, most = np.full(len(self.node_shape), np.inf), MOST_BLOCKS * BLOCK_ROWS
        rounding = LOSS_ROUNDING if self.space.grows_loss else ROUNDING
        for block in (index[i : i + most] for i in range(0, len(index), most)):
            found[block] = goal.bound(model.bound_s(self.nodes(block)) * rounding)
        return found

    def least_bytes(self, model: CostModel) -> FloatArray:
        """A lower bound of the memory of every node, which is of its shape."""
        none = np.zeros_like(self.shapes.tensor)
        plain = replace(self.shapes, weight_cache=none + cache_column("off"))
        ways = set(zip(self.choices.sharding.tolist(), self.choices.offload_optimizer.tolist(), strict=True))
        found = np.full(num_rows(self.shapes), np.inf)
        for sharding, offload in ways:
            plan = replace(plain, sharding=none + sharding, offload_optimizer=none + offload)
            found = np.minimum(found, _column(model.least_bytes(plan), plan) * ROUNDING)
        return found[self.node_shape]

    def leaves(self, index: NDArray[np.intp]) -> PlanTable:
        """All candidates of some nodes that are structurally whole."""
        of_size = {int(b): np.flatnonzero(self.choices.micro_batch == b) for b in self.space.micro_batch}
        groups = [of_size[int(b)] for b in self.node_micro[index]]
        row = np.repeat(self.node_shape[index], [len(g) for g in groups])
        plan = combine(self.shapes.take(row), self.choices.take(np.concatenate(groups)))
        return plan.take(np.flatnonzero(is_whole(plan, self.space)))


def _expand(
    tree: _Tree,
    order: NDArray[np.intp],
    bound: FloatArray,
    *,
    threshold: Callable[[], float],
    kept: _Kept,
    model: CostModel,
    goal: Goal,
) -> Counter[str]:
    """Visit nodes in order of their bound until that of all others is above the threshold; add them to `kept`."""
    tally: Counter[str] = Counter()
    extra = savings(tree.space)
    step, start, end = tree.nodes_at_once, 0, 0
    while end < len(order):
        start, end = end, end + min(max(step, end // 2), MOST_BLOCKS * step)
        block = order[start:end]
        block = block[bound[block] <= threshold()]
        if not len(block):
            break
        plan = tree.leaves(block)
        tally["expanded"] += num_rows(plan)
        plan = plan.take(np.flatnonzero(legal_mask(plan, context=tree.context, scope=Scope.CHOICE)))
        tally["legal"] += num_rows(plan)
        if not num_rows(plan):
            continue
        fitting, reserved = _fitting(plan, tree, model, kept=kept, extra=extra)
        tally["fit"] += num_rows(fitting)
        if num_rows(fitting):
            value = ranking_value(goal.value(model.steps(fitting)), fitting.stored_mask)
            kept.add(fitting, value, reserved)
    return tally


def _fitting(
    plan: PlanTable, tree: _Tree, model: CostModel, *, kept: _Kept, extra: Sequence[Saving]
) -> tuple[PlanTable, FloatArray]:
    """Plans that fit, as they are or with least savings, and the memory of each."""
    budget, context = model.memory_budget, tree.context
    memory = model.memory(plan)
    reserved = _column(memory.reserved_bytes, plan)
    kept.note_least(plan, reserved)
    fits = model.fits(plan, reserved)
    hopeful = ~fits & may_fit(memory, budget, among=extra, element_bytes=context.element_bytes)
    choose = partial(_chosen, space=tree.space, model=model)
    found = [choose(plan, memory, reserved, np.flatnonzero(fits))]
    if np.any(hopeful):
        tried = with_savings(plan.take(np.flatnonzero(hopeful)), among=extra)
        legal = np.flatnonzero(legal_mask(tried, context=context, scope=Scope.CHOICE))
        if len(legal):
            some = tried.take(legal)
            saved = model.memory(some)
            sizes = _column(saved.reserved_bytes, some)
            kept.note_least(some, sizes)
            fits = np.zeros(num_rows(tried), dtype=bool)
            fits[legal] = model.fits(some, sizes)
            least = np.flatnonzero(least_sets(fits, among=extra)[legal])
            found.append(choose(some, saved, sizes, least))
    return stacked([plans for plans, _ in found]), np.concatenate([sizes for _, sizes in found])


def _chosen(
    plan: PlanTable,
    memory: MemoryTable,
    reserved: FloatArray,
    index: NDArray[np.intp],
    *,
    space: Space,
    model: CostModel,
) -> tuple[PlanTable, FloatArray]:
    """The plans at `index` with the fastest chunks of the loss in the memory that they leave, and what they reserve.

    `memory` and `reserved` are of all plans with the engine's own chunks.
    """
    found = plan.take(index)
    if not space.grows_loss or not len(index):
        return found, reserved[index]
    chunks, sizes = model.loss_chunks(found, memory.take(index), model.memory_budget.usable_bytes)
    return replace(found, loss_chunk=chunks), _column(sizes, found)


def _column(values: Array, plan: PlanTable) -> FloatArray:
    return np.broadcast_to(np.asarray(values, dtype=np.float64), np.shape(plan.tensor))


def _finish(
    kept: _Kept, model: CostModel, goal: Goal, space: Space
) -> tuple[tuple[RankedPlan, ...], tuple[RankedPlan, ...]]:
    """Simulate the finalists and the front, and rank them by what the event graph says."""
    if kept.plan is None or kept.value is None or kept.reserved_bytes is None:
        return (), ()
    leaders = kept.leaders()[: kept.top]
    # Further away the search was not complete, so a plan there may be beaten by one that was never scored.
    near = np.flatnonzero(kept.value <= kept.value.min() * (1 + kept.slack))
    front = near[_front_candidates(kept.value[near], kept.reserved_bytes[near])]
    wanted = np.array(sorted({*leaders.tolist(), *front.tolist()}))
    found = dict(zip(wanted.tolist(), _ranked(kept.plan.take(wanted), model, goal, space), strict=True))
    ranked = sorted((found[i] for i in leaders.tolist()), key=best_first)
    return tuple(ranked), _unbeaten([found[i] for i in front.tolist()])


def _unbeaten(plans: Sequence[RankedPlan]) -> tuple[RankedPlan, ...]:
    """Best value first; each needs less memory than those before it."""
    front, lowest = [], np.inf
    for ranked in sorted(plans, key=lambda r: (r.rank, r.reserved_bytes)):
        if ranked.reserved_bytes < lowest:
            front.append(ranked)
            lowest = ranked.reserved_bytes
    return tuple(front)


def _ranked(rows: PlanTable, model: CostModel, goal: Goal, space: Space) -> list[RankedPlan]:
    """Every row with its step and its memory, costed and simulated together."""
    steps, memory = model.steps(rows), model.memory(rows)
    values = np.ravel(goal.value(steps))
    singles = [step_rows(steps, np.array([i])) for i in range(num_rows(rows))]
    plans = [plan_from_row(rows.take(i), splits=space.splits) for i in range(num_rows(rows))]
    found = []
    for i, simulated in enumerate(model.refine(plans, singles)):
        closed = float(np.ravel(singles[i].step_s)[0])
        step_s = closed if simulated is None else simulated
        found.append(
            RankedPlan(
                plan=plans[i],
                value=float(values[i]) * step_s / closed,
                step_s=step_s,
                closed_form_s=closed,
                is_simulated=simulated is not None,
                steps=singles[i],
                memory=memory.take(np.array([i])),
            )
        )
    return found


def _tie_keys(plan: PlanTable, reserved_bytes: FloatArray) -> tuple[NDArray[Any], ...]:
    """Keys for np.lexsort, least important first: columns of the table, how many degrees exceed one, memory."""
    columns = [np.asarray(getattr(plan, f.name)) for f in fields(plan)]
    degrees = sum((np.asarray(getattr(plan, name)) > 1) * 1 for name in LAYOUT_COLUMNS)
    return (*reversed(columns), np.asarray(degrees), reserved_bytes, np.asarray(_shards_nothing(plan)))


def _front_candidates(value: FloatArray, reserved_bytes: FloatArray) -> NDArray[np.intp]:
    """The front of value against memory by one sort and a running minimum; of equal rows one stays."""
    order = np.lexsort((reserved_bytes, value))
    lowest = np.minimum.accumulate(reserved_bytes[order])
    better = np.concatenate([[True], reserved_bytes[order][1:] < lowest[:-1]])
    return order[better]


class StageClock:
    """Process seconds per stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name] = now - self._last
        self._last = now
