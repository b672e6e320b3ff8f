"""The space of plans: every candidate as a row of one table, made by broadcasting.

A candidate is a *shape* (degrees, virtual stages, schedule: who computes what) with a *choice* (sharding,
replicas, micro-batch, recomputation, offload: how each rank does it). Shapes and choices combine freely;
`legality` decides which combinations an engine accepts. Degrees obey

    data_replicate * data_shard * context * tensor * pipeline = devices
    expert * expert_tensor divides data_shard * context * tensor

and nothing is rounded: data_shard is what remains, and a row where something remains over does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import combinations
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.flops import attention_core_flops_per_token, count_parameters, keys_seen
from meshwright.cost.pipeline.schedules import SCHEDULE_RECORDS, PipelineShape, chunks_allowed, rank_layers
from meshwright.cost.sparse_attention import has_sparse_attention, index_score_flops, scored_keys
from meshwright.cost.stages import balanced_layers, layers_per_stage
from meshwright.cost.tables import (
    RECOMPUTES,
    ModelTable,
    PlanTable,
    cache_column,
    chunk_column,
    plan_row,
    prediction_module,
    stored_column,
)
from meshwright.errors import InputError
from meshwright.planner.engines import EngineFacts, engine_facts, selective_sets
from meshwright.planner.request import PlanRequest
from meshwright.specs.model import AttentionKind
from meshwright.specs.plan import RECOMPUTE_MODULES, SCHEDULES, AxisOrder, Offload, Plan, Recompute, Schedule, Sharding

IntArray = NDArray[np.int64]

MAX_CONTEXT = 64
MIN_CONTEXT_TOKENS = 1024
"""A rank with fewer tokens of a sequence than this has kernels too small to be worth a plan."""

MAX_MICRO_BATCH_TOKENS = 65_536
MAX_SMALL_WORLD = 256
"""Up to this many devices every replica count is tried; above, powers of four and one replica per domain."""


_FIXED_TYPES: dict[str, Callable[[Any], Any]] = {
    "sequence_parallel": bool,
    "schedule": Schedule,
    "sharding": Sharding,
    "offload": Offload,
    "axis_order": AxisOrder,
}


@dataclass(frozen=True, kw_only=True)
class RecomputeChoice:
    """One way to recompute. `layers` counts fully recomputed layers per pipeline rank; None: all."""

    kind: Recompute = Recompute.NONE
    modules: tuple[str, ...] = ()
    layers: int | None = None

    @property
    def mask(self) -> int:
        return sum(1 << RECOMPUTE_MODULES.index(m) for m in self.modules)


@dataclass(frozen=True, kw_only=True)
class Space:
    """The values that each axis may take, ascending. `untried` names the values that are not tried, and the reasons."""

    num_devices: int
    tensor: tuple[int, ...] = (1,)
    sequence_parallel: tuple[bool, ...] = (True,)
    context: tuple[int, ...] = (1,)
    pipeline: tuple[int, ...] = (1,)
    virtual_pipeline: tuple[int, ...] = (1,)
    schedule: tuple[Schedule, ...] = (Schedule.ONE_F_ONE_B,)
    expert: tuple[int, ...] = (1,)
    expert_tensor: tuple[int, ...] = (1,)
    sharding: tuple[Sharding, ...] = (Sharding.OPTIMIZER,)
    data_replicate: tuple[int, ...] = (1,)
    micro_batch: tuple[int, ...] = (1,)
    recompute: tuple[RecomputeChoice, ...] = (RecomputeChoice(),)
    offload: tuple[Offload, ...] = (Offload.NONE,)
    data_shard: tuple[int, ...] | None = None  # None: whatever remains
    axis_order: tuple[AxisOrder, ...] = (AxisOrder.PIPELINE_OUTERMOST,)
    pod_devices: int = 1  # below one set of leaf switches: for which shapes the order of ranks matters
    domain: int = 1  # devices joined by the scale-up link
    stored_activations: tuple[tuple[str, ...] | None, ...] = (None,)  # the first, the others to save memory
    weight_cache: tuple[str | None, ...] = (None,)  # the same
    loss_chunk: int | str | None = None  # of all plans; None: as the run or the engine says
    grows_loss: bool = False  # the search chooses a larger chunk than the engine's own where memory leaves room
    splits: tuple[tuple[int, ...], ...] = ()  # uneven splits: layers of each stage
    usual_split: bool = True  # also equal stages, with the rest on the two ends
    max_stages: int | None = None  # of pipeline x virtual_pipeline; None: legality alone decides
    untried: tuple[str, ...] = ()

    def restrict(self, fixed: Mapping[str, Any]) -> Space:
        """The same space with some fields of `Plan` held at one value, tried or not before."""
        changes: dict[str, Any] = {}
        recompute = {k: v for k, v in fixed.items() if k.startswith("recompute") and v is not None}
        for name, value in fixed.items():
            if name == "layers_per_stage":
                splits = () if value is None else (value,)
                changes |= {"splits": splits, "usual_split": not splits}
            elif name in ("stored_activations", "weight_cache"):
                changes[name] = (value,)
            elif name == "loss_chunk":
                changes |= {"loss_chunk": value, "grows_loss": False}
            elif not name.startswith("recompute"):
                changes[name] = (_FIXED_TYPES.get(name, int)(value),)
        if fixed.get("schedule", Schedule.ONE_F_ONE_B) != Schedule.ONE_F_ONE_B and "pipeline" not in fixed:
            # Who names another schedule than the usual one asks for a pipeline: one stage would hide the answer.
            changes["pipeline"] = tuple(p for p in self.pipeline if p > 1) or self.pipeline
        if len(fixed.get("layers_per_stage") or ()) == 1:  # one stage with all layers is no pipeline
            changes |= {"pipeline": (1,), "virtual_pipeline": (1,), "splits": (), "usual_split": True}
        if {"pipeline", "virtual_pipeline", "layers_per_stage"} & set(fixed):
            changes["max_stages"] = None
        if recompute:
            changes["recompute"] = _restricted_recompute(self.recompute, fixed)
        return replace(self, **changes)


def _restricted_recompute(
    choices: tuple[RecomputeChoice, ...], fixed: Mapping[str, Any]
) -> tuple[RecomputeChoice, ...]:
    kind, modules, layers = (fixed.get(n) for n in ("recompute", "recompute_modules", "recompute_layers"))
    if modules:
        return (RecomputeChoice(kind=kind or Recompute.SELECTIVE, modules=tuple(modules)),)
    if layers is not None or (kind is Recompute.FULL and "recompute_layers" in fixed):
        return (RecomputeChoice(kind=Recompute.FULL, layers=layers),)
    # No modules leave every kind but the selective one.
    kept = tuple(c for c in choices if kind in (None, c.kind) and (modules is None or not c.modules))
    return kept or (RecomputeChoice(kind=kind or Recompute.NONE),)


def default_space(request: PlanRequest) -> Space:
    """Everything worth trying for `request`, its fixed fields applied."""
    model, cluster, facts = request.model, request.cluster, engine_facts(request.engine)
    devices = cluster.num_devices
    degrees = divisors(devices)
    domain = cluster.fabric.scale_up_domain
    heads, experts = model.attention.num_heads, model.experts
    tensor = tuple(t for t in degrees if t <= min(domain, heads))
    context = tuple(c for c in degrees if c == 1 or (c <= MAX_CONTEXT and c * MIN_CONTEXT_TOKENS <= request.seq_len))
    pipeline = tuple(p for p in degrees if p <= model.num_layers)
    space = Space(
        num_devices=devices,
        tensor=tensor,
        sequence_parallel=(False, True) if experts and facts.splits_no_experts else (True,),
        context=context,
        pipeline=pipeline,
        virtual_pipeline=tuple(range(1, model.num_layers + 1)),
        schedule=tuple(s for s in facts.schedules if SCHEDULE_RECORDS[s].dominated_by not in facts.schedules),
        expert=tuple(e for e in degrees if experts and experts.num_experts % e == 0) or (1,),
        expert_tensor=tensor if experts else (1,),
        sharding=facts.shardings,
        data_replicate=_replica_counts(devices, domain),
        micro_batch=_micro_batches(request),
        recompute=_recompute_choices(request, facts),
        max_stages=model.num_layers + 2,  # a stage without layers holds the embedding or the head
        splits=lighter_ends(request) if facts.uneven_layers else (),
        axis_order=facts.axis_orders,
        pod_devices=cluster.fabric.nodes_per_pod * cluster.devices_per_node,
        domain=domain,
        stored_activations=_stored_sets(request, facts),
        weight_cache=_weight_caches(request, facts),
        grows_loss=_grows_loss(request, facts),
        untried=_untried(domain, facts),
    )
    _check_layers(request)
    return space.restrict(request.fixed)


def _check_layers(request: PlanRequest) -> None:
    """Raises InputError if a fixed split does not hold the model's layers, or has another number of stages."""
    layers: Any = request.fixed.get("layers_per_stage")
    if layers is None:
        return
    total, num_layers = sum(layers), request.model.num_layers
    if total != num_layers:
        times, left = divmod(num_layers, total)
        raise InputError(
            f"layers_per_stage must add up to the {num_layers} layers of {request.model.name}",
            got=total,
            hint=f"{total}x{times} are {times} stages of {total} layers" if len(layers) == 1 and not left else None,
        )
    schedule: Any = request.fixed.get("schedule", Schedule.ONE_F_ONE_B)
    if len(layers) == 1 and not SCHEDULE_RECORDS[schedule].runs_on_one_rank:
        raise InputError("one stage with all layers has no pipeline schedule", got=f"schedule={schedule.value}")
    ranks: Any = request.fixed.get("pipeline", 1)
    stages = ranks * request.fixed.get("virtual_pipeline", 1)
    if len(layers) % stages or ({"pipeline", "virtual_pipeline"} <= set(request.fixed) and len(layers) != stages):
        raise InputError(
            "layers_per_stage must have a number for each stage, pipeline x virtual_pipeline of them",
            got=f"{len(layers)} with "
            + ", ".join(f"{n}={request.fixed[n]}" for n in ("pipeline", "virtual_pipeline") if n in request.fixed),
        )


def _replica_counts(devices: int, domain: int) -> tuple[int, ...]:
    """1 is plain sharding; more makes hybrid sharding (HSDP)."""
    if devices <= MAX_SMALL_WORLD:
        return divisors(devices)
    wanted = {4**k for k in range(9)} | {devices // domain}
    return tuple(r for r in divisors(devices) if r in wanted)


def _micro_batches(request: PlanRequest) -> tuple[int, ...]:
    limit = max(4, MAX_MICRO_BATCH_TOKENS // request.seq_len)
    return tuple(b for b in divisors(request.batch_of_part) if b <= limit and b & (b - 1) == 0)


def _recompute_choices(request: PlanRequest, facts: EngineFacts) -> tuple[RecomputeChoice, ...]:
    model = request.model
    found: list[RecomputeChoice] = []
    if Recompute.NONE in facts.recomputes:
        found.append(RecomputeChoice())
    if Recompute.SELECTIVE in facts.recomputes:
        sets = selective_sets(
            facts,
            is_moe=model.experts is not None,
            is_mla=model.attention.kind is AttentionKind.MLA,
            has_shared=bool(model.experts and model.experts.shared_hidden),
        )
        found += [RecomputeChoice(kind=Recompute.SELECTIVE, modules=s) for s in sets]
    if Recompute.FULL in facts.recomputes:
        if facts.partial_full:
            counts = [2**k for k in range(model.num_layers.bit_length()) if 2**k < model.num_layers]
            found += [RecomputeChoice(kind=Recompute.FULL, layers=n) for n in counts]
        found.append(RecomputeChoice(kind=Recompute.FULL))
    return tuple(found)


def _stored_sets(request: PlanRequest, facts: EngineFacts) -> tuple[tuple[str, ...] | None, ...]:
    """Sets of modules to try: as the run says, then those stored in 8 bits where the run file leaves them open."""
    modules = facts.stored_modules if request.kernels.is_storage_open else ()
    sets = [s for count in range(1, len(modules) + 1) for s in combinations(modules, count)]
    return (None, *sets)


def _weight_caches(request: PlanRequest, facts: EngineFacts) -> tuple[str | None, ...]:
    """Caches to try: as the run says, then none where the run file leaves it open and there are 8-bit weights."""
    is_open = request.kernels.weight_cache == "auto" and request.precision.linear_input_bytes < 2
    return (None, "off") if is_open and "off" in facts.weight_caches else (None,)


def _grows_loss(request: PlanRequest, facts: EngineFacts) -> bool:
    """True if larger chunks of the loss are a choice: fewer chunks move the sum of the head's gradient less."""
    is_open = facts.loss_chunks and request.kernels.loss_chunk == "auto" and request.lora is None
    return is_open and bool(request.system_facts.fused.loss)


def _untried(domain: int, facts: EngineFacts) -> tuple[str, ...]:
    notes = [
        f"tensor parallelism wider than the scale-up domain of {domain} devices: its collectives are exposed",
        "tensor parallelism without sequence parallelism: it sends as many bytes and keeps more activations",
        f"context parallelism below {MIN_CONTEXT_TOKENS} tokens per rank or above {MAX_CONTEXT} ranks",
        f"micro-batches that are no power of two or exceed {MAX_MICRO_BATCH_TOKENS} tokens",
        f"above {MAX_SMALL_WORLD} devices, replica counts other than powers of four and one per domain",
        "layers: other splits than equal stages, lighter ends and, without virtual stages, the most balanced one",
    ]
    if facts.offloads_optimizer:
        notes.append("offloaded optimizer states: tried where nothing fits without them; `offload` fixes them")
    for schedule in facts.schedules:
        better = SCHEDULE_RECORDS[schedule].dominated_by
        if better is not None and better in facts.schedules:
            notes.append(
                f"the {schedule.value} schedule: {better.value} has the same bubble and keeps fewer activations"
            )
    return tuple(notes)


def divisors(n: int) -> tuple[int, ...]:
    """All divisors, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return tuple(small + [n // d for d in reversed(small) if d * d != n])


def shapes(space: Space) -> PlanTable:
    """All shapes whose degrees multiply out: data width in `data_shard`, choices at their defaults."""
    t, sp, c, p = _cross(space.tensor, space.sequence_parallel, space.context, space.pipeline)
    # Without tensor parallelism there is no sequence to split: one row stands for both.
    whole = (space.num_devices % (t * c * p) == 0) & ((t > 1) | (sp == max(space.sequence_parallel)))
    t, sp, c, p = t[whole], sp[whole], c[whole], p[whole]
    pipelines = _pipelines(space)
    left, right = _join(p, pipelines.ranks)
    t, sp, c, p = t[left], sp[left], c[left], p[left]
    v, s, layers = pipelines.chunks[right], pipelines.schedule[right], pipelines.layers[right]
    e, z = _cross(space.expert, space.expert_tensor)
    row, pair = _cross(np.arange(len(t)), np.arange(len(e)))
    data = space.num_devices // (t * c * p)
    folds = ((t * c * data)[row] % (e * z)[pair]) == 0
    row, pair = row[folds], pair[folds]
    one, zero = np.ones(len(row), dtype=np.int64), np.zeros(len(row), dtype=np.int64)
    table = PlanTable(
        tensor=t[row],
        sequence_parallel=sp[row],
        context=c[row],
        pipeline=p[row],
        virtual_pipeline=v[row],
        schedule=s[row],
        expert=e[pair],
        expert_tensor=z[pair],
        data_shard=data[row],
        data_replicate=one,
        sharding=zero,
        micro_batch=one,
        recompute=zero,
        recompute_mask=zero,
        recompute_layers=zero - 1,
        offload_optimizer=zero,
        first_layers=layers[row, 0],
        middle_layers=layers[row, 1],
        last_layers=layers[row, 2],
        fewest_layers=layers[row, 3],
        data_outermost=zero,
        stored_mask=zero + stored_column(space.stored_activations[0]),
        weight_cache=zero + cache_column(space.weight_cache[0]),
        loss_chunk=zero + chunk_column(space.loss_chunk),
    )
    return _ordered(table, space)


def _ordered(table: PlanTable, space: Space) -> PlanTable:
    """The shapes of `table` in every order of ranks that costs something else.

    Both orders are one without a pipeline or without data parallelism, and where all devices hang on the same leaves
    and tensor and context ranks fill a domain. Experts on other ranks than these two have the usual order only.
    """
    if AxisOrder.DATA_OUTERMOST not in space.axis_order:
        return table
    inner, devices = table.tensor * table.context, space.num_devices
    differs = (table.pipeline > 1) & (table.data > 1)
    differs &= (inner < space.domain) | (devices > space.pod_devices)
    differs &= (table.expert * table.expert_tensor == inner) | (space.expert == space.expert_tensor == (1,))
    if space.axis_order == (AxisOrder.DATA_OUTERMOST,):
        return replace(table, data_outermost=np.ones_like(table.tensor))
    other = table.take(np.flatnonzero(differs))
    other = replace(other, data_outermost=np.ones_like(other.tensor))
    names = [f.name for f in fields(PlanTable)]
    return PlanTable(**{n: np.concatenate([getattr(table, n), getattr(other, n)]) for n in names})


@dataclass(frozen=True, kw_only=True)
class _Pipelines:
    """All pipelines of a space in order of `ranks`."""

    ranks: IntArray
    chunks: IntArray
    schedule: IntArray  # index into SCHEDULES
    layers: IntArray  # [n, 4], of the first, the fullest middle and the last rank, and of the least stage; -1: usual


def _pipelines(space: Space) -> _Pipelines:
    # A pipeline of one stage has no schedule and no virtual stages: one row stands for all of them.
    schedules = [SCHEDULES.index(x) for x in space.schedule]
    ranks, v, s = _cross(space.pipeline, space.virtual_pipeline, schedules)
    first_of_all = (v == min(space.virtual_pipeline)) & (s == min(schedules))
    real = np.where(ranks > 1, chunks_allowed(v, s), first_of_all)
    if space.max_stages is not None:
        real &= ranks * v <= space.max_stages
    ranks, v, s = ranks[real], v[real], s[real]
    index = np.arange(len(ranks)) if space.usual_split else np.empty(0, dtype=np.int64)
    layers = [np.full((len(index), 4), -1)]
    for split in space.splits:
        found = np.flatnonzero((ranks * v == len(split)) & (ranks > 1))
        if space.usual_split and len(set(split[1:-1])) > 1:  # not asked for by name
            found = found[v[found] == 1]
        shapes_found = [
            PipelineShape(schedule=SCHEDULES[s[i]], num_ranks=int(ranks[i]), num_chunks=int(v[i]), num_micro_batches=1)
            for i in found
        ]
        index = np.concatenate([index, found])
        layers.append(
            np.array([(*rank_layers(shape, split), min(split)) for shape in shapes_found], dtype=np.int64).reshape(
                -1, 4
            )
        )
    columns = np.concatenate(layers)
    # Splits with the same layers there cost the same and are as legal: the first of them stands for all.
    different = np.sort(np.unique(np.column_stack([index, columns]), axis=0, return_index=True)[1])
    index, columns = index[different], columns[different]
    order = np.argsort(ranks[index], kind="stable")
    index, columns = index[order], columns[order]
    return _Pipelines(ranks=ranks[index], chunks=v[index], schedule=s[index], layers=columns)


@dataclass(frozen=True, kw_only=True)
class PlanChoices:
    """All choices of a space, one row each."""

    sharding: IntArray
    data_replicate: IntArray
    micro_batch: IntArray
    recompute: IntArray
    recompute_mask: IntArray
    recompute_layers: IntArray
    offload_optimizer: IntArray

    def __len__(self) -> int:
        return len(self.sharding)

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> PlanChoices:
        return PlanChoices(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


def choices(space: Space) -> PlanChoices:
    """All choices. Replicas without sharding are plain data parallelism, so they are not told apart."""
    r = space.recompute
    sharding, replicas, micro, again, offload = _cross(
        space.sharding, space.data_replicate, space.micro_batch, range(len(r)),
        [int(o is Offload.OPTIMIZER) for o in space.offload],
    )  # fmt: skip
    distinct = (sharding > Sharding.NONE) | (replicas == min(space.data_replicate))
    sharding, replicas, micro, again, offload = (x[distinct] for x in (sharding, replicas, micro, again, offload))
    column = lambda values: np.array(values, dtype=np.int64)[again]  # noqa: E731
    return PlanChoices(
        sharding=sharding,
        data_replicate=replicas,
        micro_batch=micro,
        recompute=column([RECOMPUTES.index(c.kind) for c in r]),
        recompute_mask=column([c.mask for c in r]),
        recompute_layers=column([-1 if c.layers is None else c.layers for c in r]),
        offload_optimizer=offload,
    )


def combine(shape_rows: PlanTable, choice_rows: PlanChoices) -> PlanTable:
    """Row i of one with row i of the other; where replicas do not divide the data width, data_shard is 0."""
    replicas = choice_rows.data_replicate
    data = shape_rows.data_shard
    changes = {f.name: getattr(choice_rows, f.name) for f in fields(choice_rows)}
    return replace(shape_rows, **changes, data_shard=np.where(data % replicas == 0, data // replicas, 0))


def enumerate_plans(space: Space) -> PlanTable:
    """Every candidate of `space` as one table: for small worlds and as the oracle of `search`.

    Rows are structurally whole (degrees multiply to the devices, experts fold); `legal_mask` does the rest.
    """
    shape_table, choice_table = shapes(space), choices(space)
    row, choice = _cross(np.arange(num_rows(shape_table)), np.arange(len(choice_table)))
    plan = combine(shape_table.take(row), choice_table.take(choice))
    keep = is_whole(plan, space)
    return plan.take(np.flatnonzero(keep))


def is_whole(plan: PlanTable, space: Space) -> NDArray[np.bool_]:
    """Replicas divide the data width, experts fold inside one replica, and a fixed data_shard is met."""
    inner = plan.tensor * plan.context * plan.data_shard
    keep = np.asarray((plan.data_shard > 0) & (inner % (plan.expert * plan.expert_tensor) == 0))
    return keep if space.data_shard is None else keep & np.isin(plan.data_shard, space.data_shard)


def plan_table(plans: Sequence[Plan]) -> PlanTable:
    """A row for each plan.

    >>> num_rows(plan_table([Plan(), Plan(tensor=2)]))
    2
    """
    rows = [plan_row(plan) for plan in plans]
    return PlanTable(**{f.name: np.array([getattr(r, f.name) for r in rows]) for f in fields(PlanTable)})


def num_rows(plan: PlanTable) -> int:
    """Rows of a table of arrays."""
    return len(np.asarray(plan.tensor))


def stacked(tables: Sequence[PlanTable]) -> PlanTable:
    """The rows of several tables, one after the other."""
    names = [f.name for f in fields(PlanTable)]
    return PlanTable(**{n: np.concatenate([getattr(table, n) for table in tables]) for n in names})


def _cross(*axes: Iterable[Any]) -> list[IntArray]:
    """All combinations, the last axis running fastest."""
    columns: Sequence[IntArray] = [
        np.asarray(list(a) if not isinstance(a, np.ndarray) else a).astype(np.int64) for a in axes
    ]
    return [grid.ravel() for grid in np.meshgrid(*columns, indexing="ij")]


def _join(left: IntArray, right: IntArray) -> tuple[IntArray, IntArray]:
    """Pairs of indices with equal keys; `right` is ascending."""
    first, last = np.searchsorted(right, left, "left"), np.searchsorted(right, left, "right")
    count = last - first
    rows = np.repeat(np.arange(len(left)), count)
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return rows, np.repeat(first, count) + within


# --- uneven splits of the layers over pipeline stages that are worth trying: lighter ends ---

# The last stage also holds the head, its loss and modules of multi-token prediction, and leading dense layers of a
# mixture of experts weigh less than its others. With equal stages the heaviest one sets the pace of all. For each
# number of stages the splits are tried whose heaviest stage is lighter than with the usual one, where that exists.


HEAD_RATIOS = (1.0, 0.6)
"""Tried ratios of the head's seconds per FLOP to a layer's: the head is one large GEMM in 16 bits, while
layers also have attention, element-wise work and communication."""


LEAST_GAIN = 0.99
"""Largest ratio of the heaviest stage to the usual split's heaviest up to which an uneven split is tried."""

LEAST_BALANCE = 0.9
"""Mean stage over the heaviest from which a split is tried: below, other numbers of stages are faster."""


def lighter_ends(request: PlanRequest) -> tuple[tuple[int, ...], ...]:
    """Splits of `request`'s layers with lighter ends, for all numbers of stages up to the number of layers."""
    weights, end = layer_weights(request)
    return _lighter_ends(tuple(weights), end)


@lru_cache(maxsize=32)
def _lighter_ends(weights: tuple[float, ...], end: float) -> tuple[tuple[int, ...], ...]:
    """The same by the weights of layers and of the end: searches with other software ask again."""
    num_layers, found = len(weights), []
    for stages in range(2, num_layers + 1):
        for ratio in HEAD_RATIOS:
            fullest = -(-num_layers // stages) * min(weights)
            if sum(weights) + ratio * end < LEAST_BALANCE * stages * fullest:
                continue  # one stage has that many layers, whatever the split
            split = balanced_layers(weights, stages, end=ratio * end)
            heaviest = _heaviest(split, weights, ratio * end)
            if sum(weights) + ratio * end < LEAST_BALANCE * stages * heaviest:
                continue
            usual = layers_per_stage(num_layers, stages)
            if not is_usual(num_layers, stages) or heaviest < LEAST_GAIN * _heaviest(usual, weights, ratio * end):
                found.append(split)
    return tuple(dict.fromkeys(found))


def is_usual(num_layers: int, num_stages: int) -> bool:
    """True if equal stages leave no less than nothing for the two ends."""
    return num_layers - (num_stages - 2) * -(-num_layers // num_stages) >= 0


def layer_weights(request: PlanRequest) -> tuple[list[float], float]:
    """FLOPs per token of every layer, and of what the last stage holds besides; both against the heaviest layer."""
    table, seq_len = request.model_table, request.seq_len
    num_dense, num_moe = int(table.num_dense_layers), int(table.num_moe_layers)
    dense, moe = (_layer_flops(table, seq_len, is_moe=is_moe) for is_moe in (False, True))
    heaviest = max(moe if num_moe else 0.0, dense if num_dense else 0.0)
    module = _layer_flops(prediction_module(table), seq_len, is_moe=num_moe > 0)
    head = float(table.vocab * table.hidden)
    end = head + float(table.num_mtp_layers) * (module + float(count_parameters(table).mtp_projection) + head)
    return [weight / heaviest for weight in [dense] * num_dense + [moe] * num_moe], end / heaviest


def _layer_flops(table: ModelTable, seq_len: int, *, is_moe: bool) -> float:
    """Forward multiply-adds per token of one layer, or of a hybrid's mean layer."""
    p = count_parameters(table)
    core = table.attention_share * table.query_heads * (table.qk_dim + table.v_dim) * keys_seen(seq_len)
    if has_sparse_attention(table):
        without = replace(table, num_mtp_layers=0)
        core = attention_core_flops_per_token(without, seq_len=seq_len) / (2 * table.num_layers)
        core = core + index_score_flops(table, scored_keys(table, seq_len)) / 2
    experts = table.moe_share * table.top_k * p.expert
    ffn = p.shared_layer + p.router_layer + experts if is_moe else p.dense_ffn_layer
    return float(p.attention_layer + ffn + core)


def _heaviest(split: tuple[int, ...], weights: Sequence[float], end: float) -> float:
    sums = np.add.reduceat(np.append(weights, 0.0), np.append(0, np.cumsum(split)[:-1])) * (np.array(split) > 0)
    sums[-1] += end
    return float(sums.max())
