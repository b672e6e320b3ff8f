"""Waiting time and memory of a pipeline of even stages in a few array operations, for the screening.

Each schedule's formulas are in `formulas`, its record in `schedules` names them. All arguments broadcast.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.pipeline.schedules import SCHEDULE_RECORDS, ScheduleRecord
from meshwright.specs.plan import SCHEDULES, Schedule


def waiting_s(
    schedule: Schedule | Array,
    num_ranks: Array,
    num_chunks: Array,
    num_micro_batches: Array,
    *,
    forward_s: Array,
    backward_input_s: Array,
    backward_weight_s: Array,
    transfer_s: Array = 0.0,
    pair_saving_s: Array = 0.0,
) -> Array:
    """Seconds that a step of a legal shape lasts beyond the work of a rank: bubble and exposed transfers, less pairs.

    `schedule` is a `Schedule` or indices into `SCHEDULES`. Times are of one rank and one micro-batch,
    whose work is num_micro_batches * (forward_s + backward_input_s + backward_weight_s). `pair_saving_s` is what
    DualPipe's overlap of a forward with a backward pass saves. If sends block compute, add the transfer to
    `forward_s` and `backward_input_s` instead of giving it here.
    """
    return _by_schedule(
        lambda record: record.waiting_s, schedule, num_ranks, num_chunks, num_micro_batches,
        forward_s, backward_input_s, backward_weight_s, transfer_s, pair_saving_s,
    )  # fmt: skip


def in_flight(
    schedule: Schedule | Array, num_ranks: Array, num_chunks: Array, num_micro_batches: Array, rank: Array
) -> Array:
    """Most micro-batches whose activations a rank keeps at once; all arguments broadcast.

    1 is all that one micro-batch keeps on the rank's chunks together: interleaved schedules keep fractions.
    A separate weight gradient keeps its activation until it is computed. DualPipe's 1 is one
    micro-batch on one of the rank's two stages. Sources: `formulas`; Korthikanti et al. 2022, arXiv 2205.05198,
    appendix B, for interleaved.
    """
    return _by_schedule(lambda record: record.in_flight, schedule, num_ranks, num_chunks, num_micro_batches, rank)


def _by_schedule(
    formula: Callable[[ScheduleRecord], Callable[..., Array]], schedule: Schedule | Array, *args: Array
) -> Array:
    """Evaluate the formula of each schedule on the elements that have it."""
    if isinstance(schedule, Schedule):
        return formula(SCHEDULE_RECORDS[schedule])(*args)
    present = np.flatnonzero(np.bincount(np.ravel(schedule)))
    if len(present) == 1:
        return formula(SCHEDULE_RECORDS[SCHEDULES[present[0]]])(*args)
    result = np.empty(np.broadcast_shapes(np.shape(schedule), *(np.shape(a) for a in args)))
    index = np.broadcast_to(schedule, result.shape)
    for i in present:
        chosen = index == i
        # Numbers stay numbers: most of a search's columns are.
        some = (a if np.ndim(a) == 0 else np.broadcast_to(a, result.shape)[chosen] for a in args)
        result[chosen] = formula(SCHEDULE_RECORDS[SCHEDULES[i]])(*some)
    return result
