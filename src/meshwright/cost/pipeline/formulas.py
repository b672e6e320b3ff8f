"""Formulas of each schedule for even stages: seconds that a rank waits, and micro-batches in flight.

Symbols: p ranks, v chunks per rank, m micro-batches; F, B, W seconds that one rank spends on the forward
pass, the gradient of the input and the gradient of the weights of one micro-batch (all its chunks together);
x one transfer between two ranks, overlapped with compute; f = F/v, b = B/v, w = W/v; h = p/2.

A rank works m (F + B + W). If all stages are equal, it also waits

    gpipe        (p-1)(F+B+W+2x)
    1f1b         (p-1)(F+B+W+2x) + 2x floor((m-1)(p-1)/p)
    interleaved  (p-1 + (v-1) max(0, p-m))(f+b+w) + 2(pv-1)x
    zero_bubble  (p-1)(F+B) - (min(m,p)-1) min(F,B,W)                   for x = 0
    zbv          the longest of eight paths, see `zbv_waiting_s`
    dualpipe     max(2(h-1)F, (h-2)F + (h-1)B) + (h-1) max(0, B-W)      for x = 0
    dualpipev    as dualpipe, with f, b, w and h = p                    for x = 0

In 1F1B every transfer is on the critical path: a rank has just as many micro-batches in flight as the round
trip to the last rank and back takes, without slack for the hops. Interleaved chunks have that slack.

Sources: gpipe, 1f1b and interleaved: Narayanan et al. 2021, arXiv 2104.04473, section 2.2. zero_bubble with
F = B = W is (p-1)(F+B-W): Qi et al. 2023, arXiv 2401.10241, section 2.3. dualpipe with F = B is
(h-1)(F&B + B' - 3W), B' = B+W, F&B = F+B': DeepSeek-AI 2024, arXiv 2412.19437, table 2. The general forms and
all terms in x are critical paths that we read off our own event graphs; tests hold them to the simulation.

Exact (tested): every schedule for x = 0; gpipe and 1f1b for every x. For x up to the shortest pass of a chunk
dualpipe is exact, interleaved is if p divides m and zero_bubble if m >= 2p (else they are never short), zbv
is never long and a few percent short, dualpipev never short and up to a tenth long.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.pipeline.orders import interleaved_group


def gpipe_waiting_s(p: Array, v: Array, m: Array, F: Array, B: Array, W: Array, x: Array, s: Array) -> Array:
    """Fill and drain, a transfer each way."""
    return (p - 1) * (F + B + W + 2 * x)


def one_f_one_b_waiting_s(p: Array, v: Array, m: Array, F: Array, B: Array, W: Array, x: Array, s: Array) -> Array:
    """GPipe's bubble, and the round trips of the transfers."""
    return (p - 1) * (F + B + W + 2 * x) + 2 * x * ((m - 1) * (p - 1) // p)


def interleaved_waiting_s(p: Array, v: Array, m: Array, F: Array, B: Array, W: Array, x: Array, s: Array) -> Array:
    """The bubble of 1F1B over v, and a transfer for each chunk."""
    # With m < p a rank has nothing to do between its last micro-batch of a chunk and the first of the next.
    passes = p - 1 + (v - 1) * np.maximum(0, p - m)
    return passes * (F + B + W) / v + 2 * (p * v - 1) * x


def zero_bubble_waiting_s(p: Array, v: Array, m: Array, F: Array, B: Array, W: Array, x: Array, s: Array) -> Array:
    """The longest of three paths."""
    q, filled = p - 1, np.minimum(m, p) - 1
    # Weight gradients also hide the round trips that 1F1B exposes, until they are shorter than a round trip.
    round_trips = np.maximum(0, (m - 1) * q // p - q)
    paths = (
        q * F + (q - filled) * B + 3 * q * x,
        (q - filled) * F + q * B + 2 * q * x,
        q * (F + B) - filled * W + 4 * q * x + round_trips * np.maximum(0, 2 * x - W),
    )
    return reduce(np.maximum, paths)


def zbv_waiting_s(p: Array, v: Array, m: Array, F: Array, B: Array, W: Array, x: Array, s: Array) -> Array:
    """The longest of eight paths."""
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


def dualpipe_waiting_s(p: Array, v: Array, m: Array, F: Array, B: Array, W: Array, x: Array, s: Array) -> Array:
    """Fill, drain and transfers, less what overlapped pairs save."""
    h = np.maximum(p // 2, 1)
    num_pairs = m - h - 2  # on the critical path
    fill = np.maximum(2 * (h - 1) * F, (h - 2) * F + (h - 1) * (B + x))
    drain = (h - 1) * np.maximum(0, B - W + x)
    num_transfers = m + p - 2 - (m // 2 + h - 2) // h
    return fill + drain + num_transfers * x - num_pairs * s


def dualpipe_v_waiting_s(p: Array, v: Array, m: Array, F: Array, B: Array, W: Array, x: Array, s: Array) -> Array:
    """DualPipe's on twice the ranks, whose stages are this one's chunks; each micro-batch passes both halves."""
    return dualpipe_waiting_s(2 * p, v, 2 * m, F / v, B / v, W / v, x, s / v)


def gpipe_in_flight(p: Array, v: Array, m: Array, rank: Array) -> Array:
    """All micro-batches."""
    return m


def one_f_one_b_in_flight(p: Array, v: Array, m: Array, rank: Array) -> Array:
    """One micro-batch for each rank from this one to the last, at most all."""
    return np.minimum(m, p - rank)


def interleaved_in_flight(p: Array, v: Array, m: Array, rank: Array) -> Array:
    """Micro-batches in the rounds of `interleaved_group`, in fractions of 1/v."""
    return np.minimum(m * v, 2 * (p - 1 - rank) + (v - 1) * _groups(p, m) + 1) / v


def _groups(p: Array, m: Array) -> Array:
    """`interleaved_group` of arrays: p almost everywhere, the others are few distinct pairs."""
    p, m = np.broadcast_arrays(p, m)
    group = np.array(np.minimum(p, m))
    uneven = (m > p) & (m % p != 0)
    if uneven.any():
        some_p, some_m = p[uneven], m[uneven]
        ranks, counts = np.unique(some_p), np.unique(some_m)
        row, column = np.searchsorted(ranks, some_p), np.searchsorted(counts, some_m)
        sizes = np.zeros((len(ranks), len(counts)))
        sizes[row, column] = -1
        for i, j in np.argwhere(sizes):
            sizes[i, j] = interleaved_group(int(ranks[i]), int(counts[j]))
        group[uneven] = sizes[row, column]
    return group[()]


def zero_bubble_in_flight(p: Array, v: Array, m: Array, rank: Array) -> Array:
    """One for each rank, on every rank. ZB-V as well."""
    return np.minimum(m, p)


def dualpipe_in_flight(p: Array, v: Array, m: Array, rank: Array) -> Array:
    """One for each rank and one more, over the two stages of a rank."""
    return np.minimum(m, p + 1)


def dualpipe_v_in_flight(p: Array, v: Array, m: Array, rank: Array) -> Array:
    """As many chunks as DualPipe on twice the ranks, in fractions of 1/v."""
    return np.minimum(2 * m, 2 * p + 1) / v
