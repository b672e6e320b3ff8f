"""Communication behind compute: how much of it the step still sees.

Symbols: C compute seconds alone, M communication seconds alone, h the share of M that may overlap, γ how many
times slower compute runs while communication is active (it takes compute units, memory bandwidth and power),
δ the same for communication. While both are active for t seconds, compute advances t/γ and communication t/δ;
what is left then runs at full speed. So with H = h M the two take

    max(C + δH (1 - 1/γ),  H + γC (1 - 1/δ)),    and never more than C + H one after the other.

"Exposed" is what communication adds to C. Every function is plain arithmetic on numbers or arrays.
Sources: slowdowns, "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep
Learning", arXiv 2507.03114, abstract (mean 18.9 %, largest 40 %); unit-wise prefetch, Zhao et al., "PyTorch
FSDP", arXiv 2304.11277, section 3.3.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from meshwright.cost.tables import Array


class ExpertOverlap(IntEnum):
    """What runs beside the all-to-all of experts."""

    NONE = 0
    SHARED = 1  # the shared expert of the same tokens
    BATCH = 2  # another micro-batch's compute (1F1B batch-level overlap, DualPipe)


def exposed_s(
    comm_s: Array,
    compute_s: Array,
    compute_slowdown: Array = 1.0,
    overlap_ratio: Array = 1.0,
    *,
    comm_slowdown: Array = 1.0,
) -> Array:
    """Seconds that `comm_s` adds to `compute_s` when `overlap_ratio` of it may run beside.

    Between 0 and comm_s. With both slowdowns 1 and full overlap it is max(0, comm - compute).

    >>> float(exposed_s(3.0, 2.0)), float(exposed_s(1.0, 2.0, 1.25).round(6))
    (1.0, 0.2)
    """
    beside_s = overlap_ratio * comm_s
    comm_ends_first_s = beside_s * comm_slowdown * (1 - 1 / compute_slowdown)
    compute_ends_first_s = beside_s - compute_s + compute_slowdown * compute_s * (1 - 1 / comm_slowdown)
    added_s = np.clip(np.maximum(comm_ends_first_s, compute_ends_first_s), 0.0, beside_s)
    return added_s + (comm_s - beside_s)


def pipelined_s(comm_s: Array, compute_s: Array, num_chunks: Array, compute_slowdown: Array = 1.0) -> Array:
    """Exposed seconds when the two are cut into chunks and one chunk of communication stays alone at an end.

    A chunk is sent once its compute is done (or computed once it has arrived), so 1/k of communication has
    nothing beside it and the other chunks run beside k - 1 chunks of compute. Tensor parallelism that
    interleaves a GEMM with its collective, and gradient buckets of data parallelism, both have this shape.
    k = 1 hides nothing.
    """
    rest = 1 - 1 / num_chunks
    return comm_s / num_chunks + exposed_s(rest * comm_s, rest * compute_s, compute_slowdown)


def sharded_forward_s(
    gather_s: Array, forward_s: Array, num_units: Array, compute_slowdown: Array = 1.0
) -> Array:
    """Exposed all-gathers of one forward pass with fully sharded parameters and prefetch of one unit.

    gather_s, forward_s: of one unit (usually a layer). The first unit's gather has nothing before it; that of
    unit j + 1 runs beside the forward of unit j.
    """
    return gather_s + (num_units - 1) * exposed_s(gather_s, forward_s, compute_slowdown)


def sharded_backward_s(
    gather_s: Array,
    scatter_s: Array,
    backward_s: Array,
    num_units: Array,
    compute_slowdown: Array = 1.0,
) -> Array:
    """Exposed all-gathers and reduce-scatters of one backward pass with fully sharded parameters.

    gather_s (0 where parameters are kept from the forward pass), scatter_s, backward_s: of one unit. While
    unit j computes, the gather of j - 1 and the reduce-scatter of j + 1 share the wire; the first gather and
    the last reduce-scatter have nothing beside them.
    """
    inner_s = exposed_s(gather_s + scatter_s, backward_s, compute_slowdown)
    return gather_s + (num_units - 1) * inner_s + scatter_s


def once_a_step_s(
    scatter_s: Array,
    gather_s: Array,
    backward_s: Array,
    forward_s: Array,
    num_buckets: Array,
    compute_slowdown: Array = 1.0,
) -> Array:
    """Exposed communication of ZeRO-1: gradients once behind the last backward, parameters behind the next
    forward.

    scatter_s, gather_s: of all of a rank's parameters. backward_s: of the micro-batches it may hide behind
    (the last one when gradients accumulate; all of them when each reduces its own). forward_s: 0 when
    parameters are gathered before the next step begins.
    """
    return pipelined_s(scatter_s, backward_s, num_buckets, compute_slowdown) + pipelined_s(
        gather_s, forward_s, num_buckets, compute_slowdown
    )


def expert_exchange_s(
    comm_s: Array,
    shared_s: Array,
    other_s: Array,
    overlap: Array,
    compute_slowdown: Array = 1.0,
) -> Array:
    """Exposed all-to-all of experts under an `ExpertOverlap`.

    comm_s: all dispatches and combines of the span; shared_s, other_s: compute of shared experts, and of the
    other micro-batch, in the same span.
    """
    window_s = np.where(overlap == ExpertOverlap.SHARED, shared_s, 0.0)
    window_s = np.where(overlap == ExpertOverlap.BATCH, other_s, window_s)
    return exposed_s(comm_s, window_s, compute_slowdown)


def slowdown_of_units(num_units: Array, units_taken: Array) -> Array:
    """Slowdown of compute that loses `units_taken` of `num_units` compute units to communication kernels."""
    return num_units / (num_units - units_taken)
