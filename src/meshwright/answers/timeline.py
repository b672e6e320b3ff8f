"""The pipeline of one step, scaled to the estimated step, with what follows it.

The event graph runs on kernel times before calibrated factors; the timeline is scaled to the
estimated step; gradient reduction, optimizer and the other components follow it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.answers.components import label
from meshwright.answers.trace import Track, TrackSpan
from meshwright.cost.pipeline.schedules import PipelineShape
from meshwright.cost.pipeline.simulate import StageTimes, Timeline, simulate
from meshwright.cost.step import StepTable
from meshwright.planner.estimate import PlanEstimate
from meshwright.planner.finalists import MAX_OPERATIONS, OUTSIDE_PIPELINE
from meshwright.specs.plan import Schedule

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
