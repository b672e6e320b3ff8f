"""Hardware that a run states of its cluster: network, oversubscription, memory of a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.every_member import check_every

from meshwright import runfile
from meshwright.calibration.collectives import constants_for
from meshwright.catalog import lookup as catalog
from meshwright.catalog.interconnects import network_kinds
from meshwright.cost.rates import factors_of
from meshwright.errors import InputError, RunFileError
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.objective import goal_for
from meshwright.planner.request import request_for
from meshwright.planner.scaling import resized
from meshwright.planner.search import search
from meshwright.runfile import document, schema
from meshwright.runfile.fields import keys_of
from meshwright.runfile.hardware import read_network
from meshwright.specs.hardware import Cluster
from meshwright.specs.plan import Plan, Sharding
from meshwright.specs.run import Objective, Run

TEXT = """\
model: llama3.1-8b
data: {sequence_length: 4096}
batch: {global_sequences: 256}
cluster: h100-8x4
"""


def run_with(**keys: object) -> Run:
    return runfile.loads(TEXT, overrides=[f"cluster.{key}={value}" for key, value in keys.items()])


def cluster_with(name: str = "h100-8x4", **keys: object) -> Cluster:
    run = runfile.loads(TEXT, overrides=[f"cluster={name}", *(f"cluster.{key}={value}" for key, value in keys.items())])
    assert run.cluster is not None
    return run.cluster


def best_step_s(cluster: Cluster) -> float:
    best = search(replace(request_for(run_with()), cluster=cluster), top=1).best
    assert best is not None
    return best.step_s


def test_the_rate_is_that_of_a_node_and_its_devices_share_it():
    def check(text: str, gb_per_s: float, devices_per_nic: float) -> None:
        fabric = cluster_with(network=text).fabric
        assert fabric.scale_out_bytes_per_s == gb_per_s * 1e9, text
        assert fabric.devices_per_nic == devices_per_nic, text

    check_every(
        [
            ("25Gb/s", 25 / 64, 8.0), ("100 Gbit/s", 12.5 / 8, 8.0), ("4x100Gb/s", 6.25, 2.0),
            ("8x400Gb/s", 50.0, 1.0), ("400GB/s", 50.0, 8.0), ("3.2Tb/s", 50.0, 8.0), ("32 x 100Gbps EFA", 50.0, 0.25),
        ],
        lambda case: check(*case),
    )  # fmt: skip


def test_the_links_inside_a_node_stay():
    usual, slow = catalog.cluster("h100-8x4").fabric, cluster_with(network="25Gb/s Ethernet").fabric
    for field in ("name", "scale_up_domain", "scale_up_bytes_per_s", "scale_up_latency_s", "rail_optimized"):
        assert getattr(slow, field) == getattr(usual, field)
    assert constants_for(slow).up == constants_for(usual).up


def test_a_kind_has_the_latency_and_the_efficiency_of_its_fabric_and_its_source():
    def check(kind: str, name: str) -> None:
        other = catalog.fabric(name)
        cluster = cluster_with(network=f"8x100Gb/s {kind}")
        assert cluster.fabric.scale_out_latency_s == other.scale_out_latency_s
        assert constants_for(cluster.fabric).out == constants_for(other).out
        run = run_with()
        factors = factors_of(cluster, run.precision, run.stack)
        assert factors["fabric"] == name
        if name != "nvswitch-4-ndr":  # the usual one of the device
            assert name in cluster.fabric.sources["scale_out_latency_s"]

    check_every(network_kinds().items(), lambda case: check(*case))
    assert read_network("25Gb/s ethernet").kind == "Ethernet"


def test_the_usual_rate_gives_the_usual_estimate():
    usual = best_step_s(catalog.cluster("h100-8x4"))
    for network in ("8x400Gb/s", "3200Gb/s", "400GB/s", "8x400Gb/s InfiniBand"):
        assert best_step_s(cluster_with(network=network)) == usual


def test_a_kind_gives_the_estimate_of_the_fabric_that_it_names():
    named = catalog.cluster("h100-8x4", fabric_name="gcp-roce-400")
    assert best_step_s(cluster_with(network="8x400Gb/s RoCE")) == best_step_s(named)


@pytest.mark.when_touched  # laws/test_collectives.py draws networks
@pytest.mark.parametrize("kind", ["", *network_kinds()])
def test_a_slower_network_never_gives_a_faster_best_step(kind):
    rates = ("8x400Gb/s", "4x400Gb/s", "4x100Gb/s", "100Gb/s", "25Gb/s", "1Gb/s")
    steps = [best_step_s(cluster_with(network=f"{rate} {kind}".strip())) for rate in rates]
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]


def test_oversubscription_replaces_that_of_the_fabric():
    assert cluster_with(oversubscription=7).fabric.oversubscription == 7.0
    with pytest.raises(RunFileError, match="allowed: >= 1"):
        run_with(oversubscription=0.5)


def test_the_memory_of_a_device_limits_the_plans():
    request = request_for(run_with(device_memory="40GiB"))
    whole = request_for(run_with())
    assert request.usable_bytes / whole.usable_bytes == pytest.approx(40 * 2**30 / 85_520_809_984)
    best = search(request, top=1).best
    assert best is not None
    assert best.memory.reserved_bytes <= request.usable_bytes < search(whole, top=1).best.memory.reserved_bytes


def test_a_host_has_the_memory_of_its_share_of_the_usual_system_or_what_is_stated():
    assert catalog.cluster("h100-8x4").host_memory_bytes == 2e12
    assert catalog.cluster("h100-2x4").host_memory_bytes == 5e11
    assert catalog.cluster("rtx-4090-8x1").host_bytes_per_device is None
    stated = cluster_with(host_memory="1TiB")
    assert stated.host_bytes_per_device == 2**40 / 8
    assert stated.stated == ("1.0 TiB of memory a host",)
    assert cluster_with("h100-8x2+a100-8x2").host_bytes_per_device == 1e12 / 8
    assert cluster_with("h100-8x2+h100-4x2", host_memory="1TB").host_bytes_per_device == 1e12 / 8
    assert catalog.joint_cluster("h100-8x1+v100-8x1").host_bytes_per_device is None


def test_a_power_limit_lowers_the_clock_and_widens_the_interval():
    def of(watts: float) -> tuple[float, float, float]:
        request = request_for(run_with(power_w=watts))
        found = estimate_plan(request, Plan(data_shard=32, sharding=Sharding.PARAMETERS))
        tokens = found.step.tokens_per_s_per_device
        assert found.step.mfu.value / tokens.value == pytest.approx(usual.step.mfu.value / usual_rate.value)
        return tokens.value, tokens.high / tokens.value, request.cluster.accelerator.clock_ratio

    usual = estimate_plan(request_for(run_with()), Plan(data_shard=32, sharding=Sharding.PARAMETERS))
    usual_rate = usual.step.tokens_per_s_per_device
    assert of(700) == (usual_rate.value, usual_rate.high / usual_rate.value, 1.0)
    assert cluster_with(power_w=700) == catalog.cluster("h100-8x4")
    rates, widths, clocks = zip(*map(of, (600, 500, 400, 300)), strict=True)
    assert sorted((usual_rate.value, *rates), reverse=True) == [usual_rate.value, *rates]
    assert list(widths) == sorted(widths)
    for clock, rate, watts in zip(clocks, rates, (600, 500, 400, 300), strict=True):
        left = (watts - 105) / (700 - 105)
        assert left < clock < left ** (1 / 3)
        assert clock < rate / usual_rate.value < 1  # memory and network stay
    stated = "a power limit of 500 W a device (matrix units at 80 % of their usual clock)"
    assert cluster_with(power_w=500).stated == (stated,)


def test_under_a_power_limit_the_device_draws_less_and_the_rest_of_its_node_as_much():
    powers = [goal_for(Objective.ENERGY, cluster=cluster_with(power_w=watts)).power for watts in (700, 500)]
    assert [(p.idle_w, p.node_w, p.tdp_w) for p in powers if p] == [(105, 280, 700), (105, 280, 500)]


def test_both_parts_of_a_cluster_have_what_is_stated():
    cluster = cluster_with("h100-8x2+h200-8x2", network="100Gb/s RoCE", device_memory="40GB")
    assert cluster.name == "h100-8x2+h200-8x2"
    for one in (cluster, *cluster.parts):
        assert one.fabric.scale_out_bytes_per_s == 12.5e9 / 8
        assert one.accelerator.memory_bytes == 40_000_000_000
        assert one.stated == ("a network of 100Gb/s RoCE a node", "37.3 GiB of memory a device")
    with pytest.raises(RunFileError, match="range of h100: got '100GiB'"):
        cluster_with("h100-8x2+h200-8x2", device_memory="100GiB")


def test_a_cluster_without_a_name_may_state_its_network():
    shape = "{accelerator: gb200, devices_per_node: 4, num_nodes: 36, network: 4x400Gb/s}"
    cluster = cluster_with(shape)
    assert cluster.fabric.scale_out_bytes_per_s == 50e9
    assert cluster.fabric.scale_up_domain == 72


def test_other_numbers_of_nodes_keep_what_is_stated():
    cluster = cluster_with("gb200-4x2", network="100Gb/s", device_memory="100GiB")
    larger = resized(cluster, 144)
    assert (larger.name, larger.fabric.scale_up_domain) == ("gb200-4x36", 72)
    assert larger.fabric.scale_out_bytes_per_s == cluster.fabric.scale_out_bytes_per_s
    assert larger.accelerator.memory_bytes == 100 * 2**30


def test_nonsense_is_refused_with_what_is_allowed():
    def check(assignment: str, *words: str) -> None:
        with pytest.raises(InputError) as caught:
            runfile.loads(TEXT, overrides=[assignment])
        assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)

    check_every(
        [
            ("cluster.network=25", "no rate", "got '25'", "as in 25Gb/s", "hint: Gb/s and Tb/s count bits"),
            ("cluster.network=25gb/s", "no rate", "as in 25Gb/s"),
            ("cluster.network=fast", "no rate", "got 'fast'"),
            ("cluster.network=-25Gb/s", "no rate"),
            ("cluster.network=4x100Gb/s Infinband", "no kind", "allowed: InfiniBand, RoCE, EFA, Ethernet",
             "did you mean 'InfiniBand'?"),
            ("cluster.network=4x100Gb/s carrier pigeon", "without a kind, the cluster's fabric has it"),
            ("cluster.network=0Gb/s", "out of range", "0.1Gb/s to 100TB/s"),
            ("cluster.network=1024x999Tb/s", "out of range"),
            ("cluster.network=0x100Gb/s", "number of ports", "1 to 1024"),
            ("cluster.network=[1]", "cluster.network: must be text"),
            ("cluster.device_memory=40", "no size", "got '40'", "as in 40GiB"),
            ("cluster.device_memory=40Gb", "no size"),
            ("cluster.host_memory=2", "no size of a host's memory", "got '2'", "as in 2TB"),
            ("cluster.power_w=800", "no power limit of h100", "got '800 W'", "above 105 W (idle), to 700 W"),
            ("cluster.power_w=105", "no power limit of h100"),
            ("cluster.host_memory=0GB", "no size of a host's memory"),
            ("cluster.device_memory=0GiB", "above 0, to 79.6 GiB"),
            ("cluster.device_memory=96GB", "to 79.6 GiB", "hint: h100-nvl has the same die and 93.6 GiB"),
            ("cluster={name: here, network: 25Gb/s}", "cluster.name: is this machine", "hint: write `cluster: here`"),
            ("cluster={name: h10-8x4, network: 25Gb/s}", "unknown accelerator"),
            ("cluster={name: h100-8x4, num_nodes: 2}", "cluster.num_nodes: unknown key", "another form"),
        ],
        lambda case: check(*case),
    )  # fmt: skip


def test_a_written_run_file_says_it(tmp_path):
    run = run_with(network="4x100Gb/s RoCE", device_memory="40GiB", power_w=500)
    runfile.pin_plan(run, Plan(data_shard=32), tmp_path / "pinned.yaml")
    again = runfile.load(tmp_path / "pinned.yaml")
    assert again.cluster == run.cluster
    assert again.cluster_name == "h100-8x4"
    assert "network: 4x100Gb/s RoCE" in (tmp_path / "pinned.yaml").read_text()


def test_the_keys_beside_a_name_are_those_of_the_schema():
    assert set(document._NAMED_CLUSTER_KEYS) == set(keys_of(schema.NamedCluster))
