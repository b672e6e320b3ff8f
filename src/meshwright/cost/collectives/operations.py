"""Seconds that one rank waits for a collective.

Symbols: n ranks, N domains with g = n/N members each, S bytes of the whole buffer, a per-step latency.
A time is   launch + steps * a + bytes / rate + fill * S / (S + half)   where the last term is the cost of
changing from the low-latency to the bulk protocol as messages grow. n = 1 costs 0.

Algorithms and their bytes on the wire per rank and direction:
    ring           (n-1)/n S on every link of the ring; a port carries 1/g of it (g rings, one per port)
    doubling       the same bytes in log2 steps, but to far domains, so more of it crosses the spine
    tree           all-reduce only: reduce-scatter inside, tree across domains, all-gather inside
    in the switch  all-reduce only: (1 + 1/g) S per rank inside a domain (NVLS)
    direct         all-to-all: every pair; a rank's remote bytes leave by its own port alone

Ring and tree counts: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in
MPICH", 2005, sections 4.1 to 4.4; Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", 2009; in-switch bytes: Klenk et al., "An in-network architecture for accelerating
shared-memory multiprocessor collectives", ISCA 2020.
"""

from __future__ import annotations

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.collectives.network import Group


def all_gather_s(bytes_total: Array, group: Group) -> Array:
    """All-gather: every rank ends with the whole buffer.

    bytes_total: S, bytes of the gathered buffer (each rank brings S/n).
    """
    return _measured(group, "all_gather", bytes_total, _one_pass_s(bytes_total, group))


def reduce_scatter_s(bytes_total: Array, group: Group) -> Array:
    """Reduce-scatter: every rank ends with its n-th of the sum.

    bytes_total: S, bytes of the buffer that each rank brings (each keeps S/n).
    """
    return _measured(group, "reduce_scatter", bytes_total, _one_pass_s(bytes_total, group))


def all_reduce_s(bytes_total: Array, group: Group) -> Array:
    """All-reduce: every rank ends with the whole sum. The best of two passes (ring or doubling) and the tree.

    bytes_total: S, bytes of the buffer that each rank brings and gets back.
    """
    best = np.minimum(2 * _one_way_s(bytes_total, group), _tree_s(bytes_total, group))
    formula_s = group.launch_s + best + _fill_s(bytes_total, group)
    return _measured(group, "all_reduce", bytes_total, formula_s)


def ring_all_reduce_s(bytes_total: Array, group: Group) -> Array:
    """All-reduce of any size by the flat ring alone; bytes as in `all_reduce_s`."""
    return group.launch_s + 2 * _ring_s(bytes_total, group) + _fill_s(bytes_total, group)


def all_to_all_s(bytes_per_rank: Array, group: Group) -> Array:
    """All-to-all: every rank sends a different n-th of its buffer to every rank, directly.

    bytes_per_rank: bytes of one rank's send buffer, its own n-th (which stays) included. A rank's remote
    share 1 - 1/N leaves by its own port and, on rail-optimised leaves, mostly to other rails, so across the
    spine.
    """
    per_peer = bytes_per_rank / group.size
    remote = group.size - group.inner
    inside_s = per_peer * (group.inner - 1) * group.all_to_all_up_s_per_byte
    across_s = per_peer * remote * group.all_to_all_mixed_s_per_byte + remote * group.message_s
    formula_s = group.launch_s + group.step_s + np.maximum(inside_s, across_s)
    return _measured(group, "all_to_all", bytes_per_rank, formula_s)


def all_to_all_hierarchical_s(bytes_per_copy: Array, group: Group, *, copies: Array, max_domains: Array = 0) -> Array:
    """Mixture-of-experts dispatch (or combine) with one copy per destination domain, forwarded inside it.

    bytes_per_copy: bytes of one copy of all tokens of a rank (tokens * hidden * bytes per element).
    copies: experts per token k. max_domains: domains that one token may go to (node-limited routing); 0: any.
    A token goes to rank i of each chosen domain over rail i, which stays on the leaf inside a pod, and from
    there to the chosen ranks over the scale-up link; both tiers stream at once.
    Source: DeepEP README, section "Performance" (forwarding kernels); DeepSeek-V3 technical report, arXiv
    2412.19437, section 3.2.2.
    """
    limit = np.where(np.asarray(max_domains) > 0, np.minimum(max_domains, group.outer), group.outer)
    domains = np.minimum(distinct_destinations(copies, group.outer), limit)
    ranks = distinct_destinations(copies, limit * group.inner)
    inside_s = bytes_per_copy * ranks * (1 - 1 / group.inner) * group.all_to_all_up_s_per_byte
    # RDMA kernels of their own reach the rate of a ring, not that of NCCL's all-to-all (README, as above: 43 to 58 GB/s
    # of a 50 GB/s port, copies inside the node counted).
    across_s = bytes_per_copy * domains * (1 - 1 / group.outer) * group.far_s_per_byte
    messages_s = (group.outer - 1) * group.message_s
    return group.launch_s + group.step_s + np.maximum(inside_s, across_s + messages_s)


def distinct_destinations(copies: Array, places: Array) -> Array:
    """Expected number of different destinations among `copies` uniform, independent draws from `places`.

    places * (1 - (1 - 1/places)^copies). Experts are drawn without replacement, which spreads a little wider:
    at 8 of 256 experts over 8 places 5.28 against 5.25.

    >>> round(float(distinct_destinations(8, 8)), 2)
    5.25
    """
    return places * (1 - (1 - 1 / places) ** copies)


def send_receive_s(num_bytes: Array, group: Group) -> Array:
    """One message between neighbours of the group, as between pipeline stages.

    Priced at the slowest hop: a group that leaves its domain somewhere sends through a network port. Inside a
    domain one pair gets the rate of one peer link.
    """
    neighbour = np.where(group.outer > 1, group.out_s_per_byte, group.peer_s_per_byte)
    return _measured(group, "send_receive", num_bytes, group.step_s + num_bytes * neighbour)


def _measured(group: Group, kernel: str, num_bytes: Array, formula_s: Array) -> Array:
    """The measured time of this collective inside a machine, else the formula's."""
    if not group.measured.curves:
        return formula_s
    inside_s = group.measured.seconds(kernel, num_bytes, group.size, formula_s)
    return np.where(group.outer > 1, formula_s, inside_s)


def _one_pass_s(bytes_total: Array, group: Group) -> Array:
    return group.launch_s + _one_way_s(bytes_total, group) + _fill_s(bytes_total, group)


def _ring_s(bytes_total: Array, group: Group) -> Array:
    """One pass of the ring: every link carries (n-1)/n S, a port 1/g of it."""
    slowest = np.maximum(group.up_s_per_byte, group.out_s_per_byte / group.inner)
    return group.ring_latency_s + bytes_total * (1 - 1 / group.size) * slowest


def _one_way_s(bytes_total: Array, group: Group) -> Array:
    """All-gather or reduce-scatter by the better of ring and doubling, without launch and fill."""
    ring_s = _ring_s(bytes_total, group)
    slowest = np.maximum(group.up_s_per_byte, group.far_s_per_byte / group.inner)
    doubling_s = group.log_latency_s + bytes_total * (1 - 1 / group.size) * slowest
    return np.where(group.log_gather > 0, np.minimum(ring_s, doubling_s), ring_s)


def _tree_s(bytes_total: Array, group: Group) -> Array:
    """All-reduce as reduce-scatter inside, tree across, all-gather inside; the switch may do the inside."""
    ring_inside = 2 * (1 - 1 / group.inner) * group.up_s_per_byte
    inside = np.minimum(ring_inside, (1 + 1 / group.inner) * group.switch_s_per_byte)
    across = 2 * (1 - 1 / group.outer) / group.inner * group.far_s_per_byte
    hidden = group.overlap_ratio * np.minimum(inside, across)
    return 2 * group.log_latency_s + bytes_total * (inside + across - hidden)


def _fill_s(num_bytes: Array, group: Group) -> Array:
    return group.fill_s * num_bytes / (num_bytes + group.fill_bytes)
