"""Simulated time of a pipeline: the longest path through its event graph, for any stage times.

    end(op) = max(end(previous on its rank), end(producer of its input) + transfer) + duration

`simulate` gives the whole timeline of one plan, `lengths_s` the time of several plans at once. Both are exact for
uneven stages: embedding, head, dense first layers and multi-token prediction are simply longer or shorter stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from meshwright.arrays import FloatArray
from meshwright.cost.pipeline.graph import EventGraph, event_graph
from meshwright.cost.pipeline.orders import IntArray
from meshwright.cost.pipeline.schedules import PipelineShape

TRANSFER, PAIR_SAVING = 4, 5
"""Rows of `StageTimes.table` after the four `OpKind`s."""

MOST_TOGETHER = 400_000
"""Operations of graphs that are walked together: their arrays take some 20 MB."""


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
    duration_s, delay_s = _durations(graph, times)
    end_s = _ends(graph, duration_s, delay_s)
    start_s = end_s - duration_s
    start_s[graph.pair_forward] = start_s[graph.pair_backward]
    end_s[graph.pair_forward] = end_s[graph.pair_backward]
    return Timeline(
        graph=graph,
        start_s=start_s,
        end_s=end_s,
        step_s=float(end_s.max()),
        busy_s=_sum_by_rank(graph, duration_s),
        peak_in_flight=peak_in_flight(shape),
    )


def lengths_s(cases: Sequence[tuple[PipelineShape, StageTimes]]) -> list[float]:
    """`simulate(...).step_s` of every case; small graphs are walked together, as calls cost more than numbers."""
    found: list[float] = []
    graphs = [event_graph(shape) for shape, _ in cases]
    first = 0
    while first < len(cases):
        last, num_ops = first + 1, graphs[first].num_ops
        while last < len(cases) and num_ops + graphs[last].num_ops <= MOST_TOGETHER:
            num_ops += graphs[last].num_ops
            last += 1
        found += _lengths(graphs[first:last], [times for _, times in cases[first:last]])
        first = last
    return found


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


def _durations(graph: EventGraph, times: StageTimes) -> tuple[FloatArray, FloatArray]:
    """Time of every operation and of the transfer of its input, each [num_ops]."""
    table = times.table(graph.shape.num_stages)
    if table.shape[-1] != 1:
        raise ValueError(f"times hold {table.shape[-1]} plans, not one")
    table = table[..., 0]
    transfer, saving = table[TRANSFER] * graph.shape.hop_crosses, table[PAIR_SAVING]
    duration = table[graph.kind, graph.stage]
    if times.sends is Sends.BLOCKING:
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
    """[num_ops] of a graph."""
    return _ends_by_level(graph.producer, graph.previous, graph.level_bounds, duration_s, delay_s)


def _lengths(graphs: Sequence[EventGraph], times: Sequence[StageTimes]) -> list[float]:
    """Longest paths of several graphs, whose operations of one level are evaluated as one vector."""
    if len(graphs) == 1:
        return [float(_ends(graphs[0], *_durations(graphs[0], times[0])).max())]
    sizes = [graph.num_ops for graph in graphs]
    starts, total = np.cumsum([0, *sizes]), sum(sizes)
    level = np.concatenate([np.repeat(np.arange(len(g.level_bounds) - 1), np.diff(g.level_bounds)) for g in graphs])
    by_level = np.argsort(level, kind="stable")
    position = np.empty(total + 1, dtype=np.int32)
    position[by_level] = np.arange(total, dtype=np.int32)
    position[total] = total

    def together(waits_for: Sequence[IntArray]) -> IntArray:
        """The operations waited for, of each graph, as positions among all of them."""
        here = [np.where(w == n, total, w + s) for w, n, s in zip(waits_for, sizes, starts, strict=False)]
        return position[np.concatenate(here)[by_level]]

    pairs = [_durations(graph, time) for graph, time in zip(graphs, times, strict=True)]
    duration_s, delay_s = (np.concatenate(column)[by_level] for column in zip(*pairs, strict=True))
    end_s = _ends_by_level(
        together([g.producer for g in graphs]),
        together([g.previous for g in graphs]),
        np.cumsum(np.append(0, np.bincount(level))),
        duration_s,
        delay_s,
    )
    return np.maximum.reduceat(end_s[position[:-1]], starts[:-1]).tolist()


def _ends_by_level(
    producer: IntArray, previous: IntArray, level_bounds: IntArray, duration_s: FloatArray, delay_s: FloatArray
) -> FloatArray:
    """[num_ops], level by level. One more value, zero, stands for "nothing to wait for"."""
    end_s = np.zeros(len(duration_s) + 1)
    for first, last in pairwise(level_bounds.tolist()):
        ready = end_s[producer[first:last]]
        ready += delay_s[first:last]
        np.maximum(ready, end_s[previous[first:last]], out=ready)
        np.add(ready, duration_s[first:last], out=end_s[first:last])
    return end_s[:-1]
