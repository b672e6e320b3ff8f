"""Simulated time of a pipeline: the longest path through its event graph, for any stage times.

    end(op) = max(end(previous on its rank), end(producer of its input) + transfer) + duration

`simulate` gives the whole timeline of one plan, `lengths_s` the time of several plans at once. Both are exact for
uneven stages: embedding, head, dense first layers and multi-token prediction are simply longer or shorter stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike

from meshwright.arrays import FloatArray
from meshwright.cost.pipeline.graph import EventGraph, event_graph
from meshwright.cost.pipeline.orders import IntArray, OpKind
from meshwright.cost.pipeline.schedules import PipelineShape

TRANSFER, PAIR_SAVING = 4, 5
"""Rows of `StageTimes.table` after the four `OpKind`s."""

MOST_TOGETHER = 3_000_000
"""Operations of graphs that are walked together: their arrays take some 70 MB."""


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
    duration_s = _times(graph, times)[0][graph.time_index]
    end_s = _ends([graph], [times])[:-1]
    start_s = end_s - duration_s
    start_s[graph.pair_forward] = start_s[graph.pair_backward]
    end_s[graph.pair_forward] = end_s[graph.pair_backward]
    return Timeline(
        graph=graph,
        start_s=start_s,
        end_s=end_s,
        step_s=float(end_s.max()),
        busy_s=np.add.reduceat(duration_s, graph.rank_bounds[:-1]),
        peak_in_flight=peak_in_flight(shape),
    )


def lengths_s(cases: Sequence[tuple[PipelineShape, StageTimes]]) -> list[float]:
    """`simulate(...).step_s` of every case; graphs are walked together, as calls cost more than numbers."""
    found: list[float] = []
    graphs = [event_graph(shape) for shape, _ in cases]
    first = 0
    while first < len(cases):
        last, num_ops = first + 1, graphs[first].num_ops
        while last < len(cases) and num_ops + graphs[last].num_ops <= MOST_TOGETHER:
            num_ops += graphs[last].num_ops
            last += 1
        end_s = _ends(graphs[first:last], [times for _, times in cases[first:last]])
        found += np.maximum.reduceat(end_s, _starts(graphs[first:last])[:-1]).tolist()
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
    change = change_of_kind[graph.kind] * kept[graph.stage]
    # Every rank ends with nothing, so one running sum over all ranks starts each of them at zero.
    return np.maximum.reduceat(np.cumsum(change), graph.rank_bounds[:-1])


def _times(graph: EventGraph, times: StageTimes) -> tuple[FloatArray, FloatArray]:
    """Time of an operation and of the transfer of its input, both by `EventGraph.time_index`."""
    table = times.table(graph.shape.num_stages)
    if table.shape[-1] != 1:
        raise ValueError(f"times hold {table.shape[-1]} plans, not one")
    table = table[..., 0]
    transfer, saving = table[TRANSFER] * graph.shape.hop_crosses, table[PAIR_SAVING]
    # Activations go up the stages, gradients of inputs come down, gradients of weights stay.
    up, down, stays = np.roll(transfer, 1), transfer, np.zeros_like(transfer)
    duration, delay = table[: len(OpKind)], np.stack([up, down, stays, down])
    if times.sends is Sends.BLOCKING:
        duration = duration + np.stack([down, up, stays, up])
        delay = np.zeros_like(duration)
    if not len(graph.pair_forward):
        return np.ravel(duration), np.ravel(delay)
    forward, backward = duration[OpKind.FORWARD], duration[OpKind.BACKWARD]
    pairs = backward + (forward[:, None] - saving)
    delays = np.broadcast_to(delay[OpKind.BACKWARD], pairs.shape)
    return (
        np.concatenate([np.ravel(x) for x in (duration, stays, pairs)]),
        np.concatenate([np.ravel(x) for x in (delay, delay[OpKind.FORWARD], delays)]),
    )


def _starts(graphs: Sequence[EventGraph]) -> IntArray:
    """Positions of the graphs' operations in `_ends`, and the length of that."""
    return np.cumsum([0, *(graph.num_ops + 1 for graph in graphs)], dtype=np.int32)


def _ends(graphs: Sequence[EventGraph], times: Sequence[StageTimes]) -> FloatArray:
    """Ends of the operations of all graphs, one graph after the other, and one more value after each.

    In every round each rank runs its next operation if the input is there. NaN stands for what has not run.
    Raises RuntimeError if ranks wait for each other, which is a bug of the schedule.
    """
    tables = [_times(graph, time) for graph, time in zip(graphs, times, strict=True)]
    duration_s, delay_s = (np.concatenate(column) for column in zip(*tables, strict=True))
    starts, rows = _starts(graphs), np.cumsum([0, *(len(table) for table, _ in tables)], dtype=np.int32)
    placed = list(zip(graphs, starts, rows, strict=False))
    # Every graph has one value more, zero: the end of "nothing to wait for".
    producer, time_index = np.zeros((2, starts[-1]), dtype=np.intp)  # which `take` does not convert
    for graph, start, row in placed:
        np.add(graph.producer, start, out=producer[start : start + graph.num_ops])
        np.add(graph.time_index, row, out=time_index[start : start + graph.num_ops])
    here, last = (
        np.concatenate([graph.rank_bounds[part] + start for graph, start, _ in placed]).astype(np.intp)
        for part in (slice(-1), slice(1, None))
    )
    end_s = np.full(starts[-1], np.nan)
    end_s[starts[1:] - 1] = 0.0
    now_s = np.zeros(len(here))
    while len(here):
        before = here.copy()
        for _ in range(int((last - here).min())):  # no rank is done earlier
            index = time_index.take(here)
            ready = end_s.take(producer.take(here))
            ready += delay_s.take(index)
            np.maximum(ready, now_s, out=ready)
            ready += duration_s.take(index)
            end_s[here] = ready
            ran = ready == ready
            np.fmax(now_s, ready, out=now_s)
            here += ran
        if np.array_equal(here, before):
            raise RuntimeError(f"pipeline schedule deadlocks: {len(here)} ranks wait forever")
        more = here < last
        here, last, now_s = here[more], last[more], now_s[more]
    return end_s
