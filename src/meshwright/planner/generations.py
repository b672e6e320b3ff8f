"""Plans on clusters of two generations whose pipeline ranks lie on one part each, with layers in proportion to speed.

ranks    tensor, context, data, pipeline, innermost first: the devices of a pipeline rank are neighbours, and the
         parts follow each other in the order of the cluster's name. With virtual stages a rank holds several stages
stage    seconds of a layer on its own part; `layers_by_speed` evens out what the ranks take
step     the event graph of these stages, then the longest gradient reduction and optimizer of any part
links    tensor, context, expert and data ranks of a pipeline rank are inside a part and use its links; the hop from one
         part to the next takes as long as the slower one of both
memory   each rank against the memory of its own part
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import FloatArray, scalar
from meshwright.catalog.stacks import features_of
from meshwright.cost.memory import MemoryTable
from meshwright.cost.memory.peak import rank_memory
from meshwright.cost.memory.states import RankLayers
from meshwright.cost.pipeline.schedules import SCHEDULE_RECORDS, PipelineShape, Placement, schedule_shortfall, shape_of
from meshwright.cost.pipeline.simulate import StageTimes, Timeline, simulate
from meshwright.cost.rates import system_rates
from meshwright.cost.stages import layers_per_stage
from meshwright.cost.step import StepTable, estimate_steps
from meshwright.cost.tables import PlanTable, plan_row
from meshwright.planner.finalists import (
    MAX_OPERATIONS,
    OUTSIDE_PIPELINE,
    GraphScale,
    graph_scale,
    num_operations,
    stage_times,
)
from meshwright.planner.request import PlanRequest
from meshwright.specs.hardware import Cluster
from meshwright.specs.memory_budget import MemoryBudget
from meshwright.specs.plan import AxisOrder, Plan


@dataclass(frozen=True, kw_only=True)
class PartShare:
    """The pipeline ranks of one part of the cluster."""

    part: Cluster
    ranks: tuple[int, ...]
    layers: tuple[int, ...]  # of each rank, in all its stages
    rank_s: float  # of its longest rank, forward and backward of a micro-batch through all its stages
    memory: MemoryTable  # of its fullest rank
    budget: MemoryBudget

    @property
    def reserved_bytes(self) -> float:
        return scalar(self.memory.reserved_bytes)


@dataclass(frozen=True, kw_only=True)
class MixedStep:
    """One step of a plan whose pipeline ranks have the speed and the memory of their own parts."""

    step_s: float
    steps: StepTable  # of the part with the longest rank: components sum to the step of the whole cluster
    timeline: Timeline
    shares: tuple[PartShare, ...]

    @property
    def fits(self) -> bool:
        return all(share.budget.fits(share.reserved_bytes) for share in self.shares)

    @property
    def fullest(self) -> PartShare:
        """The part whose memory is used most."""
        return max(self.shares, key=lambda share: share.reserved_bytes / share.budget.usable_bytes)


def part_of_rank(cluster: Cluster, plan: Plan) -> tuple[int, ...]:
    """The part of each pipeline rank; () unless there are several and none lies on two parts.

    >>> from meshwright import catalog
    >>> joint = catalog.joint_cluster("h100-8x1+h200-8x3")
    >>> part_of_rank(joint, Plan(pipeline=4, data_shard=8)), part_of_rank(joint, Plan(pipeline=2, data_shard=16))
    ((0, 1, 1, 1), ())
    """
    is_mirrored = SCHEDULE_RECORDS[plan.schedule].placement is Placement.MIRRORED
    is_plain = plan.axis_order is AxisOrder.PIPELINE_OUTERMOST and not is_mirrored
    if not cluster.parts or plan.pipeline == 1 or not is_plain or plan.num_devices != cluster.num_devices:
        return ()
    per_rank = cluster.num_devices // plan.pipeline
    if any(part.num_devices % per_rank for part in cluster.parts):
        return ()
    return tuple(i for i, part in enumerate(cluster.parts) for _ in range(part.num_devices // per_rank))


def budget_of_rank(request: PlanRequest, plan: Plan, rank: int) -> MemoryBudget:
    """Memory of the devices of a pipeline rank; of the smallest part unless each rank lies on one part."""
    parts = part_of_rank(request.cluster, plan)
    return request.memory_budget_of(request.cluster.parts[parts[rank]]) if parts else request.memory_budget


def on_parts(request: PlanRequest, plan: Plan) -> bool:
    """True if each rank of `plan` lies on one part, its schedule is legal and its event graph is not too large."""
    if not part_of_rank(request.cluster, plan):
        return False
    shape = shape_of(plan, num_micro_batches=plan.num_micro_batches(request.global_batch))
    return num_operations(shape) <= MAX_OPERATIONS and schedule_shortfall(shape) is None


def mixed_step(request: PlanRequest, plan: Plan) -> MixedStep | None:
    """Cost `plan` with each rank on its own part; None unless it is `on_parts`."""
    if not on_parts(request, plan):
        return None
    return mixed_step_of(request, plan, [steps_on(request, part, plan_row(plan)) for part in request.cluster.parts])


def mixed_step_of(request: PlanRequest, plan: Plan, all_steps: Sequence[StepTable]) -> MixedStep:
    """As `mixed_step`, from `plan`'s step on a cluster of each part's devices alone."""
    num_micro = plan.num_micro_batches(request.global_batch)
    shape, parts = shape_of(plan, num_micro_batches=num_micro), part_of_rank(request.cluster, plan)
    scales = [graph_scale(steps) for steps in all_steps]
    times = _own_times(
        [stage_times(shape, plan.layers_per_stage, steps.stages) for steps in all_steps],
        scales,
        np.array(parts)[_rank_of_stage(shape)],
    )
    timeline = simulate(shape, times)
    total = _by_rank(shape, _total_s(times))
    longest = parts[int(np.argmax(total))]
    components = _components(all_steps, scales, longest=longest, busy_s=num_micro * float(total.max()))
    components["bubble"] = timeline.step_s - num_micro * float(total.max())
    before = sum(components.values())
    step_s = before * max(s.straggle for s in scales)
    components["stragglers"] = step_s - before
    return MixedStep(
        step_s=step_s,
        steps=replace(all_steps[longest], step_s=step_s, components_s=components),
        timeline=timeline,
        shares=tuple(_shares(request, plan, np.array(parts), total)),
    )


def _rank_of_stage(shape: PipelineShape) -> NDArray[np.intp]:
    """[num_stages], the rank that holds each stage."""
    held = [shape.stages_of(rank) for rank in range(shape.num_ranks)]
    found = np.empty(shape.num_stages, dtype=np.intp)
    found[np.concatenate(held)] = np.repeat(np.arange(shape.num_ranks), [len(stages) for stages in held])
    return found


def _by_rank(shape: PipelineShape, of_stages: NDArray[Any]) -> FloatArray:
    """Sums over the stages of each rank."""
    sums = np.bincount(_rank_of_stage(shape), weights=of_stages, minlength=shape.num_ranks)
    return np.asarray(sums, dtype=np.float64)


def steps_on(request: PlanRequest, part: Cluster, rows: PlanTable) -> StepTable:
    """The steps of plans on a cluster that has only the devices of `part`, under the settings of the whole cluster."""
    alike = replace(part, num_nodes=-(-request.num_devices // part.devices_per_node))
    stack = request.stack
    shared = features_of(stack, request.cluster.accelerator, precision=request.precision.name)
    shared = replace(shared, attention=None, attention_tile=None, fuses_attention_backward=None)  # as each device has
    rates = system_rates(
        alike, request.precision, replace(stack, features=stack.features.or_else(shared)),
        calibration=request.calibration, routes=request.kernels.routes,
    )  # fmt: skip
    return estimate_steps(
        model=request.model_table, batch=request.batch_table, plan=rows, precision=request.precision_table, rates=rates
    )


def _components(
    all_steps: Sequence[StepTable], scales: Sequence[GraphScale], *, longest: int, busy_s: float
) -> dict[str, float]:
    """Seconds by component of the longest rank, and of the part that takes longest outside the pipeline."""
    after = max(range(len(scales)), key=lambda i: scales[i].outside_s)
    outside = {name: all_steps[after].components_s[name] for name in AFTER}
    inside = {k: v for k, v in all_steps[longest].components_s.items() if k not in OUTSIDE_PIPELINE}
    ratio = busy_s / scales[longest].in_pipeline_s
    return {name: scalar(value) * ratio for name, value in inside.items()} | {
        name: scalar(value) for name, value in outside.items()
    }


AFTER = tuple(name for name in OUTSIDE_PIPELINE if name not in ("bubble", "stragglers"))
"""Components of a step outside its pipeline that kernels and collectives take."""


def _own_times(times: Sequence[StageTimes], scales: Sequence[GraphScale], stages: np.ndarray) -> StageTimes:
    """Times of every stage on its own part. A hop to another part takes as long as on the slower one."""

    def own(name: str) -> FloatArray:
        columns = [np.asarray(getattr(t, name)) * s.factor for t, s in zip(times, scales, strict=True)]
        return np.stack([np.broadcast_to(c, stages.shape) for c in columns])[stages, np.arange(len(stages))]

    hops = np.array([scalar(t.transfer_s) * s.factor for t, s in zip(times, scales, strict=True)])
    after = np.append(stages[1:], stages[-1])
    return replace(
        times[0],
        forward_s=own("forward_s"),
        backward_input_s=own("backward_input_s"),
        backward_weight_s=own("backward_weight_s"),
        transfer_s=np.maximum(hops[stages], hops[after]),
        pair_saving_s=own("pair_saving_s"),
    )


def _total_s(times: StageTimes) -> FloatArray:
    """Forward and backward seconds of a micro-batch on each stage."""
    parts = (times.forward_s, times.backward_input_s, times.backward_weight_s)
    return np.sum([np.asarray(part, dtype=np.float64) for part in parts], axis=0)


def _shares(request: PlanRequest, plan: Plan, parts: NDArray[np.intp], total: FloatArray) -> list[PartShare]:
    layers, ranks = layers_of_ranks(request, plan), np.arange(plan.pipeline)
    memory, _ = rank_memory(
        model=request.model_table,
        batch=request.batch_table,
        plan=plan_row(plan),
        precision=request.precision_table,
        constants=request.memory_constants,
        layers=layers,
        rank=ranks,
    )
    reserved, counts = np.asarray(memory.reserved_bytes), np.asarray(layers.total, dtype=int)
    found = []
    for index, part in enumerate(request.cluster.parts):
        own = np.flatnonzero(parts == index)
        found.append(
            PartShare(
                part=part,
                ranks=tuple(own.tolist()),
                layers=tuple(counts[own].tolist()),
                rank_s=float(np.max(total[own])),
                memory=memory.take(own[[int(np.argmax(reserved[own]))]]),
                budget=request.memory_budget_of(part),
            )
        )
    return found


def layers_of_ranks(request: PlanRequest, plan: Plan) -> RankLayers:
    """Layers and ends of the model on every pipeline rank, each [p]. Dense layers come before mixtures of experts."""
    model, shape = request.model, shape_of(plan)
    counts = np.array(plan.layers_per_stage or layers_per_stage(model.num_layers, shape.num_stages))
    before = np.cumsum(counts) - counts
    dense = np.clip(request.model_table.num_dense_layers - before, 0, counts)
    stages = np.arange(shape.num_stages)
    return RankLayers(
        dense=_by_rank(shape, dense),
        moe=_by_rank(shape, counts - dense),
        embedding=_by_rank(shape, stages == 0),
        head=_by_rank(shape, stages == stages[-1]),
    )


def layers_by_speed(request: PlanRequest, plan: Plan, all_steps: Sequence[StepTable]) -> tuple[int, ...]:
    """Layers of each stage with which the longest rank is shortest: layer by layer to the rank that is done first.

    Of its stages the shortest gets the layer. Every layer takes the mean time of the model's layers; the ends weigh
    what they take on their own part. `all_steps`: `plan`'s step on a cluster of each part's devices alone.
    """
    shape, parts = shape_of(plan), np.array(part_of_rank(request.cluster, plan))
    layer_s, ends_s = zip(*(_layer_and_ends_s(request, steps, plan) for steps in all_steps), strict=True)
    rank_of = _rank_of_stage(shape)
    per_layer = np.array(layer_s)[parts[rank_of]]
    stage_s = per_layer.copy()
    stage_s[0] += ends_s[parts[rank_of[0]]][0]
    stage_s[-1] += ends_s[parts[rank_of[-1]]][1]
    rank_s, counts = _by_rank(shape, stage_s), np.ones(shape.num_stages, dtype=int)
    rank_layer_s = np.array(layer_s)[parts]
    for _ in range(request.model.num_layers - shape.num_stages):
        rank = int(np.argmin(rank_s + rank_layer_s))
        stage = min(shape.stages_of(rank), key=lambda s: stage_s[s])
        counts[stage] += 1
        stage_s[stage] += per_layer[stage]
        rank_s[rank] += per_layer[stage]
    return tuple(counts.tolist())


def _layer_and_ends_s(request: PlanRequest, steps: StepTable, plan: Plan) -> tuple[float, tuple[float, float]]:
    """Seconds of a mean layer, and of the ends of the model, forward and backward of a micro-batch."""
    shape = shape_of(plan)
    counts = layers_per_stage(request.model.num_layers, shape.num_stages)
    times, factor = stage_times(shape, counts, steps.stages), graph_scale(steps).factor
    total = factor * _total_s(times)
    first, last = (factor * _ends_s(steps, name) for name in ("start", "end"))
    return float(total.sum() - first - last) / request.model.num_layers, (first, last)


def _ends_s(steps: StepTable, name: str) -> float:
    times = getattr(steps.stages, name)
    return sum(scalar(getattr(times, part)) for part in ("forward_s", "input_s", "weight_s"))
