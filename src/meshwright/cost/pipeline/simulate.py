"""Simulated time of a pipeline: the longest path through its event graph, for any stage times.

    end(op) = max(end(previous on its rank), end(producer of its input) + transfer) + duration

`simulate` gives the whole timeline of one plan. It is exact for uneven stages: embedding, head, dense first
layers and multi-token prediction are simply longer or shorter stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from meshwright.arrays import FloatArray
from meshwright.cost.pipeline.graph import EventGraph, event_graph
from meshwright.cost.pipeline.schedules import PipelineShape

TRANSFER, PAIR_SAVING = 4, 5
"""Rows of `StageTimes.table` after the four `OpKind`s."""


class Sends(Enum):
    """Behaviour of a rank while it sends an activation or a gradient to another rank."""

    OVERLAPPED = "overlapped"  # goes on computing; only a waiting receiver notices the transfer
    BLOCKING = "blocking"  # waits until the transfer is done


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch on each stage; arrays [..., num_stages] or numbers, leading axes are plans.

    A schedule that does not split its backward passes takes the sum of both parts. `transfer_s[s]` is one
    message between stage s and s + 1, in either direction (the last entry is unused); it counts only if the
    two live on different ranks. `pair_saving_s` is how much less an overlapped pair of a forward and a
    backward pass takes than one after the other, by the stage of the backward pass (DualPipe only); at most
    the shorter of the two passes.
    """

    forward_s: ArrayLike
    backward_input_s: ArrayLike
    backward_weight_s: ArrayLike
    transfer_s: ArrayLike = 0.0
    pair_saving_s: ArrayLike = 0.0
    sends: Sends = Sends.OVERLAPPED

    def table(self, num_stages: int) -> FloatArray:
        """[6, num_stages, num_plans]: a row for each `OpKind`, then `TRANSFER` and `PAIR_SAVING`."""
        f, b, w = (np.asarray(a, float) for a in (self.forward_s, self.backward_input_s, self.backward_weight_s))
        rows = np.broadcast_arrays(f, b, w, b + w, self.transfer_s, self.pair_saving_s, np.empty((1, num_stages)))[:-1]
        return np.stack([row.reshape(-1, num_stages).T for row in rows])


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """One simulated step. `start_s` and `end_s` go with the operations of `graph`; the step starts at 0."""

    graph: EventGraph
    start_s: FloatArray  # [num_ops]
    end_s: FloatArray  # [num_ops]
    step_s: float
    busy_s: FloatArray  # [p], time a rank computes (or blocks in a send)
    peak_in_flight: FloatArray  # [p], micro-batches, see `peak_in_flight`

    @property
    def bubble_ratio(self) -> float:
        """Share of all ranks' time in which they wait."""
        ranks = len(self.busy_s)
        return 1.0 - float(self.busy_s.sum()) / (ranks * self.step_s) if self.step_s > 0 else 0.0


def simulate(shape: PipelineShape, times: StageTimes) -> Timeline:
    """Run one step of one plan. `times` holds a single plan.

    Raises ValueError for an illegal shape: ask `schedule_shortfall` first.
    """
    graph = event_graph(shape)
    table = times.table(shape.num_stages)
    if table.shape[-1] != 1:
        raise ValueError(f"times hold {table.shape[-1]} plans, not one")
    duration_s, delay_s = _durations(graph, table, times.sends)
    end_s = _ends(graph, duration_s, delay_s)[:, 0]
    start_s = end_s - duration_s[:, 0]
    start_s[graph.pair_forward] = start_s[graph.pair_backward]
    end_s[graph.pair_forward] = end_s[graph.pair_backward]
    return Timeline(
        graph=graph,
        start_s=start_s,
        end_s=end_s,
        step_s=float(end_s.max()),
        busy_s=_sum_by_rank(graph, duration_s[:, 0]),
        peak_in_flight=peak_in_flight(shape),
    )


def peak_in_flight(
    shape: PipelineShape, *, kept_per_stage: ArrayLike | None = None, held_for_weights_ratio: float = 1.0
) -> FloatArray:
    """[p], the most activations that each rank keeps at once; durations do not matter, only the order does.

    One micro-batch keeps `kept_per_stage`, [num_stages] or a number, on each stage: give bytes, get
    bytes. None is 1 / num_chunks, so that the result counts micro-batches, as `closed_form.in_flight` does.
    In schedules that compute weight gradients apart the share `held_for_weights_ratio` of it stays until that
    is done; the rest is free after the gradient of the input.
    """
    graph = event_graph(shape)
    if kept_per_stage is None:
        kept_per_stage = 1.0 / shape.num_chunks
    kept = np.broadcast_to(np.asarray(kept_per_stage, dtype=np.float64), (shape.num_stages,))
    held = held_for_weights_ratio
    change_of_kind = np.array([1.0, held - 1.0, -held, -1.0])  # in the order of OpKind
    change = (change_of_kind[graph.kind] * kept[graph.stage])[graph.rank_major]
    # Every rank ends with nothing, so one running sum over all ranks starts each of them at zero.
    return np.maximum.reduceat(np.cumsum(change), graph.rank_bounds[:-1])


def _durations(graph: EventGraph, table: FloatArray, sends: Sends) -> tuple[FloatArray, FloatArray]:
    """Time of every operation and of the transfer of its input, each [num_ops, num_plans]."""
    transfer, saving = table[TRANSFER] * graph.shape.hop_crosses[:, None], table[PAIR_SAVING]
    duration = table[graph.kind, graph.stage]
    if sends is Sends.BLOCKING:
        duration += transfer[graph.output_hop]
        delay = np.zeros_like(duration)
    else:
        delay = transfer[graph.input_hop]
    forward, backward = graph.pair_forward, graph.pair_backward
    duration[backward] += duration[forward] - saving[graph.stage[backward]]
    duration[forward] = 0.0
    return duration, delay


def _sum_by_rank(graph: EventGraph, values: FloatArray) -> FloatArray:
    return np.add.reduceat(values[graph.rank_major], graph.rank_bounds[:-1])


def _ends(graph: EventGraph, duration_s: FloatArray, delay_s: FloatArray) -> FloatArray:
    """[num_ops, num_plans], level by level. One more row, of zeros, stands for "nothing to wait for"."""
    end_s = np.zeros((graph.num_ops + 1, duration_s.shape[1]))
    bounds = graph.level_bounds.tolist()
    for first, last in pairwise(bounds):
        ready = end_s[graph.producer[first:last]]
        ready += delay_s[first:last]
        np.maximum(ready, end_s[graph.previous[first:last]], out=ready)
        np.add(ready, duration_s[first:last], out=end_s[first:last])
    return end_s[:-1]
