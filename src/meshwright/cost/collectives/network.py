"""Capacity and geometry: a fabric seen from one device, and a communicator placed on it.

Tiers, seen from one device (rates one direction):
    domain   devices joined by the scale-up link (a node, an NVL72 rack)   up_bytes_per_s
    leaf     domains below the same leaf switches (a pod)                  out_bytes_per_s, one network port
    spine    above the leaves                                              out_bytes_per_s * spine_ratio

A device never sends through the network ports of its neighbours: while one group of stride s runs, the s - 1
sibling groups run the same collective over theirs. A group that has g members in a domain owns g ports there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshwright.arrays import Array, Table
from meshwright.calibration.collectives import CollectiveConstants
from meshwright.calibration.communication import MeasuredCollectives
from meshwright.specs.hardware import Fabric

ABSENT_BYTES_PER_S = 1e-6
"""A link that is not there: no plan that needs it is chosen, and zero bytes still take zero time."""


@dataclass(frozen=True, kw_only=True)
class Network(Table):
    """Effective rates and latencies that one device sees. Rates are one direction, after calibration."""

    domain: Array  # devices joined by the scale-up link
    pod_devices: Array  # devices below one set of leaf switches
    rail_optimized: Array  # 1: device i of every domain hangs on leaf switch i
    up_bytes_per_s: Array  # all links of a device together
    up_peer_bytes_per_s: Array  # to one peer: less than all links on a mesh
    up_all_to_all_ratio: Array  # all-to-all's rate over up_bytes_per_s
    up_switch_bytes_per_s: Array  # rate of reduction inside the switch
    up_step_s: Array
    out_bytes_per_s: Array  # per device, with all siblings sending
    out_all_to_all_ratio: Array
    out_step_s: Array  # one dependent step of a collective
    out_peer_step_s: Array  # one message between two devices
    out_message_s: Array  # per remote peer of a flat all-to-all
    spine_ratio: Array  # rate across the spine over out_bytes_per_s: routing efficiency / oversubscription
    congestion_exponent: Array  # the rate falls as (domains/2)^-x
    log_gather: Array  # 0 or 1
    launch_s: Array
    fill_s: Array
    fill_bytes: Array
    overlap_ratio: Array
    measured: MeasuredCollectives = field(default_factory=MeasuredCollectives)


@dataclass(frozen=True, kw_only=True)
class Group(Table):
    """One communicator: its place on the tiers and the cost of a byte there.

    `size` ranks n lie in `outer` domains N, `inner` = n/N in each (a fraction where no even split exists).
    Costs are seconds per byte of one rank's traffic; 0 where the group does not use the tier.
    """

    size: Array
    inner: Array
    outer: Array
    up_s_per_byte: Array  # scale-up traffic over all links of a rank
    peer_s_per_byte: Array  # to one peer in the domain
    all_to_all_up_s_per_byte: Array  # all-to-all inside a domain
    switch_s_per_byte: Array  # reduction in the switch
    out_s_per_byte: Array  # one port, traffic to the next domain of the group
    far_s_per_byte: Array  # one port, traffic spread over all domains of the group, on its own rail
    all_to_all_far_s_per_byte: Array  # the same as an all-to-all
    all_to_all_mixed_s_per_byte: Array  # all-to-all to any rank there: leaves the rail
    ring_latency_s: Array  # one way round
    log_latency_s: Array  # one way along a tree or a doubling
    log_gather: Array
    step_s: Array  # one hop between neighbours of the group; 0 for a group of one
    message_s: Array
    launch_s: Array
    fill_s: Array
    fill_bytes: Array
    overlap_ratio: Array
    measured: MeasuredCollectives


def network_row(fabric: Fabric, constants: CollectiveConstants, *, devices_per_node: int | None = None) -> Network:
    """The effective numbers of a fabric: nominal rates times calibrated efficiencies.

    devices_per_node: to count the devices below one set of leaves; None: a node is a domain, as outside racks
    whose scale-up link spans nodes.
    """
    up, out = constants.up, constants.out
    return Network(
        domain=fabric.scale_up_domain,
        pod_devices=fabric.nodes_per_pod * (devices_per_node or fabric.scale_up_domain),
        rail_optimized=int(fabric.rail_optimized),
        up_bytes_per_s=max(fabric.scale_up_bytes_per_s * up.efficiency, ABSENT_BYTES_PER_S),
        up_peer_bytes_per_s=max(fabric.scale_up_peer_bytes_per_s * up.efficiency, ABSENT_BYTES_PER_S),
        up_all_to_all_ratio=up.all_to_all_efficiency / up.efficiency,
        up_switch_bytes_per_s=max(fabric.scale_up_bytes_per_s * up.in_switch_efficiency, ABSENT_BYTES_PER_S),
        up_step_s=fabric.scale_up_latency_s + up.step_s,
        out_bytes_per_s=max(fabric.scale_out_bytes_per_s * out.efficiency, ABSENT_BYTES_PER_S),
        out_all_to_all_ratio=out.all_to_all_efficiency / out.efficiency,
        out_step_s=fabric.scale_out_latency_s + out.step_s,
        out_peer_step_s=fabric.scale_out_latency_s + out.step_s,
        out_message_s=out.message_s,
        spine_ratio=min(1.0, out.routing_efficiency / fabric.oversubscription),
        congestion_exponent=out.congestion_exponent,
        log_gather=out.log_gather,
        launch_s=up.launch_s,
        fill_s=up.fill_s,
        fill_bytes=up.fill_bytes,
        overlap_ratio=constants.overlap_ratio,
    )


def group(*, size: Array, stride: Array, net: Network, block: Array | None = None, block_stride: Array = 1) -> Group:
    """A communicator of `size` ranks whose neighbours are `stride` devices apart.

    With `block` it is made of blocks of that many ranks, which are `block_stride` devices apart.

    Ranks are laid out innermost axis first: stride 1 for the innermost, then the product of the widths
    inside. A domain holds domain // stride members. Groups are split evenly over as few domains as hold them:
    64 ranks in domains of 72 take one, 128 take two with 64 each.
    """
    local = np.maximum(net.domain // stride, 1)
    if block is not None:
        local = np.minimum(local, block) * np.maximum(net.domain // block_stride, 1)
    outer = -(-size // local)
    inner = size / outer
    several, shares, spans = size > 1, inner > 1, outer > 1
    log_outer = np.log2(outer)

    up = shares / np.minimum(net.up_bytes_per_s, np.maximum(inner - 1, 1) * net.up_peer_bytes_per_s)
    port = spans * np.exp2(net.congestion_exponent * np.maximum(log_outer - 1, 0)) / net.out_bytes_per_s

    # devices between successive domains of the group
    hop = np.maximum(stride if block is None else block_stride, net.domain)
    next_share, far_share = _spine_shares(outer, hop, net.pod_devices)
    on_rail = 1 - net.rail_optimized * (1 - 1 / inner)  # of remote traffic to ranks at random
    mixed_share = 1 - (1 - far_share) * on_rail
    all_to_all_port = port / net.out_all_to_all_ratio

    up_steps_s = np.log2(inner) * net.up_step_s
    return Group(
        size=size,
        inner=inner,
        outer=outer,
        up_s_per_byte=up,
        peer_s_per_byte=shares / net.up_peer_bytes_per_s / net.up_all_to_all_ratio,
        all_to_all_up_s_per_byte=up / net.up_all_to_all_ratio,
        switch_s_per_byte=shares / net.up_switch_bytes_per_s,
        out_s_per_byte=port * np.maximum(1, next_share / net.spine_ratio),
        far_s_per_byte=port * np.maximum(1, far_share / net.spine_ratio),
        all_to_all_far_s_per_byte=all_to_all_port * np.maximum(1, far_share / net.spine_ratio),
        all_to_all_mixed_s_per_byte=all_to_all_port * np.maximum(1, mixed_share / net.spine_ratio),
        ring_latency_s=(outer - 1) * net.out_step_s + up_steps_s,
        log_latency_s=log_outer * net.out_step_s + up_steps_s,
        log_gather=net.log_gather,
        step_s=several * np.where(spans, net.out_peer_step_s, net.up_step_s),
        message_s=net.out_message_s,
        launch_s=several * net.launch_s,
        fill_s=several * net.fill_s,
        fill_bytes=net.fill_bytes,
        overlap_ratio=net.overlap_ratio,
        measured=net.measured,
    )


def _spine_shares(outer: Array, hop: Array, pod_devices: Array) -> tuple[Array, Array]:
    """Shares of a domain's remote traffic that cross the spine: to the next domain, and spread over all.

    The next domain lies `hop` devices on, so hop/pod of all such steps leave the pod. A pod holds pod/hop of
    the `outer` domains (at least 1, at most all); the spine connects the others.
    """
    leaves = outer * hop > pod_devices
    next_share = leaves * np.minimum(1.0, hop / pod_devices)
    in_pod = np.clip(pod_devices / hop, 1, outer)
    return next_share, (outer - in_pod) / np.maximum(outer - 1, 1)
