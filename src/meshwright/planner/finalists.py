"""The step time of a finalist from its pipeline's event graph instead of the closed form.

The closed forms treat stages alike while the pipeline fills and drains; the graph takes each as it is. Only
the pipeline's part of the step is replaced, everything else stands as `cost.step` has it.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.layers import LayerTimes
from meshwright.cost.pipeline.schedules import PipelineShape, schedule_shortfall, shape_of
from meshwright.cost.pipeline.simulate import StageTimes, Timeline, simulate
from meshwright.cost.step import StepTable, mean_of_ranks, oversubscribed_s
from meshwright.specs.plan import Plan

MAX_OPERATIONS = 400_000
"""Larger graphs take seconds each; with that many micro-batches the closed form is good."""

PASSES = ("forward_s", "input_s", "weight_s")
OUTSIDE_PIPELINE = ("bubble", "data_parallel", "optimizer", "fixed", "stragglers")


def simulated_step_s(plan: Plan, steps: StepTable) -> float | None:
    """Seconds of one step of `plan`; None without a pipeline or when its graph is too large.

    `steps` holds the one row that `cost.step` computed for `plan`.
    """
    timeline = simulate_pipeline(plan, steps)
    if timeline is None:
        return None
    num_micro = round(_number(steps.num_micro_batches))
    totals = [_total(t) for t in (steps.stages.first, steps.stages.middle, steps.stages.last)]
    components = {name: _number(x) for name, x in steps.components_s.items()}
    in_pipeline = sum(x for name, x in components.items() if name not in OUTSIDE_PIPELINE)
    # The cost model scales kernel times by calibrated factors; the graph's times are scaled alike.
    cpu_oversubscription = _number(steps.cpu_oversubscription)
    work = _number(sum(mean_of_ranks(steps.stages, plan.pipeline, part) for part in PASSES))
    factor = in_pipeline / (num_micro * (work if cpu_oversubscription > 1 else max(totals)))
    pipeline_s = _number(oversubscribed_s(timeline.step_s * factor, in_pipeline, cpu_oversubscription))
    rest = _number(steps.step_s) - components["stragglers"]
    straggle = _number(steps.step_s) / rest
    return (rest - in_pipeline - components["bubble"] + pipeline_s) * straggle


def simulate_pipeline(plan: Plan, steps: StepTable) -> Timeline | None:
    """The event graph of one step's pipeline, before calibrated factors; None as in `simulated_step_s`."""
    num_micro = round(_number(steps.num_micro_batches))
    shape = shape_of(plan, num_micro_batches=num_micro)
    operations = 3 * plan.pipeline * plan.virtual_pipeline * num_micro
    if plan.pipeline == 1 or operations > MAX_OPERATIONS or schedule_shortfall(shape) is not None:
        return None
    return simulate(shape, _stage_times(shape, steps))


def _stage_times(shape: PipelineShape, steps: StepTable) -> StageTimes:
    """Seconds per stage: a rank's time split evenly over its stages."""
    first, middle, last = steps.stages.first, steps.stages.middle, steps.stages.last
    columns = np.empty((3, shape.num_stages))
    for rank in range(shape.num_ranks):
        times = first if rank == 0 else last if rank == shape.num_ranks - 1 else middle
        stages = list(dict.fromkeys(shape.stages_of(rank)))
        per_stage = [_number(x) / shape.num_chunks for x in (times.forward_s, times.input_s, times.weight_s)]
        columns[:, stages] = np.array(per_stage)[:, None]
    return StageTimes(
        forward_s=columns[0],
        backward_input_s=columns[1],
        backward_weight_s=columns[2],
        transfer_s=_number(steps.stages.transfer_s),
    )


def _total(times: LayerTimes) -> float:
    return _number(times.forward_s) + _number(times.input_s) + _number(times.weight_s)


def _number(x: object) -> float:
    return float(np.ravel(np.asarray(x))[0])
