"""Orders of operations: which operation each rank of a pipeline runs next.

Symbols: p ranks, v model chunks per rank, m micro-batches, r a rank. The model is cut into *stages* numbered
along the forward pass; every operation belongs to one stage and one micro-batch.

An order is written the way its paper draws it: for each rank a few *phases*, each a short pattern of slots
repeated some number of times. A slot says what to compute and which *stream* to take it from (say, the
forward passes of chunk 0); the k-th use of a stream yields its k-th (micro-batch, stage). No rank's order
depends on how long operations take.

Sources
    gpipe         Huang et al. 2019, arXiv 1811.06965, section 2.3
    1f1b          Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1 (PipeDream-Flush)
    interleaved   same, section 2.2.2, figure 4
    zero_bubble   Qi et al. 2023, arXiv 2401.10241, section 2.2 (ZB-H1)
    zbv           same authors, section 6 (ZB-V), and arXiv 2405.15362 for the V-shaped placement
    dualpipe      DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, figure 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from meshwright.cost.pipeline.schedules import PipelineShape

IntArray = NDArray[np.int32]


class OpKind(IntEnum):
    """Kind of an operation. Its value indexes the rows of `simulate.StageTimes.table`."""

    FORWARD = 0
    BACKWARD_INPUT = 1  # gradient of the stage's input; the stage before waits for it
    BACKWARD_WEIGHT = 2  # gradient of the stage's weights; no operation waits for it
    BACKWARD = 3  # both, one after the other, in a schedule that does not split them


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """The operations of one rank in the order in which it runs them; arrays of equal length."""

    kind: NDArray[np.int8]  # OpKind
    micro_batch: IntArray
    stage: IntArray
    is_paired: NDArray[np.bool_]  # a backward that runs together with the forward just before it


class Stream(NamedTuple):
    """The micro-batches and stages that the slots of one stream go through, in order; equal lengths."""

    micro_batch: IntArray
    stage: IntArray


class Slot(NamedTuple):
    """Compute `kind` for the next (micro-batch, stage) of the stream with index `stream`."""

    kind: OpKind
    stream: int


class OrderPhase(NamedTuple):
    """`slots`, `repeats` times over. If paired, a fused backward overlaps the forward directly before it."""

    slots: tuple[Slot, ...]
    repeats: int
    paired: bool = False


@cache
def interleaved_group(num_ranks: int, num_micro_batches: int) -> int:
    """Micro-batches that pass through one chunk before the next chunk takes its turn.

    p when p divides m, as published. Otherwise a last group shorter than p would deadlock, so it is the
    smallest group that leaves a remainder of 0 or at least p: Megatron-Core accepts it as
    `microbatch_group_size_per_vp_stage`. Larger groups cost memory, not time. There is one group if m < p.

    >>> [interleaved_group(4, m) for m in (3, 8, 9, 10, 11)]
    [3, 4, 5, 5, 6]
    """
    p, m = num_ranks, num_micro_batches
    if m <= p:
        return m
    return next(n for n in range(p, m + 1) if m % n == 0 or m % n >= p)


def gpipe(shape: PipelineShape, rank: int) -> RankOrder:
    """All forward passes, then all backward passes."""
    m = shape.num_micro_batches
    phases = (OrderPhase((_forward(0),), m), OrderPhase((_backward(1),), m))
    return unrolled([one_stage(rank, m)] * 2, phases)


def one_f_one_b(shape: PipelineShape, rank: int) -> RankOrder:
    """One forward and one backward in turn, after as many forwards as there are ranks behind this one."""
    m = shape.num_micro_batches
    return unrolled([one_stage(rank, m)] * 2, _alternate(m, warm_up=shape.num_ranks - 1 - rank))


def interleaved(shape: PipelineShape, rank: int) -> RankOrder:
    """1F1B over chunks that take turns of `interleaved_group` micro-batches."""
    p, v = shape.num_ranks, shape.num_chunks
    m = shape.num_micro_batches
    group = interleaved_group(p, m)
    micro_batch, chunk = _turns(m, v, group)
    streams = [Stream(micro_batch, chunk * p + rank), Stream(micro_batch, (v - 1 - chunk) * p + rank)]
    warm_up = 2 * (p - 1 - rank) + (v - 1) * group
    return unrolled(streams, _alternate(m * v, warm_up=warm_up))


@cache
def _turns(num_micro_batches: int, num_chunks: int, group: int) -> tuple[IntArray, IntArray]:
    """(micro-batch, chunk) of the passes of a rank whose chunks take turns, the same on all ranks."""
    passes = np.arange(num_micro_batches * num_chunks, dtype=np.int32)
    start = passes // (group * num_chunks) * group
    members = np.minimum(group, num_micro_batches - start)
    chunk, member = np.divmod(passes - start * num_chunks, members)
    return start + member, chunk


def zero_bubble(shape: PipelineShape, rank: int) -> RankOrder:
    """1F1B with the weight gradients of rank r running r micro-batches late, so that every rank holds p."""
    p = shape.num_ranks
    m = max(shape.num_micro_batches, p)
    warm_up, late = p - 1 - rank, rank
    f, b, w = _forward(0), _backward_input(1), _backward_weight(2)
    phases = (
        OrderPhase((f,), warm_up),
        OrderPhase((f, b), late),
        OrderPhase((f, b, w), m - warm_up - late),
        OrderPhase((b, w), warm_up),
        OrderPhase((w,), late),
    )
    return _without_surplus(unrolled([one_stage(rank, m)] * 3, phases), shape.num_micro_batches)


def zbv(shape: PipelineShape, rank: int) -> RankOrder:
    """Chunk 0 goes down the ranks and chunk 1 up again; weight gradients fill the gaps of the tail."""
    p, r = shape.num_ranks, rank
    m = shape.num_micro_batches
    down, up = (one_stage(stage, m) for stage in shape.stages_of(rank))
    f0, b0, w0 = _forward(0), _backward_input(1), _backward_weight(2)
    f1, b1, w1 = _forward(3), _backward_input(4), _backward_weight(5)
    phases = (
        OrderPhase((f0,), 2 * (p - r) - 1),
        OrderPhase((f1, f0), r),
        OrderPhase((f1, b1, w1), p - r),
        OrderPhase((f0, b0, w0, f1, b1, w1), m - 2 * p + r + 1),
        OrderPhase((b0, w0, f1, b1, w1), p - 1 - r),
        OrderPhase((b0, b1), r),
        OrderPhase((b0, w0), p - r),
        OrderPhase((w0, w1), r),
    )
    return unrolled([down] * 3 + [up] * 3, phases)


def dualpipe(shape: PipelineShape, rank: int) -> RankOrder:
    """Half of the micro-batches enter at either end; forwards of one half overlap backwards of the other.

    `near` is the direction that enters at the end of the pipeline nearer to this rank: the two halves of the
    ranks are mirror images of each other.
    """
    p, n = shape.num_ranks, shape.num_micro_batches // 2
    depth = min(rank, p - 1 - rank) + 1  # ranks from the nearer end, this one included
    directions = [one_stage(shape.stages_of(rank)[0], n), one_stage(shape.stages_of(rank)[1], n, first=n)]
    near, far = directions if rank < p // 2 else directions[::-1]
    return _overlapped(near, far, depth=depth, inward=p // 2 - depth)


def dualpipe_v(shape: PipelineShape, rank: int) -> RankOrder:
    """DualPipe on half of its ranks: a micro-batch goes to the middle as chunk 0 and returns as chunk 1.

    Sea AI Lab 2025, "Cut-in-half" of DualPipe; DeepSeek-AI's DualPipe repository, dualpipev.py.
    """
    near, far = (one_stage(stage, shape.num_micro_batches) for stage in shape.stages_of(rank))
    return _overlapped(near, far, depth=rank + 1, inward=shape.num_ranks - rank - 1)


def _overlapped(near: Stream, far: Stream, *, depth: int, inward: int) -> RankOrder:
    """The order of the `depth`th rank from the end of `near`, with `inward` ranks between it and the middle."""
    n, num_ranks = len(near.stage), 2 * (depth + inward)
    f_near, f_far, w = _forward(0), _forward(1), _backward_weight(4)
    b_near, b_far = _backward_input(2), _backward_input(3)
    bw_near, bw_far = _backward(2), _backward(3)
    drain = [(bw_far, bw_near)[i % 2] for i in range(depth)]
    drain += [(b_far, b_near)[i % 2] for i in range(depth, 2 * depth)]
    # The middle ranks do not overlap their first pair: its forward is ready earlier, and others wait for it.
    unpaired = int(inward == 0)
    phases = (
        OrderPhase((f_near,), 2 * inward),
        OrderPhase((f_near, f_far), depth),
        OrderPhase((b_far, w, f_far), inward),
        OrderPhase((f_near, bw_far), unpaired),
        OrderPhase((f_far, bw_near), unpaired, paired=True),
        OrderPhase((f_near, bw_far, f_far, bw_near), n - num_ranks + depth - unpaired, paired=True),
        OrderPhase((bw_far, f_far, bw_near), inward, paired=True),
        OrderPhase(tuple(drain), 1),
        OrderPhase((w, b_near), inward),
        OrderPhase((w,), depth),
    )
    weights = _dualpipe_weight_stream(near, far, depth=depth, inward=inward)
    return unrolled([near, far, near, far, weights], phases)


def _dualpipe_weight_stream(near: Stream, far: Stream, *, depth: int, inward: int) -> Stream:
    """Weight gradients that DualPipe computes apart: early ones of `far`, then those the drain put off."""
    n = len(near.stage)
    positions = [(far, i) for i in range(inward)]
    for i in range(depth, 2 * depth):
        direction, first = (near, n - inward - depth) if i % 2 else (far, n - depth)
        positions.append((direction, first + i // 2))
    positions += [(near, i) for i in range(n - inward, n)]
    return Stream(
        np.array([direction.micro_batch[i] for direction, i in positions], dtype=np.int32),
        np.array([direction.stage[i] for direction, i in positions], dtype=np.int32),
    )


def _forward(stream: int) -> Slot:
    return Slot(OpKind.FORWARD, stream)


def _backward(stream: int) -> Slot:
    return Slot(OpKind.BACKWARD, stream)


def _backward_input(stream: int) -> Slot:
    return Slot(OpKind.BACKWARD_INPUT, stream)


def _backward_weight(stream: int) -> Slot:
    return Slot(OpKind.BACKWARD_WEIGHT, stream)


def one_stage(stage: int, num_micro_batches: int, *, first: int = 0) -> Stream:
    """A stream of consecutive micro-batches through one stage."""
    micro_batch = np.arange(first, first + num_micro_batches, dtype=np.int32)
    return Stream(micro_batch, np.full(num_micro_batches, stage, dtype=np.int32))


def _alternate(num_each: int, *, warm_up: int) -> tuple[OrderPhase, ...]:
    """Some forward passes (stream 0), then one forward and one backward (stream 1) in turn, then the rest."""
    warm_up = min(warm_up, num_each)
    f, bw = _forward(0), _backward(1)
    return OrderPhase((f,), warm_up), OrderPhase((f, bw), num_each - warm_up), OrderPhase((bw,), warm_up)


def unrolled(streams: Sequence[Stream], phases: Sequence[OrderPhase]) -> RankOrder:
    """The order that `phases` spell out."""
    slots = np.concatenate([np.tile(np.array(p.slots, dtype=np.int8), (p.repeats, 1)) for p in phases])
    in_paired_phase = np.concatenate([np.full(len(p.slots) * p.repeats, p.paired) for p in phases])
    kind = slots[:, 0]
    micro_batch, stage = np.empty((2, len(slots)), dtype=np.int32)
    for index, stream in enumerate(streams):
        uses = slots[:, 1] == index
        micro_batch[uses], stage[uses] = stream
    after_forward = np.append(False, kind[:-1] == OpKind.FORWARD)
    is_paired = in_paired_phase & after_forward & (kind == OpKind.BACKWARD)
    return RankOrder(kind=kind, micro_batch=micro_batch, stage=stage, is_paired=is_paired)


def _without_surplus(order: RankOrder, num_micro_batches: int) -> RankOrder:
    """Drop all micro-batches from `num_micro_batches` on.

    An order drawn for more micro-batches than there are stays free of deadlocks: the operations that remain
    wait only for operations that remain, in the same order.
    """
    keep = order.micro_batch < num_micro_batches
    return RankOrder(**{name: column[keep] for name, column in vars(order).items()})
