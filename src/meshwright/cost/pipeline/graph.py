"""The event graph of a schedule: every operation, and the operations before it.

An operation waits for at most two others: the one before it on its rank, and the one that makes its input.
The second is, for micro-batch k and stage s of S,

    forward            forward of (k, s - 1), if s > 0
    backward (input)   backward of (k, s + 1), or the forward of (k, s) if s = S - 1
    backward (weight)  backward (input) of (k, s)

Neither depends on durations, so a graph is built once for each `PipelineShape` and evaluated for any number
of plans.

An overlapped pair is one block: it starts when both inputs are there and both results leave at its end. Its
forward is therefore an operation of no length, and whoever waits for that forward waits for its backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.pipeline.orders import IntArray, OpKind, RankOrder
from meshwright.cost.pipeline.schedules import PipelineShape, rank_orders, schedule_shortfall


@dataclass(frozen=True, kw_only=True, eq=False)
class EventGraph:
    """All operations of one step: rank 0's in order, then rank 1's, ...; most arrays are of length num_ops.

    `producer` is an index of operations; num_ops stands for "nothing to wait for".
    """

    shape: PipelineShape
    kind: NDArray[np.int8]  # OpKind
    micro_batch: IntArray
    stage: IntArray
    rank: IntArray
    producer: IntArray  # of the input
    pair_forward: IntArray  # [num_pairs] operations that overlap ...
    pair_backward: IntArray  # ... the operation of the same position here
    time_index: IntArray  # into the tables of `simulate`
    rank_bounds: IntArray  # [p + 1]

    @property
    def num_ops(self) -> int:
        return len(self.kind)


@lru_cache(maxsize=128)
def event_graph(shape: PipelineShape) -> EventGraph:
    """The graph of a legal shape. Raises ValueError for an illegal one, a bug of the caller and never of the user."""
    if reason := schedule_shortfall(shape):
        raise ValueError(reason)
    orders = rank_orders(shape)
    op = _concatenate(orders)
    lengths = [len(order.kind) for order in orders]
    backward = np.flatnonzero(op.is_paired).astype(np.int32)
    forward, num_stages = backward - 1, shape.num_stages
    time_index = op.kind * np.int32(num_stages) + op.stage
    # A forward in a pair takes no time of its own; the time of its backward depends on both stages.
    time_index[forward] = len(OpKind) * num_stages + op.stage[forward]
    time_index[backward] = (len(OpKind) + 1 + op.stage[forward]) * num_stages + op.stage[backward]
    return EventGraph(
        shape=shape,
        kind=op.kind,
        micro_batch=op.micro_batch,
        stage=op.stage,
        rank=np.repeat(np.arange(len(orders), dtype=np.int32), lengths),
        producer=_producers(op, shape),
        pair_forward=forward,
        pair_backward=backward,
        time_index=time_index,
        rank_bounds=np.cumsum([0, *lengths], dtype=np.int32),
    )


def _concatenate(orders: list[RankOrder]) -> RankOrder:
    columns = zip(*(vars(order).values() for order in orders), strict=True)
    return RankOrder(**dict(zip(vars(orders[0]), map(np.concatenate, columns), strict=True)))


def _producers(op: RankOrder, shape: PipelineShape) -> IntArray:
    """Index of the operation that makes each operation's input; num_ops where the input is the batch."""
    num_ops, num_stages = len(op.kind), shape.num_stages
    # One stage of padding on either side: nothing comes before the first stage, and the loss after the last.
    width = num_stages + 2
    size = shape.num_micro_batches * width
    made = np.full(3 * size, num_ops, dtype=np.int32)  # forwards, backwards, weights
    place = op.micro_batch * width + (op.stage + 1)
    tables, sources = np.array([0, size, 2 * size, size]), np.array([-1, size + 1, size, size + 1])  # by OpKind
    # A paired forward is ready when its backward, the next operation, is.
    made[place + tables[op.kind]] = np.arange(num_ops, dtype=np.int32) + np.append(op.is_paired[1:], False)
    made[size + width - 1 : 2 * size : width] = made[num_stages:size:width]
    return made[place + sources[op.kind]]
