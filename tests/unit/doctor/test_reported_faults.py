"""Faults and healthy states that public bug reports show, in the words of the kernel, of drivers and of their tools."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.every_member import check_every

from meshwright.doctor.checks import kernel_log
from meshwright.doctor.verdict import CheckStatus

RECORDED = Path(__file__).parent / "recorded"


def test_lines_of_the_kernel_log_that_were_reported():
    """Each row: its class and status ("-" for a line of a healthy node), the report, and the line."""

    def check(row):
        found = [n for n, kind in kernel_log.classes().items() if kind.pattern.search(row["line"])]
        assert found[:1] == ([] if row["class"] == "-" else [row["class"]])
        assert not found or kernel_log.classes()[found[0]].status == row["status"]

    with (RECORDED / "reported-lines.tsv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len(rows) > 60
    check_every(rows, check, name=lambda row: row["line"])


@pytest.mark.parametrize(("count", "status"), [(99, CheckStatus.PASS), (100, CheckStatus.WARN)])
def test_corrected_errors_of_a_pci_link_count_when_they_are_many(look, healthy, count, status):
    line = "pcieport 0000:00:1c.5: AER: Corrected error received: 0000:05:00.0"
    healthy.commands["dmesg"] = "".join(f"[{90_000 + i}.000001] {line}\n" for i in range(count))
    (verdict,) = look(healthy, chosen=("log",))["log.kernel"]
    assert (verdict.status, verdict.measured) == (status, 0 if status is CheckStatus.PASS else count)


def of_the_first(element, text):
    """A change of the report of nvidia-smi: `element` of the first device, or one more, holds `text`."""
    *parents, tag = element.split("/")

    def change(node):
        output = node.commands["nvidia-smi -q -x"]
        log = ElementTree.fromstring(output.stdout)
        place = log.find("gpu")
        for name in (*parents, tag):
            own = place.find(name)
            place = ElementTree.SubElement(place, name) if own is None else own
        place.text = text
        node.commands["nvidia-smi -q -x"] = dataclasses.replace(output, stdout=ElementTree.tostring(log, "unicode"))

    return change


def file(name, text):
    return lambda node: node.files.update({name: text})


def behind_the_report(node):
    output = node.commands["nvidia-smi -q -x"]
    text = f"{output.stdout}WARNING: infoROM is corrupted at gpu 0000:05:00.0\n"
    node.commands["nvidia-smi -q -x"] = dataclasses.replace(output, stdout=text)


def switches_without_their_manager(node):
    node.files |= {"/sys/bus/pci/devices/0000:c2:00.0/vendor": "0x10de\n", "/proc/1/comm": "systemd\n",
                   "/sys/bus/pci/devices/0000:c2:00.0/class": "0x068000\n"}  # fmt: skip


def no_xgmi_at_all(node):
    for index in range(8):
        for link in range(7):
            node.remove(f"/sys/class/kfd/kfd/topology/nodes/{index + 2}/io_links/{link}")


CARD, MLX = "/sys/class/drm/card3/device", "/sys/class/infiniband/mlx5_2"
AER = "/sys/bus/pci/devices/0000:65:00.0/aer_dev_"
REPORTS = {
    # NVIDIA/DCGM issue 263, utkuozdemir/nvidia_gpu_exporter pull request 448
    "recovery": ("nvidia", of_the_first("gpu_recovery_action", "Reset"), "devices.state", "fail"),
    "drain": ("nvidia", of_the_first("gpu_recovery_action", "Drain and Reset"), "devices.state", "fail"),
    "reset status": ("nvidia", of_the_first("gpu_reset_status/reset_required", "Yes"), "devices.state", "fail"),
    # gpustack/runtime pull request 26, pytorch/test-infra pull request 3967
    "no answer": ("nvidia", of_the_first("temperature/gpu_temp", "Unknown Error"), "devices.state", "fail"),
    "requires reset": ("nvidia", of_the_first("utilization/gpu_util", "[GPU requires reset]"), "devices.state", "fail"),
    "ERR!": ("nvidia", of_the_first("gpu_power_readings/instant_power_draw", "ERR!"), "devices.state", "fail"),
    "prohibited": ("nvidia", of_the_first("compute_mode", "Prohibited"), "devices.state", "fail"),
    # `nvidia-smi -q` of GB200: Fabric, Health
    "bandwidth": ("nvidia", of_the_first("fabric/health/bandwidth", "Degraded"), "devices.state", "fail"),
    "route": ("nvidia", of_the_first("fabric/health/route_unhealthy", "True"), "devices.state", "fail"),
    "summary": ("nvidia", of_the_first("fabric/health/summary", "Unhealthy"), "devices.state", "fail"),
    # NVIDIA/NVSentinel pull request 1369: DCGM_FR_SRAM_THRESHOLD asks for support
    "SRAM": ("nvidia", of_the_first("ecc_errors/aggregate/sram_threshold_exceeded", "Yes"), "devices.repair", "fail"),
    "channel": ("nvidia", of_the_first("ecc_errors/channel_repair_pending", "Yes"), "devices.repair", "warn"),
    # microsoft/pai issue 2192: V100 and before
    "double bit": ("nvidia", of_the_first("ecc_errors/volatile/double_bit/total", "2"), "devices.errors", "fail"),
    "pages": ("nvidia", of_the_first("retired_pages/pending_retirement", "Yes"), "devices.repair", "warn"),
    "60 pages": (
        "nvidia", of_the_first("retired_pages/double_bit_retirement/retired_count", "60"), "devices.repair", "fail",
    ),
    "ECC off": ("nvidia", of_the_first("ecc_mode/current_ecc", "Disabled"), "devices.ecc", "warn"),
    "HBM": ("nvidia", of_the_first("temperature/gpu_temp_max_mem_threshold", "37 C"), "temperature.margin", "fail"),
    "generation": ("nvidia", of_the_first("pci/pci_gpu_link_info/pcie_gen/max_link_gen", "1"), "devices.pcie", "warn"),
    "infoROM": ("nvidia", behind_the_report, "devices.tool", "warn"),
    # NVIDIA/NVSentinel pull request 891: the manager of the switches was down for 20 days
    "fabric manager": ("nvidia", switches_without_their_manager, "links.fabric", "fail"),
    # NVIDIA/nccl issue 1939
    "peer memory": ("nvidia", lambda node: node.remove("/proc/driver/nvidia/version"), "rdma.peer-memory", "warn"),
    "KFD": ("healthy", lambda node: node.remove("/sys/class/kfd/kfd/topology/nodes/4"), "devices.present", "fail"),
    "XGMI": ("healthy", no_xgmi_at_all, "links.scale-up", "fail"),
    "hot HBM": ("healthy", file(f"{CARD}/hwmon/hwmon5/temp3_input", "106000\n"), "temperature.margin", "fail"),
    # Linux kernel, amdgpu_ras.c: R reserved, P pending, F could not be reserved
    "pending page": (
        "healthy", file(f"{CARD}/ras/gpu_vram_bad_pages", "0x027f5d43 : 0x00001000 : R\n0x027f5d4b : 0x00001000 : P\n"),
        "devices.repair", "warn",
    ),
    "page in use": (
        "healthy", file(f"{CARD}/ras/gpu_vram_bad_pages", "0x027f5d43 : 0x00001000 : F\n"), "devices.repair", "fail",
    ),
    "AER": ("healthy", file(f"{AER}correctable", "RxErr 4000\nTOTAL_ERR_COR 4000\n"), "links.errors", "warn"),
    "fatal AER": ("healthy", file(f"{AER}fatal", "DLP 1\nTOTAL_ERR_FATAL 1\n"), "links.errors", "fail"),
    "AER of a card": (
        "healthy", file(f"{MLX}/device/aer_dev_correctable", "BadDLLP 9000\nTOTAL_ERR_COR 9000\n"), "rdma.pcie", "warn",
    ),
    # nebius/soperator issue 481
    "flaps": ("healthy", file(f"{MLX}/ports/1/counters/link_downed", "11\n"), "rdma.link-downs", "warn"),
    "lost packets": ("healthy", lambda node: node.files.update({
        f"{MLX}/ports/1/counters/port_rcv_packets": "1000000000\n",
        f"{MLX}/ports/1/hw_counters/out_of_sequence": "2000000\n"}), "rdma.lost-packets", "warn"),
    # a list of links that came up with one lane of four
    "one lane": ("healthy", lambda node: node.files.update({
        f"/sys/class/infiniband/mlx5_{i}/ports/1/{name}": text for i in range(8)
        for name, text in (("rate", "100 Gb/sec (1X NDR)\n"), ("link_layer", "InfiniBand\n"))}), "rdma.rate", "warn"),
    "EDAC": ("healthy", file("/sys/devices/system/edac/mc/mc0/ce_count", "5000\n"), "memory.corrected-errors", "warn"),
}  # fmt: skip


@pytest.mark.parametrize("name", REPORTS)
def test_a_reported_fault_is_found(look, request, name):
    kind, change, check, status = REPORTS[name]
    node = request.getfixturevalue(kind)
    change(node)
    found = [v for v in look(node)[check] if v.status is not CheckStatus.PASS]
    assert status in {v.status.value for v in found}
    assert status == "fail" or look(node)[""].status is CheckStatus.WARN
    assert all(v.hint for v in found)


HEALTHY = {
    # drivers of the 575 series and of consumer cards
    "no action": ("nvidia", of_the_first("gpu_recovery_action", "None")),
    "deprecated": (
        "nvidia", of_the_first("gpu_reset_status/reset_required", "Requested functionality has been deprecated"),
    ),
    "fabric N/A": ("nvidia", of_the_first("fabric/health/bandwidth", "N/A")),
    "partition": ("nvidia", of_the_first("fabric/health/partition_assigned", "True")),
    "full": ("nvidia", of_the_first("fabric/health/bandwidth", "Full")),
    "exclusive": ("nvidia", of_the_first("compute_mode", "Exclusive_Process")),
    "few pages": ("nvidia", of_the_first("retired_pages/double_bit_retirement/retired_count", "3")),
    "no pages": ("nvidia", of_the_first("retired_pages/pending_retirement", "No")),
    "a manager": ("nvidia", lambda node: (switches_without_their_manager(node),
                                          node.files.update({"/proc/77/comm": "nv-fabricmanage\n"}))),
    "reserved pages": ("healthy", file(f"{CARD}/ras/gpu_vram_bad_pages", "0x027f5d43 : 0x00001000 : R\n")),
    "few AER": ("healthy", file(f"{AER}correctable", "RxErr 12\nTOTAL_ERR_COR 12\n")),
    "one start": ("healthy", file(f"{MLX}/ports/1/counters/link_downed", "1\n")),
    "quiet": ("healthy", lambda node: node.files.update({
        f"{MLX}/ports/1/counters/port_rcv_packets": "1000000000\n",
        f"{MLX}/ports/1/hw_counters/out_of_sequence": "2000\n"})),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_state_is_no_alarm(look, request, name):
    kind, change = HEALTHY[name]
    node = request.getfixturevalue(kind)
    change(node)
    assert not [v for v in look(node)[""].verdicts if v.status in (CheckStatus.WARN, CheckStatus.FAIL)]
