"""Memory of the fullest pipeline rank during one step: what lives when, and what lives at the peak.

Activations of a micro-batch come with its forward pass and go with its backward pass, in proportion to the time that
has passed of it. Logits and their gradients are there while the head runs backward, activations that are computed
again and gradients of one layer while layers run backward. Weights, optimizer states and whatever lies beside the
allocator stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.answers.quantities import seconds
from meshwright.answers.stages import step_timeline
from meshwright.arrays import FloatArray, scalar
from meshwright.cost.memory.peak import MomentsTable
from meshwright.cost.pipeline.orders import OpKind
from meshwright.cost.pipeline.schedules import SCHEDULE_RECORDS, Placement
from meshwright.cost.pipeline.simulate import Timeline
from meshwright.planner.estimate import PlanEstimate
from meshwright.planner.finalists import stage_times
from meshwright.planner.rank_memory import memory_of_ranks, moments_of_rank
from meshwright.planner.request import PlanRequest
from meshwright.specs.plan import Plan

KEPT_CHANGE = {OpKind.FORWARD: 1, OpKind.BACKWARD_INPUT: 0, OpKind.BACKWARD_WEIGHT: -1, OpKind.BACKWARD: -1}
"""Change of the micro-batches in flight. A separate weight gradient keeps its input until it is computed."""


@dataclass(frozen=True, kw_only=True)
class PeakMoment:
    """The moment of a step at which a rank holds most."""

    at_s: float  # from the beginning of the step
    is_loss: bool  # while the head runs backward
    micro_batch: int  # whose backward pass runs
    in_flight: float  # micro-batches whose activations are kept
    parts_bytes: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class MemoryOverTime:
    """Bytes of one pipeline rank by part at `times_s`, straight lines between them. A jump has its time twice."""

    rank: int
    times_s: FloatArray  # [num_points], ascending, from the first pass to the last
    parts_bytes: dict[str, FloatArray]  # each [num_points]
    peak: PeakMoment

    def summary(self) -> str:
        """Return a sentence about the moment at which the rank holds most."""
        peak = self.peak
        doing = f"{'computes the loss' if peak.is_loss else 'runs the backward pass'} of micro-batch {peak.micro_batch}"
        kept = f"activations of {peak.in_flight:g} {'micro-batch' if peak.in_flight == 1 else 'micro-batches'}"
        return f"Most is in memory {seconds(peak.at_s)} into the step: rank {self.rank} keeps {kept} and {doing}."


def memory_over_time(request: PlanRequest, estimate: PlanEstimate) -> MemoryOverTime | None:
    """Return the memory of the fullest rank during one step; None if the pipeline is too long to simulate."""
    timeline, plan = step_timeline(estimate), estimate.plan
    if timeline is None:
        return None
    fullest = max(memory_of_ranks(request, plan), key=lambda row: row.reserved_bytes)
    moments = moments_of_rank(request, plan, fullest.rank)
    points = _points(timeline, fullest.rank, moments, plan, head_ratio=_head_ratio(timeline, estimate))
    constant = {n: np.full(len(points.times_s), size) for n, size in fullest.parts_bytes.items()}
    parts = constant | {"activations": points.activations, "workspace": points.workspace + moments.fixed_bytes}
    at = int(np.argmax(points.activations + points.workspace))
    return MemoryOverTime(
        rank=fullest.rank,
        times_s=points.times_s,
        parts_bytes=parts,
        peak=PeakMoment(
            at_s=float(points.times_s[at]),
            is_loss=bool(points.is_loss[at]),
            micro_batch=int(points.micro_batch[at]),
            in_flight=float(points.in_flight[at]),
            parts_bytes={name: float(column[at]) for name, column in parts.items()},
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Points:
    """Columns, one row a moment."""

    times_s: FloatArray
    in_flight: FloatArray
    activations: FloatArray
    workspace: FloatArray  # without what is always there
    micro_batch: FloatArray
    is_loss: FloatArray


def _points(timeline: Timeline, rank: int, moments: MomentsTable, plan: Plan, *, head_ratio: float) -> _Points:
    graph = timeline.graph
    order = range(graph.rank_bounds[rank], graph.rank_bounds[rank + 1])
    # A mirrored rank counts a micro-batch on one of its two stages, another one a micro-batch on all its chunks.
    is_mirrored = SCHEDULE_RECORDS[plan.schedule].placement is Placement.MIRRORED and plan.pipeline > 1
    share = 1.0 if is_mirrored else 1 / graph.shape.num_chunks
    per_flight = float(moments.kept_bytes) / max(float(moments.flights), share)
    live, layer, loss = float(moments.live_bytes), float(moments.layer_bytes), float(moments.loss_bytes)
    rows: list[tuple[float, float, float, float, int, bool]] = []
    flights = 0.0
    for op in order:
        kind, start, end = OpKind(graph.kind[op]), float(timeline.start_s[op]), float(timeline.end_s[op])
        after, micro = flights + KEPT_CHANGE[kind] * share, int(graph.micro_batch[op])
        rows.append((start, flights, 0.0, 0.0, micro, False))
        if kind is OpKind.FORWARD:
            rows.append((end, after, 0.0, 0.0, micro, False))
        else:
            begins, in_layers = start, layer
            if loss > 0 and kind is not OpKind.BACKWARD_WEIGHT and graph.stage[op] == graph.shape.num_stages - 1:
                begins += head_ratio * (end - start)
                in_layers = layer if moments.frees_loss else max(loss, layer)
                rows += [(start, flights, 0.0, loss, micro, True), (begins, flights, 0.0, loss, micro, True)]
            rows += [(begins, flights, live, in_layers, micro, False), (end, after, live, in_layers, micro, False)]
            rows.append((end, after, 0.0, 0.0, micro, False))
        flights = after
    times, in_flight, again, workspace, micro_batch, is_loss = np.array(rows, dtype=np.float64).T
    return _Points(
        times_s=np.maximum.accumulate(times),  # starts are differences, and round
        in_flight=in_flight,
        activations=in_flight * per_flight + again,
        workspace=workspace,
        micro_batch=micro_batch,
        is_loss=is_loss,
    )


def _head_ratio(timeline: Timeline, estimate: PlanEstimate) -> float:
    """Share of the last stage's backward pass in which the head runs."""
    stages = estimate.steps.stages
    head = scalar(stages.end.input_s) + scalar(stages.end.weight_s)
    if estimate.plan.pipeline == 1:
        whole = scalar(stages.first.input_s) + scalar(stages.first.weight_s)
    else:
        times = stage_times(timeline.graph.shape, estimate.plan.layers_per_stage, stages)
        whole = float(np.ravel(times.backward_input_s)[-1] + np.ravel(times.backward_weight_s)[-1])
    return min(1.0, head / whole) if whole > 0 else 0.0
