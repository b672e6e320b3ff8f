"""The event graph of a schedule: every operation, the operations before it, and an order in which to visit them.

An operation waits for at most two others: the one before it on its rank, and the one that makes its input.
The second is, for micro-batch k and stage s of S,

    forward            forward of (k, s - 1), if s > 0
    backward (input)   backward of (k, s + 1), or the forward of (k, s) if s = S - 1
    backward (weight)  backward (input) of (k, s)

Neither depends on durations, so a graph is built once for each `PipelineShape` and evaluated for any number
of plans. The *level* of an operation is the number of operations on the longest path to it: operations of one
level are independent of each other and are evaluated as one vector.

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
    """All operations of one step in order of level; arrays of length num_ops unless said otherwise.

    `previous` and `producer` are indices of operations; num_ops stands for "nothing to wait for". Hop s joins
    stage s and stage s + 1; hop -1 is no hop (and, as an index, the unused last one).
    """

    shape: PipelineShape
    kind: NDArray[np.int8]  # OpKind
    micro_batch: IntArray
    stage: IntArray
    rank: IntArray
    previous: IntArray  # on the same rank
    producer: IntArray  # of the input
    input_hop: IntArray  # over which the input comes
    output_hop: IntArray  # over which the result leaves
    pair_forward: IntArray  # [num_pairs] operations that overlap ...
    pair_backward: IntArray  # ... the operation of the same position here
    level_bounds: IntArray  # [num_levels + 1]
    rank_major: IntArray  # permutation: rank 0's operations in order, then rank 1's, ...
    rank_bounds: IntArray  # [p + 1] into rank_major

    @property
    def num_ops(self) -> int:
        return len(self.kind)


@lru_cache(maxsize=128)
def event_graph(shape: PipelineShape) -> EventGraph:
    """The graph of a legal shape.

    Raises ValueError for an illegal one and RuntimeError if the order deadlocks: bugs of the caller or of the
    schedule, never of the user.
    """
    if reason := schedule_shortfall(shape):
        raise ValueError(reason)
    orders = rank_orders(shape)
    op = _concatenate(orders)
    rank_bounds = np.cumsum([0] + [len(order.kind) for order in orders], dtype=np.int32)
    num_ops = len(op.kind)
    rank = np.repeat(np.arange(len(orders), dtype=np.int32), np.diff(rank_bounds))

    previous = np.arange(-1, num_ops - 1, dtype=np.int32)
    previous[rank_bounds[:-1]] = num_ops
    producer = _producers(op, shape)
    level = _levels(producer, rank_bounds)

    by_level = np.argsort(level, kind="stable").astype(np.int32)
    position = np.empty(num_ops + 1, dtype=np.int32)
    position[by_level] = np.arange(num_ops, dtype=np.int32)
    position[num_ops] = num_ops
    pairs = np.flatnonzero(op.is_paired)
    return EventGraph(
        shape=shape,
        kind=op.kind[by_level],
        micro_batch=op.micro_batch[by_level],
        stage=op.stage[by_level],
        rank=rank[by_level],
        previous=position[previous[by_level]],
        producer=position[producer[by_level]],
        input_hop=_hop(op, forward=op.stage - 1, backward=op.stage)[by_level],
        output_hop=_hop(op, forward=op.stage, backward=op.stage - 1)[by_level],
        pair_forward=position[pairs - 1],
        pair_backward=position[pairs],
        level_bounds=np.cumsum(np.append(0, np.bincount(level)), dtype=np.int32),
        rank_major=position[:-1],
        rank_bounds=rank_bounds,
    )


def _concatenate(orders: list[RankOrder]) -> RankOrder:
    columns = zip(*(vars(order).values() for order in orders), strict=True)
    return RankOrder(**dict(zip(vars(orders[0]), map(np.concatenate, columns), strict=True)))


def _producers(op: RankOrder, shape: PipelineShape) -> IntArray:
    """Index of the operation that makes each operation's input; num_ops where the input is the batch."""
    num_ops, num_stages = len(op.kind), shape.num_stages
    # One stage of padding on either side: nothing comes before the first stage.
    made_forward = np.full((shape.num_micro_batches, num_stages + 2), num_ops, dtype=np.int32)
    made_backward = made_forward.copy()
    k, s = op.micro_batch, op.stage + 1
    index = np.arange(num_ops, dtype=np.int32)
    # A paired forward is ready when its backward, the next operation, is.
    ready = index + np.append(op.is_paired[1:], False)

    forward = op.kind == OpKind.FORWARD
    weight = op.kind == OpKind.BACKWARD_WEIGHT
    backward = ~forward & ~weight
    made_forward[k[forward], s[forward]] = ready[forward]
    made_backward[k[backward], s[backward]] = index[backward]
    made_backward[:, num_stages + 1] = made_forward[:, num_stages]  # the loss

    producer = np.empty(num_ops, dtype=np.int32)
    producer[forward] = made_forward[k[forward], s[forward] - 1]
    producer[backward] = made_backward[k[backward], s[backward] + 1]
    producer[weight] = made_backward[k[weight], s[weight]]
    return producer


def _hop(op: RankOrder, *, forward: IntArray, backward: IntArray) -> IntArray:
    """Activations go up the stages, gradients of inputs come down, gradients of weights stay."""
    stays = op.kind == OpKind.BACKWARD_WEIGHT
    return np.where(op.kind == OpKind.FORWARD, forward, np.where(stays, -1, backward)).astype(np.int32)


def _levels(producer: IntArray, rank_bounds: IntArray) -> IntArray:
    """Level of every operation. Runs each rank until it waits; whoever makes the awaited input wakes it.

    A plain loop over lists: an operation is visited once, and at this size lists beat array indexing.
    """
    num_ops = len(producer)
    makes: list[int] = producer.tolist()
    level = [-1] * num_ops + [0]  # the last stands for "nothing to wait for"
    bounds: list[int] = rank_bounds.tolist()
    cursor = bounds[:-1]
    waiting: dict[int, int] = {}
    runnable = list(range(len(cursor)))
    while runnable:
        rank = runnable.pop()
        here = cursor[rank]
        reached = level[here - 1] if here > bounds[rank] else -1
        while here < bounds[rank + 1]:
            made = level[makes[here]]
            if made < 0:
                waiting[makes[here]] = rank
                break
            reached = (reached if reached > made else made) + 1
            level[here] = reached
            if here in waiting:
                runnable.append(waiting.pop(here))
            here += 1
        cursor[rank] = here
    if waiting:
        raise RuntimeError(f"pipeline schedule deadlocks: ranks {sorted(waiting.values())} wait forever")
    return np.array(level[:-1], dtype=np.int32)
