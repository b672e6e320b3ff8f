"""The pipeline rank by rank: layers, times, activations kept, waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.answers.text_table import TextTable
from meshwright.answers.timeline import step_timeline
from meshwright.arrays import scalar
from meshwright.cost.pipeline.closed_form import in_flight
from meshwright.cost.stages import split_layers
from meshwright.cost.tables import plan_row
from meshwright.planner.estimate import PlanEstimate
from meshwright.planner.rank_memory import RankMemory
from meshwright.planner.request import PlanRequest
from meshwright.units import gib


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
