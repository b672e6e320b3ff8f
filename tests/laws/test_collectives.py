"""Laws of collectives and overlap for any fabric and any group to 131,072 ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.cost.collectives import (
    Network,
    all_gather_s,
    all_reduce_s,
    all_to_all_hierarchical_s,
    all_to_all_s,
    distinct_destinations,
    group,
    reduce_scatter_s,
    ring_all_reduce_s,
    send_receive_s,
)
from meshwright.cost.overlap import exposed_s

LAST = 131_072
SLACK = 1 + 1e-9
SIZES = st.one_of(st.integers(1, LAST), st.integers(0, 17).map(lambda k: 2**k))
DOUBLINGS = st.integers(0, 16).map(lambda k: 2**k)
STRIDES = st.integers(0, 10).map(lambda k: 2**k)
BYTES = st.floats(1.0, 1e12)
SECONDS = st.floats(0.0, 1e3)
SLOWDOWNS = st.floats(1.0, 5.0)
COLLECTIVES = (all_gather_s, reduce_scatter_s, all_reduce_s, all_to_all_s)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    up = draw(st.floats(1e10, 2e12))
    up_ratio = draw(st.floats(0.5, 1.0))
    domain = draw(st.sampled_from([1, 2, 4, 8, 64, 72]))
    peer_ratio, in_switch = draw(st.sampled_from([(1.0, 0.0), (1.0, 0.7), (1.0, 1.0), (1 / 7, 0.0)]))
    return Network(
        domain=domain,
        pod_devices=domain * draw(st.sampled_from([1, 16, 32, 1024])),
        rail_optimized=draw(st.integers(0, 1)),
        up_bytes_per_s=up,
        up_peer_bytes_per_s=up * peer_ratio,
        up_all_to_all_ratio=up_ratio,
        up_switch_bytes_per_s=max(up * in_switch, 1e-6),
        up_step_s=draw(st.floats(0, 1e-5)),
        out_bytes_per_s=up * draw(st.floats(0.01, 1.0)),
        out_all_to_all_ratio=draw(st.floats(0.5, 1.0)),
        out_step_s=draw(st.floats(0, 1e-3)),
        out_peer_step_s=draw(st.floats(0, 1e-3)),
        out_message_s=draw(st.floats(0, 1e-5)),
        spine_ratio=draw(st.floats(0.05, 1.0)),
        congestion_exponent=draw(st.sampled_from([0.0, 0.5])),
        log_gather=draw(st.integers(0, 1)),
        launch_s=draw(st.floats(0, 1e-4)),
        fill_s=draw(st.floats(0, 1e-3)),
        fill_bytes=draw(st.floats(1e3, 1e8)),
        overlap_ratio=draw(st.floats(0, 1)),
    )


@given(networks(), SIZES, STRIDES, BYTES)
def test_never_beats_the_wire(net, size, stride, num_bytes):
    """Bytes that must enter a domain, over the ports that the group has there; and those that must enter a
    device, over all its links."""
    g = group(size=size, stride=stride, net=net)
    ports = g.inner * net.out_bytes_per_s
    links = net.up_bytes_per_s + net.out_bytes_per_s
    for function, passes in ((all_gather_s, 1), (reduce_scatter_s, 1), (all_reduce_s, 2)):
        seconds = function(num_bytes, g) * SLACK
        if g.outer > 1:
            # What the other domains hold comes in once to be gathered; what is summed also goes out once.
            assert seconds >= num_bytes * (1 - 1 / g.outer) * passes / ports
        if g.inner > 1:
            assert seconds >= num_bytes * (1 - 1 / size) / links
    if g.outer > 1:
        remote = num_bytes * (1 - 1 / g.outer)
        assert all_to_all_s(num_bytes, g) * SLACK >= remote / net.out_bytes_per_s


@given(networks(), SIZES, STRIDES, BYTES, st.integers(1, 16))
def test_dispatch_never_beats_the_wire(net, size, stride, one_copy, copies):
    g = group(size=size, stride=stride, net=net)
    seconds = all_to_all_hierarchical_s(one_copy, g, copies=copies) * SLACK
    remote = distinct_destinations(copies, g.outer) * (1 - 1 / g.outer)
    assert seconds >= one_copy * remote / net.out_bytes_per_s
    if g.outer == 1:
        inside = distinct_destinations(copies, size) * (1 - 1 / size)
        assert seconds >= one_copy * inside / net.up_bytes_per_s


@given(networks(), SIZES, STRIDES, BYTES)
def test_all_reduce_lies_between_one_pass_and_two(net, size, stride, num_bytes):
    g = group(size=size, stride=stride, net=net)
    scatter, gather = reduce_scatter_s(num_bytes, g), all_gather_s(num_bytes, g)
    reduce = all_reduce_s(num_bytes, g)
    assert reduce <= (scatter + gather) * SLACK
    assert reduce <= ring_all_reduce_s(num_bytes, g) * SLACK
    if net.log_gather:  # with rings alone for gathers, the all-reduce's tree may well be faster
        assert reduce * SLACK >= scatter


@given(networks(), SIZES, STRIDES, BYTES, st.floats(1.0, 100.0))
def test_more_bytes_take_longer_but_never_more_than_in_proportion(net, size, stride, num_bytes, factor):
    g = group(size=size, stride=stride, net=net)
    for function in (*COLLECTIVES, send_receive_s):
        less, more = function(num_bytes, g), function(num_bytes * factor, g)
        assert less <= more * SLACK
        assert more <= less * factor * SLACK


@given(networks(), DOUBLINGS, STRIDES, BYTES)
def test_more_ranks_take_longer(net, size, stride, num_bytes):
    """On a switch, for powers of two: a ragged group has fewer ports a domain than the next full one."""
    assume(net.domain != 72)
    net = replace(net, up_peer_bytes_per_s=net.up_bytes_per_s)
    # A port as fast as the scale-up link would make a second node welcome.
    assume(2 * net.out_bytes_per_s * net.out_all_to_all_ratio <= net.up_bytes_per_s * net.up_all_to_all_ratio)
    small, large = (group(size=n, stride=stride, net=net) for n in (size, 2 * size))
    for function in (all_gather_s, all_reduce_s, all_to_all_s):
        if function is all_reduce_s and size > 1 and net.up_switch_bytes_per_s > 1:
            continue  # (1 + 1/g) S falls with g: reduction in the switch is better in larger domains
        assert function(num_bytes, small) <= function(num_bytes, large) * SLACK


@given(networks(), SIZES, STRIDES, BYTES, st.floats(1.0, 10.0))
def test_a_faster_link_never_costs_time(net, size, stride, num_bytes, factor):
    for name in ("up_bytes_per_s", "up_peer_bytes_per_s", "out_bytes_per_s", "up_switch_bytes_per_s"):
        faster = replace(net, **{name: getattr(net, name) * factor})
        before, after = (group(size=size, stride=stride, net=n) for n in (net, faster))
        for function in (*COLLECTIVES, send_receive_s):
            assert function(num_bytes, after) <= function(num_bytes, before) * SLACK


@given(networks(), STRIDES, BYTES)
def test_a_group_of_one_costs_nothing(net, stride, num_bytes):
    g = group(size=1, stride=stride, net=net)
    assert all(function(num_bytes, g) == 0 for function in (*COLLECTIVES, send_receive_s))
    assert all_to_all_hierarchical_s(num_bytes, g, copies=8) == 0


@given(networks(), SIZES, STRIDES, BYTES, st.integers(1, 16))
def test_dispatch_with_one_copy_a_domain_is_no_slower_than_flat(net, size, stride, one_copy, copies):
    g = group(size=size, stride=stride, net=net)
    assume(g.outer > 1)
    # Forwarding needs a scale-up link at least twice as fast as a port, as every such machine has.
    assume(2 * g.all_to_all_up_s_per_byte <= g.all_to_all_far_s_per_byte)
    flat = all_to_all_s(one_copy * copies, g)
    assert all_to_all_hierarchical_s(one_copy, g, copies=copies) <= flat * SLACK


@given(networks(), st.lists(SIZES, min_size=1, max_size=20), STRIDES, st.floats(0, 1e12))
def test_always_finite(net, sizes, stride, num_bytes):
    with np.errstate(all="raise", under="ignore"):
        g = group(size=np.array(sizes), stride=stride, net=net)
        for function in (*COLLECTIVES, send_receive_s, ring_all_reduce_s):
            seconds = function(num_bytes, g)
            assert np.all(np.isfinite(seconds))
            assert np.all(seconds >= 0)


@given(SECONDS, SECONDS, SLOWDOWNS, SLOWDOWNS, st.floats(0, 1))
def test_exposed_lies_between_nothing_and_all(comm, compute, slower_compute, slower_comm, ratio):
    exposed = exposed_s(comm, compute, slower_compute, ratio, comm_slowdown=slower_comm)
    assert 0 <= exposed <= comm * SLACK
    assert (compute + exposed) * SLACK >= max(comm, compute)
    assert exposed * SLACK >= (1 - ratio) * comm


@given(SECONDS, SECONDS, SLOWDOWNS, SLOWDOWNS)
def test_exposed_equals_a_simulation_of_the_two(comm, compute, slower_compute, slower_comm):
    assume(1 / slower_compute + 1 / slower_comm >= 1)  # otherwise one after the other is better, and is taken
    both = min(compute * slower_compute, comm * slower_comm)
    left = (compute - both / slower_compute) + (comm - both / slower_comm)
    total = compute + exposed_s(comm, compute, slower_compute, comm_slowdown=slower_comm)
    assert abs(total - (both + left)) <= 1e-9 * (1 + total)


@given(SECONDS, SECONDS, SECONDS, SLOWDOWNS, SLOWDOWNS)
def test_exposed_grows_with_communication_and_slowdown(comm, more, compute, slowdown, more_slowdown):
    slow, slower = sorted((slowdown, more_slowdown))
    assert exposed_s(comm, compute, slow) <= exposed_s(comm + more, compute, slow) * SLACK
    assert exposed_s(comm, compute, slow) <= exposed_s(comm, compute, slower) * SLACK
