"""The network between nodes, as tables of runs write it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from meshwright.accuracy.predict import predict
from meshwright.accuracy.rows import PublishedRun
from meshwright.accuracy.tables import cluster_of

ReadOne = Callable[..., PublishedRun]
GBIT = 1e9 / 8


def read_64(read_one: ReadOne, **cells: str) -> PublishedRun:
    """64 H100 in nodes of 8, whose usual network has one port of 400 Gbit/s for each."""
    return read_one(num_gpus=64, dp=64, cp=1, tp=1, pp=1, gbs=128, dp_type="FSDP", **cells)


@pytest.mark.parametrize(
    ("text", "node_gbit"),
    [
        ("InfiniBand 200 Gb/s", 1600),  # a port: as many as usual
        ("HDR InfiniBand", 1600),
        ("1x200 Gb/s per node", 200),
        ("200 Gb/s x8", 1600),
        ("8x200 Gb/s", 1600),
        ("4x100G", 400),
        ("4 HCAs of 200 Gb/s", 800),
        ("8x NDR", 3200),
        ("4x HDR IB (800 Gb/s per node)", 800),
        ("NVLink4 8-GPU + IB 8x50 GB/s per node", 3200),
        ("8x ConnectX-7 IB NDR 400Gb/s + 200Gb/s Ethernet NIC", 3200),
        ("NVLink; 8x100 Gbps NICs per node", 800),
        ("Storage: 2x IB NDR 400Gb/s, Compute: 4x IB NDR 400Gb/s", 1600),
        ("PCIe Gen4; net: BF3 200Gbps for NS and 2xBF3 400Gbps for EW", 800),
        ("8x 4th Gen NVLink, 900GB/s", 3200),
        ("3.2 Tbps", 3200),
        ("400 Gb/s per GPU", 3200),
        ("2x 400Gbe Ethernet", 800),
        ("25 Gb/s Ethernet", 25),
        ("10 gigabit ethernet", 10),
        ("8 x NDR400", 3200),
        ("dual-rail HDR", 400),
        ("two 100 Gb/s NICs", 200),
        ("dual 200G", 400),
        ("1x400Gb/s per 2 GPUs", 1600),
        ("4 NICs of 400G shared by 8 GPUs", 1600),
        ("800 Gbps", 800),  # more than a port of this device has
        ("25 Gbps", 25),
        ("3200Gbps EFAv2", 3200),
        ("intra: NVLink 900 GB/s; inter: 8x NDR400", 3200),
    ],
)
def test_ports_and_rates_of_a_node(read_one: ReadOne, text: str, node_gbit: float) -> None:
    run = read_64(read_one, interconnect=text)
    assert run.conditions is not None
    assert cluster_of(run.conditions).fabric.scale_out_bytes_per_s * 8 == pytest.approx(node_gbit * GBIT)
    assert not [clause for clause in run.unread if "interconnect" in clause]


def test_a_slower_network_is_a_slower_run(read_one: ReadOne) -> None:
    texts = ("", "8x200 Gb/s", "4x100G", "1x200 Gb/s per node", "25 Gb/s Ethernet")
    rates = predict([read_64(read_one, interconnect=text) for text in texts]).tokens_per_s_per_device
    assert all(slower < faster for faster, slower in pairwise(rates))


def test_a_kind_of_network_has_its_latency(read_one: ReadOne) -> None:
    usual, efa = (read_64(read_one, gpu="H200", interconnect=text).conditions for text in ("", "AWS EFA"))
    assert usual is not None
    assert efa is not None
    assert efa.stated["network"] == "8x400Gb/s EFA"
    fabric = cluster_of(efa).fabric
    assert fabric.scale_out_latency_s > cluster_of(usual).fabric.scale_out_latency_s
    assert fabric.scale_out_bytes_per_s == cluster_of(usual).fabric.scale_out_bytes_per_s


def test_the_note_states_a_network_too(read_one: ReadOne) -> None:
    run = read_64(read_one, notes="4 NICs of 100 Gb/s per node; trial 7")
    assert run.conditions is not None
    assert run.conditions.network == "4x100Gb/s"
    assert run.unread == ("trial 7",)
    labelled = read_64(read_one, notes="network: 800 Gb/s per node; trial 7")
    assert labelled.conditions is not None
    assert (labelled.conditions.network, labelled.unread) == ("1x800Gb/s", ("trial 7",))


def test_a_network_that_is_oversubscribed_is_said(read_one: ReadOne) -> None:
    assert any("oversubscribed" in text for text in read_64(read_one, interconnect="2:1 oversubscribed 400G IB").unread)
    assert any("oversubscription" in text for text in read_64(read_one, notes="2:1 oversubscribed 400G IB").assumed)


@pytest.mark.parametrize(
    "text",
    ["8x CX-7", "purple cables", "Ethernet", "no 8x400 Gb/s InfiniBand", "EFA not enabled", "InfiniBand planned"],
)
def test_what_is_not_understood_is_listed(read_one: ReadOne, text: str) -> None:
    run = read_64(read_one, interconnect=text)
    assert run.conditions is not None
    assert run.conditions.network == ""
    assert run.unread == (f"interconnect: {text}",)


def test_a_port_of_unstated_number_is_an_assumption(read_one: ReadOne) -> None:
    assert "network of 8 such ports a node: IB 200 Gb/s" in read_64(read_one, interconnect="IB 200 Gb/s").assumed
    assert "network" not in str(read_64(read_one, interconnect="IB 400 Gb/s").assumed)


def test_a_run_within_one_node_has_no_network(read_one: ReadOne) -> None:
    run = read_one(interconnect="25 Gb/s Ethernet")
    assert run.conditions is not None
    assert (run.conditions.network, run.unread) == ("", ())


@pytest.mark.parametrize(
    ("gpu", "cells", "fabric"),
    [
        ("H100 PCIe", {}, "nvlink-bridge"),
        ("H100 PCIe", {"interconnect": "NVLink bridge"}, "nvlink-bridge"),
        ("H100 PCIe", {"interconnect": "PCIe Gen5 only"}, "pcie-5"),
        ("H100 PCIe", {"notes": "bf16; no NVLink"}, "pcie-5"),
        ("A100 PCIe", {"notes": "without NVLink, FA2"}, "pcie-4"),
        ("L40S", {"notes": "no NVLink"}, "pcie-4"),
    ],
)
def test_cards_without_a_bridge(read_one: ReadOne, gpu: str, cells: dict[str, str], fabric: str) -> None:
    run = read_one(gpu=gpu, num_gpus=8, dp=8, cp=1, tp=1, pp=1, gbs=16, dp_type="FSDP", precision="bf16", **cells)
    assert run.conditions is not None
    assert cluster_of(run.conditions).fabric.name == fabric
    assert not [clause for clause in run.unread if "nvlink" in clause and fabric.startswith("pcie")]


def test_links_that_are_off_where_there_is_no_bridge_stay_unread(read_one: ReadOne) -> None:
    run = read_64(read_one, notes="NVLink disabled")
    assert "nvlink disabled" in run.unread
