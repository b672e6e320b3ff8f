"""The pipeline of one step, rank by rank: layers, times, activations kept, waiting; and its timeline.

The event graph runs on kernel times before calibrated factors; the timeline is scaled to the estimated step; gradient
reduction, optimizer and the other components follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.answers.components import label
from meshwright.answers.text_table import TextTable
from meshwright.answers.trace import Track, TrackSpan
from meshwright.arrays import scalar
from meshwright.cost.pipeline.closed_form import in_flight
from meshwright.cost.pipeline.schedules import PipelineShape
from meshwright.cost.pipeline.simulate import StageTimes, Timeline, simulate
from meshwright.cost.stages import split_layers
from meshwright.cost.step import StepTable
from meshwright.cost.tables import plan_row
from meshwright.planner.estimate import PlanEstimate
from meshwright.planner.finalists import MAX_OPERATIONS, OUTSIDE_PIPELINE
from meshwright.planner.rank_memory import RankMemory
from meshwright.planner.request import PlanRequest
from meshwright.specs.plan import Schedule
from meshwright.units import gib

AFTER_PIPELINE = tuple(name for name in OUTSIDE_PIPELINE if name != "bubble")


def step_timeline(estimate: PlanEstimate) -> Timeline | None:
    """The estimated pipeline, one rank when there is none; None when it is too long to be simulated."""
    timeline = estimate.timeline or _one_rank(estimate.steps)
    if timeline is None or timeline.step_s <= 0:
        return None
    factor = pipeline_s(estimate) / timeline.step_s
    return replace(
        timeline,
        start_s=timeline.start_s * factor,
        end_s=timeline.end_s * factor,
        step_s=timeline.step_s * factor,
        busy_s=timeline.busy_s * factor,
    )


def pipeline_s(estimate: PlanEstimate) -> float:
    """Seconds from the first forward pass to the last backward pass."""
    components = estimate.step.components_s
    return estimate.step.step.value - sum(components.get(name, 0.0) for name in AFTER_PIPELINE)


def after_pipeline(estimate: PlanEstimate) -> tuple[Track, ...]:
    """Components after the pipeline until the step ends, one track each."""
    now, tracks = pipeline_s(estimate), []
    for name in AFTER_PIPELINE:
        length = estimate.step.components_s.get(name, 0.0)
        if length > 0:
            tracks.append(
                Track(name=label(name), spans=(TrackSpan(name=label(name), start_s=now, end_s=now + length),))
            )
            now += length
    return tuple(tracks)


def _one_rank(steps: StepTable) -> Timeline | None:
    num_micro = round(float(np.ravel(steps.num_micro_batches)[0]))
    shape = PipelineShape(schedule=Schedule.ONE_F_ONE_B, num_ranks=1, num_micro_batches=num_micro)
    if 2 * num_micro > MAX_OPERATIONS or np.ravel(steps.stages.first.forward_s).size != 1:
        return None
    first = steps.stages.first
    times = (float(np.ravel(x)[0]) for x in (first.forward_s, first.input_s, first.weight_s))
    forward, inputs, weights = times
    return simulate(shape, StageTimes(forward_s=forward, backward_input_s=inputs, backward_weight_s=weights))


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One rank, or all middle ranks of a long pipeline, which differ only in the activations they keep."""

    name: str
    num_layers: float
    forward_s: float  # one micro-batch
    backward_s: float
    in_flight: float  # micro-batches whose activations the rank keeps at its peak
    waiting_ratio: float | None  # share of the pipeline's time; None when its timeline is too long


def stage_rows(request: PlanRequest, estimate: PlanEstimate) -> list[StageRow]:
    """First, middle and last rank; the middle one has the means of all ranks between."""
    plan, p = estimate.plan, estimate.plan.pipeline
    layers = split_layers(request.model_table, plan_row(plan))
    stages = estimate.steps.stages
    kinds = [("0", layers.first, stages.first, [0])]
    if p > 2:
        name = "1" if p == 3 else f"1 to {p - 2}"
        kinds.append((name, layers.middle, stages.middle, list(range(1, p - 1))))
    if p > 1:
        kinds.append((str(p - 1), layers.last, stages.last, [p - 1]))
    timeline = step_timeline(estimate)
    num_micro = plan.num_micro_batches(request.global_batch)
    rows = []
    for name, num_layers, times, ranks in kinds:
        kept = in_flight(plan.schedule, p, plan.virtual_pipeline, num_micro, np.array(ranks))
        waits = None
        if timeline is not None:
            waits = 1 - float(timeline.busy_s[ranks].mean()) / timeline.step_s
        rows.append(
            StageRow(
                name=name,
                num_layers=scalar(num_layers),
                forward_s=scalar(times.forward_s),
                backward_s=scalar(times.input_s) + scalar(times.weight_s),
                in_flight=float(np.max(kept)),
                waiting_ratio=waits,
            )
        )
    return rows


def rank_memory_table(ranks: Sequence[RankMemory]) -> TextTable:
    """Memory of a device of every pipeline rank, in GiB. States are gradients and those of the optimizer."""
    return TextTable(
        title="Memory of every pipeline rank",
        headings=("pipeline rank", "layers", "parameters", "states", "activations", "workspace", "total GiB"),
        rows=[
            (str(r.rank), f"{r.num_layers:g}", *(f"{gib(size):.1f}" for size in _columns(r.parts_bytes)),
             f"{gib(r.reserved_bytes):.1f}")
            for r in ranks
        ],
        caption="The total has what lies beside the allocator too.",
    )  # fmt: skip


def _columns(parts_bytes: Mapping[str, float]) -> tuple[float, ...]:
    states = parts_bytes["gradients"] + parts_bytes["optimizer"]
    return (parts_bytes["weights"], states, parts_bytes["activations"], parts_bytes["workspace"])
