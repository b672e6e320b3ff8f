"""Closed forms, published latencies, and the ways in which other models of collectives went wrong."""

from __future__ import annotations

import csv
import re
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from meshwright.calibration import collectives
from meshwright.catalog.clusters import cluster, fabric
from meshwright.cost.collectives import (
    Network,
    all_gather_s,
    all_reduce_s,
    all_to_all_hierarchical_s,
    all_to_all_s,
    constants_for,
    constants_from,
    distinct_destinations,
    group,
    network_row,
    reduce_scatter_s,
    ring_all_reduce_s,
    send_receive_s,
)
from meshwright.files import toml_table
from meshwright.specs.estimate import Tier
from meshwright.specs.hardware import Fabric

GB = 1e9


def ideal(**changes: float) -> Network:
    """8 devices at 100 GB/s, one 10 GB/s port each, no latency, no losses."""
    base = {f.name: 0.0 for f in fields(Network) if f.name != "measured"} | {
        "domain": 8, "pod_devices": 1 << 40, "rail_optimized": 1, "up_bytes_per_s": 100 * GB,
        "up_peer_bytes_per_s": 100 * GB, "up_all_to_all_ratio": 1.0, "up_switch_bytes_per_s": 1e-6,
        "out_bytes_per_s": 10 * GB, "out_all_to_all_ratio": 1.0, "spine_ratio": 1.0, "log_gather": 1,
        "fill_bytes": 1.0,
    }  # fmt: skip
    return Network(**(base | changes))


def net_of(name: str) -> Network:
    c = cluster(name)
    return network_row(c.fabric, constants_for(c.fabric), devices_per_node=c.devices_per_node)


class TestGroup:
    @pytest.mark.parametrize(
        ("size", "stride", "inner", "outer"),
        [(1, 1, 1, 1), (8, 1, 8, 1), (4, 2, 4, 1), (8, 2, 4, 2), (16, 1, 8, 2), (16, 8, 1, 16), (4, 64, 1, 4)],
    )
    def test_members_per_domain(self, size, stride, inner, outer):
        g = group(size=size, stride=stride, net=ideal())
        assert (g.inner, g.outer) == (inner, outer)

    def test_members_are_split_evenly_over_as_few_racks_as_hold_them(self):
        rack = ideal(domain=72)
        assert group(size=64, stride=1, net=rack).outer == 1
        g = group(size=128, stride=1, net=rack)
        assert (g.outer, g.inner) == (2, 64)

    def test_one_group_never_gets_the_ports_of_its_siblings(self):
        """Stride 4 in a node of 8: two members, two ports, while three siblings use the other six."""
        dense = all_gather_s(8 * GB, group(size=16, stride=1, net=ideal()))
        strided = all_gather_s(8 * GB, group(size=16, stride=4, net=ideal()))
        assert dense == pytest.approx(8 * GB * 15 / 16 / (8 * 10 * GB))
        assert strided == pytest.approx(8 * GB * 15 / 16 / (2 * 10 * GB))

    def test_a_rail_stays_below_its_leaves_until_the_pod_ends(self):
        thin = ideal(pod_devices=256, spine_ratio=0.25)
        inside = group(size=32, stride=8, net=thin)
        far_apart = group(size=32, stride=256, net=thin)
        assert inside.out_s_per_byte == pytest.approx(1 / (10 * GB))
        assert far_apart.out_s_per_byte == pytest.approx(4 / (10 * GB))

    def test_mesh_gives_a_small_group_few_links(self):
        mesh = ideal(up_bytes_per_s=70 * GB, up_peer_bytes_per_s=10 * GB)
        assert all_reduce_s(GB, group(size=2, stride=1, net=mesh)) == pytest.approx(0.1)
        assert all_reduce_s(GB, group(size=8, stride=1, net=mesh)) == pytest.approx(2 * 7 / 8 / 70)


class TestClosedForms:
    def test_ring_inside_one_domain(self):
        g = group(size=8, stride=1, net=ideal())
        assert all_gather_s(8 * GB, g) == pytest.approx(0.07)
        assert reduce_scatter_s(8 * GB, g) == pytest.approx(0.07)
        assert all_reduce_s(8 * GB, g) == pytest.approx(0.14)

    def test_reduction_in_the_switch(self):
        g = group(size=8, stride=1, net=ideal(up_switch_bytes_per_s=90 * GB))
        assert all_reduce_s(8 * GB, g) == pytest.approx(8 * (1 + 1 / 8) / 90)

    def test_tree_beats_the_ring_when_latency_rules(self):
        slow_steps = group(size=1024, stride=8, net=ideal(out_step_s=1e-5))
        assert all_reduce_s(1000.0, slow_steps) == pytest.approx(2 * 10 * 1e-5, rel=1e-2)
        assert ring_all_reduce_s(1000.0, slow_steps) == pytest.approx(2 * 1023 * 1e-5, rel=1e-2)

    def test_two_tiers_hide_behind_each_other_by_the_overlap_ratio(self):
        """Tree all-reduce on 2 nodes: 2 * 7/8 S at 100 GB/s inside, 2 * 1/2 S/8 at 10 GB/s across."""
        inside, across = 8 * 2 * 7 / 8 / 100, 8 / 8 / 10
        for ratio, expected in ((0.0, inside + across), (1.0, max(inside, across))):
            net = ideal(overlap_ratio=ratio, log_gather=0, out_step_s=1.0, up_step_s=0.0)
            g = replace(group(size=16, stride=1, net=net), ring_latency_s=100.0)
            assert all_reduce_s(8 * GB, g) == pytest.approx(expected + 2 * 1.0)

    def test_all_to_all_uses_one_port_a_rank(self):
        """1.6 GB a rank over 16 ranks: 0.8 GB leave by the rank's own 10 GB/s port."""
        assert all_to_all_s(1.6 * GB, group(size=16, stride=1, net=ideal())) == pytest.approx(0.08)

    def test_all_to_all_leaves_the_rail_and_dispatch_does_not(self):
        thin = group(size=64, stride=1, net=ideal(spine_ratio=0.25))
        full = group(size=64, stride=1, net=ideal())
        flat = all_to_all_s(GB, thin) / all_to_all_s(GB, full)
        assert flat == pytest.approx(7 / 8 / 0.25)
        same = all_to_all_hierarchical_s(GB, thin, copies=8), all_to_all_hierarchical_s(GB, full, copies=8)
        assert same[0] == pytest.approx(same[1])

    def test_dispatch_sends_one_copy_per_domain(self):
        g = group(size=64, stride=1, net=ideal(up_bytes_per_s=1e15, up_peer_bytes_per_s=1e15))
        free = all_to_all_hierarchical_s(GB, g, copies=8)
        limited = all_to_all_hierarchical_s(GB, g, copies=8, max_domains=4)
        assert free == pytest.approx(distinct_destinations(8, 8) * 7 / 8 / 10)
        assert limited == pytest.approx(4 * 7 / 8 / 10)

    def test_distinct_destinations(self):
        draws = np.random.default_rng(0).integers(0, 8, size=(20_000, 8))
        seen = np.mean([len(set(row)) for row in draws])
        assert distinct_destinations(8, 8) == pytest.approx(seen, rel=0.01)

    def test_pipeline_neighbours(self):
        assert send_receive_s(GB, group(size=4, stride=8, net=ideal())) == pytest.approx(0.1)
        assert send_receive_s(GB, group(size=4, stride=2, net=ideal())) == pytest.approx(0.01)
        assert send_receive_s(GB, group(size=1, stride=8, net=ideal())) == 0.0


class TestKnownMistakes:
    """Mistakes of published projection tools, which must not happen here."""

    def test_all_reduce_of_1_gib_on_50_gb_s_ports_takes_the_wire_time_and_grows_with_nodes(self):
        net = net_of("mi355x-8x64")
        wire = {2: 2.68e-3, 4: 4.03e-3, 8: 4.70e-3, 16: 5.03e-3}  # 2 (N-1)/N S / (8 * 50 GB/s)
        times = {n: float(all_reduce_s(2**30, group(size=8 * n, stride=1, net=net))) for n in wire}
        assert all(times[n] >= wire[n] for n in wire)
        assert times[2] < times[4] < times[8] < times[16]

    def test_wide_all_to_all_does_not_fail(self):
        net = net_of("mi355x-8x12288")
        sizes = np.array([208, 256, 1024, 65_536, 98_304])
        times = all_to_all_s(2**29, group(size=sizes, stride=1, net=net))
        assert np.all(np.isfinite(times))
        assert np.all(np.diff(times) > 0)

    def test_all_reduce_on_12288_nodes_is_not_a_ring(self):
        rail = group(size=12_288, stride=8, net=net_of("mi355x-8x12288"))
        assert all_reduce_s(2**20, rail) < 5e-3
        assert ring_all_reduce_s(2**20, rail) > 0.1

    def test_data_parallel_reduction_grows_with_replicas(self):
        net = net_of("mi355x-8x1024")
        times = all_reduce_s(1e9, group(size=np.array([2, 4, 16, 64, 1024]), stride=8, net=net))
        assert np.all(np.diff(times) > 0)


# NCCL 2.29 on 8 GPUs: seconds of a small message, large-message algorithm bandwidth
PUBLISHED = {
    "a100-8x1": {"gather": (17e-6, 235e9), "reduce": (24e-6, 127e9), "all-to-all": (15e-6, 232e9)},
    "h100-8x1": {"gather": (12e-6, 383e9), "reduce": (17.5e-6, 254e9), "all-to-all": (9.4e-6, 360e9)},
    "b200-8x1": {"gather": (18.5e-6, 705e9), "reduce": (27e-6, 402e9), "all-to-all": (13e-6, 644e9)},
}
FUNCTIONS = {"gather": all_gather_s, "reduce": all_reduce_s, "all-to-all": all_to_all_s}


DATA = Path(collectives.__file__).parent / "data" / "collectives.toml"


class TestCalibration:
    @pytest.mark.parametrize("name", PUBLISHED)
    @pytest.mark.parametrize("what", FUNCTIONS)
    def test_latency_and_bandwidth_of_one_node(self, name, what):
        latency_s, bytes_per_s = PUBLISHED[name][what]
        g = group(size=8, stride=1, net=net_of(name))
        assert float(FUNCTIONS[what](1.0, g)) == pytest.approx(latency_s, rel=0.2)
        assert 2**33 / float(FUNCTIONS[what](2**33, g)) == pytest.approx(bytes_per_s, rel=0.2)

    @pytest.mark.parametrize(("gpu", "name"), [("H200", "h200-8x1"), ("B200", "b200-8x1")])
    def test_measured_sweep_of_all_reduce(self, gpu, name):
        """Bus bandwidth from 128 MiB up, where the benchmark program's own cost no longer shows."""
        path = resources.files("meshwright.catalog") / "data" / "collectives_measured.csv"
        g = group(size=8, stride=1, net=net_of(name))
        errors = []
        for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            wanted = (row["gpu"], row["gpus"], row["collective"]) == (gpu, "8", "AllReduce")
            found = re.fullmatch(r"(\d+)([MG])iB", row["payload"])
            if not (wanted and found) or "NVLS off" in row["notes"]:
                continue
            num_bytes = int(found[1]) << {"M": 20, "G": 30}[found[2]]
            if num_bytes >= 2**27:
                measured_s = num_bytes * 2 * 7 / 8 / (float(row["busbw_gb_s"]) * GB)
                errors.append(float(all_reduce_s(num_bytes, g)) / measured_s - 1)
        assert len(errors) >= 8
        assert np.median(np.abs(errors)) < 0.07
        assert max(np.abs(errors)) < 0.12

    @pytest.mark.parametrize(("nodes", "logical_gb_s"), [(2, 90), (4, 61)])
    def test_dispatch_of_8k_tokens_to_8_experts(self, nodes, logical_gb_s):
        """DeepEP on H100 and 400 Gbit/s: logical bandwidth counts the copy for the own node as well."""
        one_copy = 8192 * 7168
        g = group(size=8 * nodes, stride=1, net=net_of("h100-8x8"))
        seconds = float(all_to_all_hierarchical_s(one_copy, g, copies=8))
        logical = one_copy * float(distinct_destinations(8, nodes)) / seconds
        assert logical == pytest.approx(logical_gb_s * GB, rel=0.15)

    def test_two_mi350x_nodes(self):
        """128 MiB all-reduce at 249 GB/s bus bandwidth on 16 MI350X."""
        seconds = float(all_reduce_s(2**27, group(size=16, stride=1, net=net_of("mi350x-8x2"))))
        assert 2**27 * 2 * 15 / 16 / seconds == pytest.approx(249e9, rel=0.1)

    def test_every_named_fabric_exists(self):
        for name in toml_table(DATA)["fabrics"]:
            assert fabric(name).name == name

    def test_every_entry_states_its_source_and_stays_below_nominal(self):
        data = toml_table(DATA)
        for entry in [*data["scale_up"].values(), *data["scale_out"].values()]:
            assert len(entry["source"]) > 20
            assert 0 < entry["efficiency"] <= 1
            assert 0 < entry["all_to_all_efficiency"] <= 1

    def test_an_unknown_fabric_is_a_guess(self):
        constants = constants_for(replace(fabric("nvswitch-4-ndr"), name="mine"))
        assert constants.tier is Tier.GUESSED
        assert constants == constants_from()

    def test_oversubscription_thins_the_spine(self):
        made = fabric("nvswitch-4-ndr")
        full = network_row(made, constants_for(made))
        half = network_row(replace(made, oversubscription=2.0), constants_for(made))
        assert half.spine_ratio == pytest.approx(full.spine_ratio / 2)

    def test_a_missing_network_is_never_chosen_and_stays_finite(self):
        alone = Fabric(
            name="alone", scale_up_domain=8, scale_up_bytes_per_s=1e11, scale_up_peer_bytes_per_s=1e11,
            scale_up_latency_s=1e-6, scale_out_bytes_per_s=0.0, scale_out_latency_s=0.0,
        )  # fmt: skip
        net = network_row(alone, constants_from())
        assert all_gather_s(1e6, group(size=8, stride=1, net=net)) < 1e-3
        assert 1e6 < all_gather_s(1e6, group(size=16, stride=1, net=net)) < np.inf


def test_arrays_and_numbers_agree():
    net = net_of("h100-8x64")
    sizes, strides = np.array([1, 2, 8, 16, 64, 512]), np.array([1, 4, 1, 8, 2, 1])
    many = group(size=sizes, stride=strides, net=net)
    for function in (all_gather_s, all_reduce_s, all_to_all_s, send_receive_s):
        one_by_one = [
            float(function(3e7, group(size=int(n), stride=int(s), net=net)))
            for n, s in zip(sizes, strides, strict=True)
        ]
        assert function(3e7, many) == pytest.approx(one_by_one)
