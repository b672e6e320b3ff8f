"""Step length and memory of a pipeline of even stages in a few array operations: the screening's view.

Symbols: p ranks, v chunks per rank, m micro-batches; F, B, W seconds that one rank spends on the forward
pass, the gradient of the input and the gradient of the weights of one micro-batch (all its chunks together);
x one transfer between two ranks, overlapped with compute; f = F/v, b = B/v, w = W/v; h = p/2.

A rank works m (F + B + W). What it waits besides is, when all stages are equal,

    gpipe        (p-1)(F+B+W+2x)
    1f1b         (p-1)(F+B+W+2x) + 2x floor((m-1)(p-1)/p)
    interleaved  (p-1 + (v-1) max(0, p-m))(f+b+w) + 2(pv-1)x
    zero_bubble  (p-1)(F+B) - (min(m,p)-1) min(F,B,W)                   for x = 0
    zbv          the longest of eight paths, see `_zbv`
    dualpipe     max(2(h-1)F, (h-2)F + (h-1)B) + (h-1) max(0, B-W)      for x = 0

In 1F1B every transfer is on the critical path: a rank has just as many micro-batches in flight as the round
trip to the last rank and back takes, without slack for the hops. Interleaved chunks have that slack.

Sources: gpipe, 1f1b and interleaved: Narayanan et al. 2021, arXiv 2104.04473, section 2.2. zero_bubble with
F = B = W is (p-1)(F+B-W): Qi et al. 2023, arXiv 2401.10241, section 2.3. dualpipe with F = B is
(h-1)(F&B + B' - 3W), B' = B+W, F&B = F+B': DeepSeek-AI 2024, arXiv 2412.19437, table 2. The general forms and
all terms in x are critical paths that we read off our own event graphs; tests hold them to the simulation.

Exact (tested): every schedule for x = 0; gpipe and 1f1b for every x. With x up to the shortest pass of a
chunk dualpipe is exact, interleaved is if p divides m and zero_bubble if m >= 2p (else they are never short),
zbv is never long and a few percent short.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.pipeline.schedules import interleaved_group
from meshwright.cost.tables import SCHEDULES
from meshwright.specs.plan import Schedule


def step_length_s(
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
    """Seconds from the first operation to the last of legal shapes; all arguments broadcast.

    `schedule` is a `Schedule` or indices into `cost.tables.SCHEDULES`. Times are of one rank and one
    micro-batch. `pair_saving_s` is what DualPipe's overlap of a forward with a backward pass saves. Where
    sends block compute, add the transfer to `forward_s` and `backward_input_s` instead of giving it here.
    """
    work_s = num_micro_batches * (forward_s + backward_input_s + backward_weight_s)
    return work_s + waiting_s(
        schedule, num_ranks, num_chunks, num_micro_batches,
        forward_s=forward_s, backward_input_s=backward_input_s, backward_weight_s=backward_weight_s,
        transfer_s=transfer_s, pair_saving_s=pair_saving_s,
    )  # fmt: skip


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
    """What `step_length_s` adds to the work of a rank: bubble and exposed transfers, less what pairs save."""
    return _by_schedule(
        _WAITING, schedule, num_ranks, num_chunks, num_micro_batches,
        forward_s, backward_input_s, backward_weight_s, transfer_s, pair_saving_s,
    )  # fmt: skip


def in_flight(
    schedule: Schedule | Array, num_ranks: Array, num_chunks: Array, num_micro_batches: Array, rank: Array
) -> Array:
    """How many micro-batches' activations a rank keeps at most; all arguments broadcast.

    1 is what one micro-batch keeps on all chunks of the rank together: interleaved schedules keep fractions.
    Where weight gradients are computed apart an activation counts until that is done. DualPipe's 1 is one
    micro-batch on one of the rank's two stages. Sources as above; Korthikanti et al. 2022, arXiv 2205.05198,
    appendix B, for interleaved.
    """
    return _by_schedule(_IN_FLIGHT, schedule, num_ranks, num_chunks, num_micro_batches, rank)


def _by_schedule(
    formulas: dict[Schedule, Callable[..., Array]], schedule: Schedule | Array, *args: Array
) -> Array:
    """Evaluate the formula of each schedule on the elements that have it."""
    if isinstance(schedule, Schedule):
        return formulas[schedule](*args)
    present = np.unique(schedule)
    if len(present) == 1:
        return formulas[SCHEDULES[present[0]]](*args)
    result = np.empty(np.broadcast_shapes(np.shape(schedule), *(np.shape(a) for a in args)))
    index = np.broadcast_to(schedule, result.shape)
    for i in present:
        chosen = index == i
        # Numbers stay numbers: most of a search's columns are.
        some = (a if np.ndim(a) == 0 else np.broadcast_to(a, result.shape)[chosen] for a in args)
        result[chosen] = formulas[SCHEDULES[i]](*some)
    return result


def _gpipe(p: Array, v: Array, m: Array, F: Array, B: Array, W: Array, x: Array, s: Array) -> Array:
    return (p - 1) * (F + B + W + 2 * x)


def _one_f_one_b(p: Array, v: Array, m: Array, F: Array, B: Array, W: Array, x: Array, s: Array) -> Array:
    return (p - 1) * (F + B + W + 2 * x) + 2 * x * ((m - 1) * (p - 1) // p)


def _interleaved(p: Array, v: Array, m: Array, F: Array, B: Array, W: Array, x: Array, s: Array) -> Array:
    # With m < p a rank has nothing to do between its last micro-batch of a chunk and the first of the next.
    passes = p - 1 + (v - 1) * np.maximum(0, p - m)
    return passes * (F + B + W) / v + 2 * (p * v - 1) * x


def _zero_bubble(p: Array, v: Array, m: Array, F: Array, B: Array, W: Array, x: Array, s: Array) -> Array:
    q, filled = p - 1, np.minimum(m, p) - 1
    # Weight gradients also hide the round trips that 1F1B exposes, until they are shorter than a round trip.
    round_trips = np.maximum(0, (m - 1) * q // p - q)
    paths = (
        q * F + (q - filled) * B + 3 * q * x,
        (q - filled) * F + q * B + 2 * q * x,
        q * (F + B) - filled * W + 4 * q * x + round_trips * np.maximum(0, 2 * x - W),
    )
    return reduce(np.maximum, paths)


def _zbv(p: Array, v: Array, m: Array, F: Array, B: Array, W: Array, x: Array, s: Array) -> Array:
    q, f, b, w = p - 1, F / v, B / v, W / v
    paths = (
        b + (q - 1) * w + 3 * q * x,
        f + (q - 1) * w + (3 * q - 2) * x,
        q * b + (5 * q - 2) * x,
        2 * q * (b - w) + (6 * q - 2) * x,
        (2 * q - 1) * f - (q - 1) * b + (3 * q - 2) * x,
        (2 * q - 1) * f + b - 2 * q * w + (4 * q - 2) * x,
        2 * q * f - q * b - w + 3 * q * x,
        2 * q * f - (2 * q + 1) * w + 4 * q * x,
    )
    return reduce(np.maximum, paths)


def _dualpipe(p: Array, v: Array, m: Array, F: Array, B: Array, W: Array, x: Array, s: Array) -> Array:
    h = np.maximum(p // 2, 1)
    num_pairs = m - h - 2  # on the critical path
    fill = np.maximum(2 * (h - 1) * F, (h - 2) * F + (h - 1) * (B + x))
    drain = (h - 1) * np.maximum(0, B - W + x)
    num_transfers = m + p - 2 - (m // 2 + h - 2) // h
    return fill + drain + num_transfers * x - num_pairs * s


_WAITING = {
    Schedule.GPIPE: _gpipe,
    Schedule.ONE_F_ONE_B: _one_f_one_b,
    Schedule.INTERLEAVED: _interleaved,
    Schedule.ZERO_BUBBLE: _zero_bubble,
    Schedule.ZBV: _zbv,
    Schedule.DUALPIPE: _dualpipe,
}


def _interleaved_in_flight(p: Array, v: Array, m: Array, rank: Array) -> Array:
    return np.minimum(m * v, 2 * (p - 1 - rank) + (v - 1) * _groups(p, m) + 1) / v


def _groups(p: Array, m: Array) -> Array:
    """`interleaved_group` of arrays: p almost everywhere, the others are few distinct pairs."""
    p, m = np.broadcast_arrays(p, m)
    group = np.array(np.minimum(p, m))
    uneven = (m > p) & (m % p != 0)
    if uneven.any():
        pairs, which = np.unique(np.stack([p[uneven], m[uneven]]), axis=1, return_inverse=True)
        sizes = np.array([interleaved_group(int(p), int(m)) for p, m in pairs.T])
        group[uneven] = sizes[which.reshape(-1)]
    return group[()]


_IN_FLIGHT = {
    Schedule.GPIPE: lambda p, v, m, rank: m,
    Schedule.ONE_F_ONE_B: lambda p, v, m, rank: np.minimum(m, p - rank),
    Schedule.INTERLEAVED: _interleaved_in_flight,
    Schedule.ZERO_BUBBLE: lambda p, v, m, rank: np.minimum(m, p),
    Schedule.ZBV: lambda p, v, m, rank: np.minimum(m, p),
    Schedule.DUALPIPE: lambda p, v, m, rank: np.minimum(m, p + 1),
}
