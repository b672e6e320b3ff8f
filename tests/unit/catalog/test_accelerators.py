import re

import pytest
from tests.every_member import check_every

from meshwright.catalog.accelerators import default_fabric_name, status_of
from meshwright.catalog.lookup import (
    CatalogKind,
    accelerator,
    accelerator_names,
    accelerator_with_driver_name,
    driver_name_of_pci_id,
    entry,
    fabric_names,
    usual_devices_per_node,
)
from meshwright.errors import UnknownNameError

REQUIRED = [
    "a100-40gb",
    "a100",
    "a100-pcie",
    "a800",
    "gh200",
    "h100",
    "h100-nvl",
    "h100-pcie",
    "h100-96gb",
    "h200",
    "h800",
    "h20",
    "b200",
    "b300",
    "gb200",
    "gb300",
    "v100",
    "mi250x",
    "mi300x",
    "mi325x",
    "mi350x",
    "mi355x",
    "tpu-v4",
    "tpu-v5e",
    "tpu-v5p",
    "tpu-v6e",
    "tpu7x",
    "gaudi2",
    "gaudi3",
    "l40",
    "l40s",
    "vr200",
    "rtx-4090",
    "rtx-a6000",
    "rtx-3090",
    "rtx-5090",
    "rtx-pro-6000",
    "a10",
    "mi210",
    "trainium2",
    "cpu",
]

MARKETED = {
    # bf16 TFLOP/s, memory in the GB of the label, memory TB/s, scale-up GB/s
    "a100": (312, 80, 2.0, 300),
    "h100": (989, 80, 3.35, 450),
    "h200": (989, 141, 4.8, 450),
    "a100-pcie": (312, 80, 1.94, 300),
    "h100-nvl": (835.5, 94, 3.9, 300),
    "l40": (181.05, 48, 0.864, 31),
    "vr200": (4000, 288, 22.0, 1800),
    "b200": (2250, 180, 8.0, 900),
    "gb200": (2500, 186, 8.0, 900),
    "mi300x": (1307, 192, 5.3, 448),
    "mi355x": (2500, 288, 8.0, 537.6),
    "tpu-v5p": (459, 95, 2.765, 600),
    "tpu7x": (2307, 192, 7.38, 600),
    "gaudi2": (432, 96, 2.46, 262.5),
    "rtx-3090": (71, 24, 0.936, 31),
    "rtx-pro-6000": (503.8, 96, 1.792, 63),
    "mi210": (181, 64, 1.64, 31),
    "trainium2": (667, 96, 2.9, 640),
}


def test_catalogue_has_every_required_accelerator():
    assert set(REQUIRED) <= set(accelerator_names())


@pytest.mark.parametrize(("name", "marketed"), MARKETED.items())
def test_values_are_those_of_the_datasheets(name, marketed):
    a = accelerator(name)
    tflops, memory_gb, memory_tb_s, up_gb_s = marketed
    assert a.peak_flops_per_s["bf16"] == tflops * 1e12
    assert memory_gb * 1e9 * 0.99 <= a.memory_bytes <= memory_gb * 2**30  # a label's GB is between the two
    assert a.memory_bytes_per_s == pytest.approx(memory_tb_s * 1e12, rel=0.03)
    assert a.scale_up_bytes_per_s == up_gb_s * 1e9


def test_values_are_physical():
    def check(name):
        a = accelerator(name)
        peaks = a.peak_flops_per_s
        assert all(peak > 0 for peak in peaks.values())
        order = [peaks[f] for f in ("fp32", "bf16", "fp8", "fp4") if f in peaks]
        assert order == sorted(order)
        assert 16e9 <= a.memory_bytes <= 400e9
        assert 0 < a.scale_up_peer_bytes_per_s <= a.scale_up_bytes_per_s
        assert a.scale_up_bytes_per_s < a.memory_bytes_per_s
        assert a.num_compute_units > 0
        assert default_fabric_name(name) in fabric_names()
        assert usual_devices_per_node(name) >= 1

    check_every(accelerator_names(), check)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("A100", "a100"),
        ("A100-SXM-80GB", "a100"),
        ("a100-80gb", "a100"),
        ("A100-SXM-40GB", "a100-40gb"),
        ("H100-SXM-80GB", "h100"),
        ("H100-SXM-96GB (500W)", "h100-96gb"),
        ("H100-PCIe-80GB", "h100-pcie"),
        ("TPU v5e", "tpu-v5e"),
        ("TPU7x (Ironwood)", "tpu7x"),
        ("V100-SXM2-32GB", "v100"),
        ("RTX A6000", "rtx-a6000"),
        ("MI355X", "mi355x"),
    ],
)
def test_names_of_published_runs_find_their_device(written, name):
    assert accelerator(written).name == name


@pytest.mark.parametrize("written", ["Blackwell (not stated)", "", "h10000"])
def test_unknown_device_is_never_another_one(written):
    with pytest.raises(UnknownNameError):
        accelerator(written)


def test_volta_has_no_bf16_and_tpus_no_fp32():
    assert "bf16" not in accelerator("v100").peak_flops_per_s
    assert "fp32" not in accelerator("tpu-v5p").peak_flops_per_s


DRIVER_NAMES = [
    (name, driver_name)
    for name in accelerator_names()
    for driver_name in entry(CatalogKind.ACCELERATOR, name).values.get("driver_names", ())
]


def test_a_driver_name_finds_its_own_accelerator():
    def check(name, driver_name):
        assert accelerator_with_driver_name(driver_name) == name  # also: no two accelerators share a driver name
        assert "driver_names" in entry(CatalogKind.ACCELERATOR, name).sources

    check_every(DRIVER_NAMES, lambda case: check(*case))


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("  NVIDIA   H100  80GB HBM3 ", "h100"),
        ("H100 80GB HBM3", "h100"),
        ("nvidia b200", "b200"),
        ("A100-SXM4-80GB", "a100"),
        ("amd instinct mi355x", "mi355x"),
    ],
)
def test_capitals_spaces_and_the_prefix_do_not_matter(driver_name, name):
    assert accelerator_with_driver_name(driver_name) == name


def test_a_device_that_is_not_listed_is_unknown_and_not_its_neighbour():
    def check(driver_name):
        assert accelerator_with_driver_name(driver_name) is None

    check_every(
        [
            "NVIDIA H100",
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "NVIDIA GH200 480GB",
            "NVIDIA H200 NVL",
            "NVIDIA H20-3e",
            "NVIDIA GB10",
            "NVIDIA B300",
            "NVIDIA A800 80GB PCIe",
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA L40G",
            "NVIDIA RTX 6000 Ada Generation",
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            "NVIDIA GeForce RTX 5090 D",
            "NVIDIA GeForce RTX 3090 Ti",
            "NVIDIA A10G",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "Tesla V100-PCIE-16GB",
            "AMD Instinct MI300A",
            "AMD Instinct MI308X",
            "AMD Instinct MI250X / MI250",
            "AMD Radeon Graphics",
            "NVIDIA",
            "",
        ],
        check,
    )


def test_a_pci_id_gives_a_listed_driver_name():
    def check(name):
        values = entry(CatalogKind.ACCELERATOR, name).values
        for pci_id, driver_name in values.get("pci_ids", {}).items():
            assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{4}", pci_id)
            assert driver_name in values["driver_names"]
            assert driver_name_of_pci_id(pci_id.upper()) == driver_name

    check_every(accelerator_names(), check)


def test_an_unlisted_pci_id_is_unknown():
    assert driver_name_of_pci_id("1002:740c") is None  # MI250X or MI250


@pytest.mark.parametrize(
    ("name", "near"), [("rtx5080", "rtx-5090"), ("MI430X", "mi350x"), ("H200 NVL", "h100-nvl"), ("ascend-910b", None)]
)
def test_an_unknown_accelerator_leads_to_near_ones_and_to_a_description(name, near):
    with pytest.raises(UnknownNameError) as error:
        accelerator(name)
    hint = error.value.hint or ""
    assert "docs/guides/adding-an-accelerator.md" in hint
    assert "cluster: here" in hint
    assert (near in hint) if near else ("known: " in hint)


def test_only_announced_devices_say_so():
    assert status_of("vr200").startswith("As announced")
    assert status_of("h100") == ""
