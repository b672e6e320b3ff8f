"""The step time of a finalist from its pipeline's event graph instead of the closed form.

The closed forms treat stages alike while the pipeline fills and drains; the graph takes each as it is. Only
the pipeline's part of the step is replaced, everything else stands as `cost.step` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.arrays import FloatArray, scalar
from meshwright.cost.layers import LayerTimes
from meshwright.cost.pipeline.schedules import PipelineShape, schedule_shortfall, shape_of
from meshwright.cost.pipeline.simulate import StageTimes, Timeline, lengths_s, simulate
from meshwright.cost.stages import layers_per_stage
from meshwright.cost.step import RankTimes, StepTable, oversubscribed_s
from meshwright.specs.plan import Plan

MAX_OPERATIONS = 400_000
"""Larger graphs take seconds each; with that many micro-batches the closed form is good."""

OUTSIDE_PIPELINE = ("bubble", "data_parallel", "optimizer", "fixed", "stragglers")


def simulated_steps_s(plans: Sequence[Plan], steps: Sequence[StepTable]) -> list[float | None]:
    """Seconds of one step of every plan; None without a pipeline or when its graph is too large.

    `steps` holds for every plan the one row that `cost.step` computed for it.
    """
    cases = [_pipeline(plan, row) for plan, row in zip(plans, steps, strict=True)]
    lengths_of = iter(lengths_s([case for case in cases if case is not None]))
    return [
        None if case is None else step_with_pipeline_s(row, next(lengths_of))
        for case, row in zip(cases, steps, strict=True)
    ]


def simulated_step_s(plan: Plan, steps: StepTable) -> float | None:
    """`simulated_steps_s` of one plan."""
    return simulated_steps_s([plan], [steps])[0]


def step_with_pipeline_s(steps: StepTable, pipeline_s: float) -> float:
    """Seconds of the step whose pipeline takes `pipeline_s` before calibrated factors; `steps` holds its one row."""
    scale = graph_scale(steps)
    scaled_s = scalar(
        oversubscribed_s(pipeline_s * scale.factor, scale.in_pipeline_s, scalar(steps.cpu_oversubscription))
    )
    return (scale.outside_s + scaled_s) * scale.straggle


@dataclass(frozen=True, kw_only=True)
class GraphScale:
    """Factors and seconds that the cost model adds to the kernel times of an event graph."""

    factor: float  # calibrated factors over kernel times
    in_pipeline_s: float  # of the closed form
    outside_s: float  # before and after the pipeline: gradients, optimizer, fixed costs
    straggle: float  # over all


def graph_scale(steps: StepTable) -> GraphScale:
    """Scale of the one row of `steps`."""
    num_micro = round(scalar(steps.num_micro_batches))
    totals = [_total(t) for t in (steps.stages.first, steps.stages.middle, steps.stages.last)]
    components = {name: scalar(x) for name, x in steps.components_s.items()}
    in_pipeline = sum(x for name, x in components.items() if name not in OUTSIDE_PIPELINE)
    # The cost model scales kernel times by calibrated factors; the graph's times are scaled alike.
    cpu_oversubscription = scalar(steps.cpu_oversubscription)
    work = _total(steps.stages.mean) if cpu_oversubscription > 1 else max(totals) - scalar(steps.stages.rank_saving_s)
    rest = scalar(steps.step_s) - components["stragglers"]
    return GraphScale(
        factor=in_pipeline / (num_micro * work),
        in_pipeline_s=in_pipeline,
        outside_s=rest - in_pipeline - components["bubble"],
        straggle=scalar(steps.step_s) / rest,
    )


def num_operations(shape: PipelineShape) -> int:
    """Operations of the event graph, where weight gradients are some of their own."""
    return 3 * shape.num_ranks * shape.num_chunks * shape.num_micro_batches


def simulate_pipeline(plan: Plan, steps: StepTable) -> Timeline | None:
    """The event graph of one step's pipeline, before calibrated factors; None as in `simulated_steps_s`."""
    case = _pipeline(plan, steps)
    return None if case is None else simulate(*case)


def _pipeline(plan: Plan, steps: StepTable) -> tuple[PipelineShape, StageTimes] | None:
    num_micro = round(scalar(steps.num_micro_batches))
    shape = shape_of(plan, num_micro_batches=num_micro)
    if plan.pipeline == 1 or num_operations(shape) > MAX_OPERATIONS or schedule_shortfall(shape) is not None:
        return None
    return shape, stage_times(shape, plan.layers_per_stage, steps.stages)


def stage_times(shape: PipelineShape, given: tuple[int, ...] | None, stages: RankTimes) -> StageTimes:
    """Seconds of every stage: its layers, dense ones first, and the ends of the model. `given`: a plan's layers."""
    num_dense, num_moe = round(scalar(stages.num_dense_layers)), round(scalar(stages.num_moe_layers))
    layers = np.array(given or layers_per_stage(num_dense + num_moe, shape.num_stages))
    before = np.cumsum(layers) - layers
    dense = np.clip(num_dense - before, 0, layers) if num_moe else layers

    def seconds(part: str) -> FloatArray:
        column = dense * scalar(getattr(stages.dense, part))
        column = column + (layers - dense) * scalar(getattr(stages.moe, part))
        column[0] += scalar(getattr(stages.start, part))
        column[-1] += scalar(getattr(stages.end, part))
        return column

    return StageTimes(
        forward_s=seconds("forward_s"),
        backward_input_s=seconds("input_s"),
        backward_weight_s=seconds("weight_s"),
        transfer_s=scalar(stages.transfer_s),
        pair_saving_s=(layers - dense) * scalar(stages.layer_saving_s),
    )


def _total(times: LayerTimes) -> float:
    return scalar(times.forward_s) + scalar(times.input_s) + scalar(times.weight_s)
