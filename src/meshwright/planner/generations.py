"""Plans on clusters of two generations whose pipeline stages lie on one part each, with layers in proportion to speed.

ranks    tensor, context, data, pipeline, innermost first: the devices of a stage are neighbours, and the parts
         follow each other in the order of the cluster's name
stage    seconds of a layer on its own part; `layers_by_speed` evens them out
step     the event graph of these stages, then the longest gradient reduction and optimizer of any part
links    tensor, context, expert and data ranks of a stage are inside a part and use its links; the hop from one
         part to the next takes as long as the slower one of both
memory   each rank against the memory of its own part
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.arrays import FloatArray
from meshwright.cost.memory import MemoryTable
from meshwright.cost.memory.peak import rank_memory
from meshwright.cost.memory.states import RankLayers
from meshwright.cost.pipeline.schedules import SCHEDULE_RECORDS, Placement, shape_of
from meshwright.cost.pipeline.simulate import StageTimes, Timeline, simulate
from meshwright.cost.rates import system_rates
from meshwright.cost.stages import layers_per_stage
from meshwright.cost.step import StepTable, estimate_steps
from meshwright.cost.tables import plan_row
from meshwright.planner.finalists import (
    MAX_OPERATIONS,
    OUTSIDE_PIPELINE,
    GraphScale,
    graph_scale,
    stage_times,
)
from meshwright.planner.request import PlanRequest
from meshwright.specs.hardware import Cluster
from meshwright.specs.memory_budget import MemoryBudget
from meshwright.specs.plan import AxisOrder, Plan


@dataclass(frozen=True, kw_only=True)
class PartShare:
    """The stages of one part of the cluster."""

    part: Cluster
    ranks: tuple[int, ...]  # of the pipeline
    layers: tuple[int, ...]  # of each rank
    stage_s: float  # of its longest stage, forward and backward of a micro-batch
    memory: MemoryTable  # of its fullest rank
    budget: MemoryBudget

    @property
    def reserved_bytes(self) -> float:
        return _number(self.memory.reserved_bytes)


@dataclass(frozen=True, kw_only=True)
class MixedStep:
    """One step of a plan whose stages have the speed and the memory of their own parts."""

    step_s: float
    steps: StepTable  # of the part with the longest stage: components sum to the step of the whole cluster
    timeline: Timeline
    shares: tuple[PartShare, ...]

    @property
    def fits(self) -> bool:
        return all(share.budget.fits(share.reserved_bytes) for share in self.shares)

    @property
    def fullest(self) -> PartShare:
        """The part whose memory is used most."""
        return max(self.shares, key=lambda share: share.reserved_bytes / share.budget.usable_bytes)


def part_of_stage(cluster: Cluster, plan: Plan) -> tuple[int, ...]:
    """The part of each stage; () unless the plan has a stage for each pipeline rank, none on two parts.

    >>> from meshwright import catalog
    >>> joint = catalog.joint_cluster("h100-8x1+h200-8x3")
    >>> part_of_stage(joint, Plan(pipeline=4, data_shard=8)), part_of_stage(joint, Plan(pipeline=2, data_shard=16))
    ((0, 1, 1, 1), ())
    """
    is_loop = SCHEDULE_RECORDS[plan.schedule].placement is Placement.LOOP
    is_plain = plan.virtual_pipeline == 1 and plan.axis_order is AxisOrder.PIPELINE_OUTERMOST and is_loop
    if not cluster.parts or plan.pipeline == 1 or not is_plain or plan.num_devices != cluster.num_devices:
        return ()
    per_stage = cluster.num_devices // plan.pipeline
    if any(part.num_devices % per_stage for part in cluster.parts):
        return ()
    return tuple(i for i, part in enumerate(cluster.parts) for _ in range(part.num_devices // per_stage))


def mixed_step(request: PlanRequest, plan: Plan) -> MixedStep | None:
    """Cost `plan` with each stage on its own part; None where `part_of_stage` has none, or the graph is too large."""
    parts = part_of_stage(request.cluster, plan)
    if not parts:
        return None
    num_micro = plan.num_micro_batches(request.global_batch)
    if 3 * plan.pipeline * num_micro > MAX_OPERATIONS:
        return None
    all_steps = [_steps_on(request, part, plan) for part in request.cluster.parts]
    scales = [graph_scale(steps) for steps in all_steps]
    shape, stages = shape_of(plan, num_micro_batches=num_micro), np.array(parts)
    times = _own_times(
        [stage_times(shape, plan.layers_per_stage, steps.stages) for steps in all_steps], scales, stages
    )
    timeline = simulate(shape, times)
    total = _total_s(times)
    longest = int(stages[int(np.argmax(total))])
    shares = [_share(request, plan, i, stages, total) for i in range(len(all_steps))]
    components = _components(all_steps, scales, longest=longest, busy_s=num_micro * float(total.max()))
    components["bubble"] = timeline.step_s - num_micro * float(total.max())
    before = sum(components.values())
    step_s = before * max(s.straggle for s in scales)
    components["stragglers"] = step_s - before
    return MixedStep(
        step_s=step_s,
        steps=replace(all_steps[longest], step_s=step_s, components_s=components),
        timeline=timeline,
        shares=tuple(shares),
    )


def _steps_on(request: PlanRequest, part: Cluster, plan: Plan) -> StepTable:
    """The step of `plan` if all devices were those of `part`."""
    alike = replace(part, num_nodes=request.cluster.num_nodes)
    rates = system_rates(
        alike, request.precision, request.stack,
        calibration=request.calibration, routes=request.kernels.routes,
    )  # fmt: skip
    return estimate_steps(
        model=request.model_table,
        batch=request.batch_table,
        plan=plan_row(plan),
        precision=request.precision_table,
        rates=rates,
    )


def _components(
    all_steps: Sequence[StepTable], scales: Sequence[GraphScale], *, longest: int, busy_s: float
) -> dict[str, float]:
    """Seconds of the longest stage by component, and those of the part that takes longest outside the pipeline."""
    after = max(range(len(scales)), key=lambda i: scales[i].outside_s)
    outside = {name: all_steps[after].components_s[name] for name in AFTER}
    inside = {k: v for k, v in all_steps[longest].components_s.items() if k not in OUTSIDE_PIPELINE}
    ratio = busy_s / scales[longest].in_pipeline_s
    return {name: _number(value) * ratio for name, value in inside.items()} | {
        name: _number(value) for name, value in outside.items()
    }


AFTER = tuple(name for name in OUTSIDE_PIPELINE if name not in ("bubble", "stragglers"))
"""Components of a step outside its pipeline that kernels and collectives take."""


def _own_times(times: Sequence[StageTimes], scales: Sequence[GraphScale], stages: np.ndarray) -> StageTimes:
    """Times of every stage on its own part. A hop to another part takes as long as on the slower one."""

    def own(name: str) -> FloatArray:
        columns = [np.asarray(getattr(t, name)) * s.factor for t, s in zip(times, scales, strict=True)]
        return np.stack([np.broadcast_to(c, stages.shape) for c in columns])[stages, np.arange(len(stages))]

    hops = np.array([_number(t.transfer_s) * s.factor for t, s in zip(times, scales, strict=True)])
    after = np.append(stages[1:], stages[-1])
    return replace(
        times[0],
        forward_s=own("forward_s"),
        backward_input_s=own("backward_input_s"),
        backward_weight_s=own("backward_weight_s"),
        transfer_s=np.maximum(hops[stages], hops[after]),
        pair_saving_s=0.0,
    )


def _total_s(times: StageTimes) -> FloatArray:
    """Forward and backward seconds of a micro-batch on each stage."""
    parts = (times.forward_s, times.backward_input_s, times.backward_weight_s)
    return np.sum([np.asarray(part, dtype=np.float64) for part in parts], axis=0)


def _share(request: PlanRequest, plan: Plan, index: int, stages: np.ndarray, total: FloatArray) -> PartShare:
    part, ranks = request.cluster.parts[index], np.flatnonzero(stages == index)
    counts = np.array(plan.layers_per_stage or layers_per_stage(request.model.num_layers, plan.pipeline))
    memories = [_rank_memory(request, plan, counts, int(rank)) for rank in ranks]
    return PartShare(
        part=part,
        ranks=tuple(ranks.tolist()),
        layers=tuple(counts[ranks].tolist()),
        stage_s=float(np.max(total[ranks])),
        memory=max(memories, key=lambda memory: _number(memory.reserved_bytes)),
        budget=MemoryBudget(capacity_bytes=part.accelerator.memory_bytes, ratio=request.usable_memory_ratio),
    )


def _rank_memory(request: PlanRequest, plan: Plan, counts: np.ndarray, rank: int) -> MemoryTable:
    model, before = request.model_table, int(counts[:rank].sum())
    dense = int(np.clip(model.num_dense_layers - before, 0, counts[rank]))
    return rank_memory(
        model=model,
        batch=request.batch_table,
        plan=plan_row(plan),
        precision=request.precision_table,
        constants=request.memory_constants,
        layers=RankLayers(
            dense=dense,
            moe=counts[rank] - dense,
            embedding=int(rank == 0),
            head=int(rank == plan.pipeline - 1),
        ),
        rank=rank,
    )


def layers_by_speed(request: PlanRequest, plan: Plan) -> tuple[int, ...]:
    """Layers of each stage with which the longest stage is shortest: layer by layer to the stage that is done first.

    Every layer takes the mean time of the model's layers; the ends weigh what they take on their own part.
    """
    stages = part_of_stage(request.cluster, plan)
    layer_s, ends_s = zip(
        *(_layer_and_ends_s(request, part, plan) for part in request.cluster.parts), strict=True
    )
    done = np.zeros(len(stages))
    done[0], done[-1] = ends_s[stages[0]][0], done[-1] + ends_s[stages[-1]][1]
    per_layer = np.array([layer_s[part] for part in stages])
    counts = np.ones(len(stages), dtype=int)
    done = done + per_layer
    for _ in range(request.model.num_layers - len(stages)):
        best = int(np.argmin(done + per_layer))
        counts[best], done[best] = counts[best] + 1, done[best] + per_layer[best]
    return tuple(counts.tolist())


def _layer_and_ends_s(request: PlanRequest, part: Cluster, plan: Plan) -> tuple[float, tuple[float, float]]:
    """Seconds of a mean layer, and of the ends of the model, forward and backward of a micro-batch on `part`."""
    steps = _steps_on(request, part, plan)
    shape = shape_of(plan, num_micro_batches=plan.num_micro_batches(request.global_batch))
    counts = layers_per_stage(request.model.num_layers, plan.pipeline)
    times, factor = stage_times(shape, counts, steps.stages), graph_scale(steps).factor
    total = factor * _total_s(times)
    first, last = (factor * _ends_s(steps, name) for name in ("start", "end"))
    return float(total.sum() - first - last) / request.model.num_layers, (first, last)


def _ends_s(steps: StepTable, name: str) -> float:
    times = getattr(steps.stages, name)
    return sum(_number(getattr(times, part)) for part in ("forward_s", "input_s", "weight_s"))


def _number(x: object) -> float:
    return float(np.ravel(np.asarray(x))[0])
