"""Communication behind compute: how much of it the step still sees.

Symbols: C compute seconds alone, M communication seconds alone, h the share of M that may overlap, γ how many
times slower compute runs while communication is active (it takes compute units, memory bandwidth and power),
δ the same for communication. While both are active for t seconds, compute advances t/γ and communication t/δ;
the rest then runs at full speed. So with H = h M the two take

    max(C + δH (1 - 1/γ),  H + γC (1 - 1/δ)),    and never more than C + H one after the other.

"Exposed" is what communication adds to C. Every function is plain arithmetic on numbers or arrays.
Sources: slowdowns, "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep
Learning", arXiv 2507.03114, abstract (mean 18.9 %, largest 40 %).
"""

from __future__ import annotations

import numpy as np

from meshwright.arrays import Array


def exposed_s(
    comm_s: Array,
    compute_s: Array,
    compute_slowdown: Array = 1.0,
    overlap_ratio: Array = 1.0,
    *,
    comm_slowdown: Array = 1.0,
) -> Array:
    """Seconds that `comm_s` adds to `compute_s` when `overlap_ratio` of it may run beside.

    Between 0 and comm_s. Full overlap with both slowdowns 1 exposes max(0, comm - compute).

    >>> float(exposed_s(3.0, 2.0)), float(exposed_s(1.0, 2.0, 1.25).round(6))
    (1.0, 0.2)
    """
    overlapped_s = overlap_ratio * comm_s
    comm_ends_first_s = overlapped_s * comm_slowdown * (1 - 1 / compute_slowdown)
    compute_ends_first_s = overlapped_s - compute_s + compute_slowdown * compute_s * (1 - 1 / comm_slowdown)
    added_s = np.clip(np.maximum(comm_ends_first_s, compute_ends_first_s), 0.0, overlapped_s)
    return added_s + (comm_s - overlapped_s)
