"""A lower bound of the step length for uneven stages, without an event graph: for branch and bound.

Whatever the order of operations, rank r

1. starts when the first activation has come down to one of its stages,
2. then computes all its forward and backward passes,
3. and after its last gradient of an input, that micro-batch still has to travel up to stage 0, where its
   gradient of the weights is the last thing done.

Gradients of weights that a schedule computes apart may come later than the last gradient of an input, so they
count in (2) or (3) but not in both: the bound is the larger of the two ways. It is exact for even stages
without transfers of gpipe, 1f1b and, with m >= p, interleaved.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.pipeline.schedules import OpKind, PipelineShape
from meshwright.cost.pipeline.simulate import PAIR_SAVING, TRANSFER, FloatArray, StageTimes
from meshwright.specs.plan import Schedule

_SPLIT = frozenset({Schedule.ZERO_BUBBLE, Schedule.ZBV, Schedule.DUALPIPE})


def lower_bound_s(shape: PipelineShape, times: StageTimes) -> FloatArray:
    """[num_plans], seconds that no step of this shape beats: at most `simulate` for all stage times."""
    table = times.table(shape.num_stages)
    forward, inputs, weights = (
        table[k] for k in (OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)
    )
    saving = table[PAIR_SAVING]
    if shape.schedule not in _SPLIT:
        inputs, weights = inputs + weights, np.zeros_like(weights)
    if shape.schedule is not Schedule.DUALPIPE:
        saving = np.zeros_like(saving)
    hop = table[TRANSFER] * shape.hop_crosses[:, None]
    arrival = _before(forward + hop)
    departure = _before(inputs + hop) + weights[0]

    stages = np.array([shape.stages_of(rank) for rank in range(shape.num_ranks)])  # [p, chunks]
    # DualPipe holds each stage twice and sends half of the micro-batches through either copy.
    num_passes = shape.num_micro_batches / (2 if shape.schedule is Schedule.DUALPIPE else 1)
    start = arrival[stages].min(axis=1)
    finish = departure[stages].min(axis=1)
    both = (num_passes * (forward + inputs - saving))[stages].sum(axis=1)
    own_weights = (num_passes * weights)[stages].sum(axis=1)
    return (start + both + np.maximum(own_weights, finish)).max(axis=0)


def _before(per_stage: FloatArray) -> FloatArray:
    """Sum over the stages before each one, [num_stages, num_plans]."""
    return np.cumsum(per_stage, axis=0) - per_stage
