"""AMD devices from sysfs: cards in /sys/class/drm, their links and processes in /sys/class/kfd.

amd-smi, or rocm-smi if it is absent, gives the names of devices that the catalogue does not list. Its duration is
measured, because a driver in trouble answers late.

Files are named as in the Linux kernel's documentation, gpu/amdgpu (driver core, thermal controls, RAS) and
drivers/gpu/drm/amd/amdkfd (topology).
"""

from __future__ import annotations

import re
from typing import Any

from meshwright.catalog.lookup import accelerator_with_driver_name, driver_name_of_pci_id
from meshwright.doctor.devices import (
    COMPUTE_CLASSES,
    Device,
    Devices,
    Process,
    addresses_on_bus,
    hottest,
    int_or_none,
    text_or_none,
)
from meshwright.doctor.host import Host, Unseen
from meshwright.json_values import parse_json

VENDOR = "1002"
PCIE_GENERATIONS = {"8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # by GT/s of a lane
XGMI = 11  # type of a link in the topology of the kernel driver
ON_A_BOARD = re.compile(r"MI(?:250X?|300[XA]|325X|350X|355X)\b")
"""Modules that XGMI connects with each other on their board; cards have bridges, which a node may lack."""
AMD_SMI = ("amd-smi", "static", "--asic", "--bus", "--json")
ROCM_SMI = ("rocm-smi", "--showproductname", "--showbus", "--json")
ROCM_VERSION = "/opt/rocm/.info/version"


def find(host: Host) -> Devices:
    """Return AMD's devices; empty if there is none."""
    on_bus = addresses_on_bus(host, VENDOR)
    cards = [c for c in host.glob("/sys/class/drm/card*/device") if re.search(r"/card\d+/device$", c)]
    cards = [c for c in cards if text_or_none(host, f"{c}/vendor") == f"0x{VENDOR}"]
    cards = [c for c in cards if (text_or_none(host, f"{c}/class") or "")[:6] in COMPUTE_CLASSES[VENDOR]]
    nodes = _topology(host)
    by_address = sorted((_address(host, card), card) for card in cards)
    names, tool_seconds = _names_by_tool(host) if by_address else ({}, None)
    found = [
        _device(host, i, card, address, nodes, names.get(address))
        for i, (address, card) in enumerate(by_address)
        if address in nodes or not nodes  # a card that the compute driver does not have is lost
    ]
    driver = text_or_none(host, "/sys/module/amdgpu/version")
    problem = None
    if on_bus and not found:
        loaded = host.exists("/sys/module/amdgpu")
        problem = "no card in /sys/class/drm" if loaded else "the kernel module amdgpu is not loaded"
    version = text_or_none(host, ROCM_VERSION)
    return Devices(
        found=tuple(found),
        on_bus=on_bus,
        driver=driver or (_kernel_driver(host) if found else None),
        runtime=version and f"ROCm {version}",
        tool_seconds=tool_seconds,
        problem=problem,
    )


def _device(
    host: Host, index: int, card: str, address: str, nodes: dict[str, dict[str, int]], tool_name: str | None
) -> Device:
    identity = f"{VENDOR}:{(text_or_none(host, f'{card}/device') or '').removeprefix('0x')}"
    known = driver_name_of_pci_id(identity)
    name = text_or_none(host, f"{card}/product_name") or known or tool_name or f"PCI device {identity}"
    hwmon = next(iter(host.glob(f"{card}/hwmon/hwmon*")), f"{card}/hwmon/none")
    current, highest = _clocks(host, card)
    node = nodes.get(address, {})
    level = text_or_none(host, f"{card}/power_dpm_force_performance_level")
    pages = re.findall(r": ([RPF])\s*$", text_or_none(host, f"{card}/ras/gpu_vram_bad_pages") or "", re.MULTILINE)
    temperature_c, limit_c = hottest(_temperature(host, hwmon, sensor) for sensor in ("temp2", "temp1", "temp3"))
    compute = text_or_none(host, f"{card}/current_compute_partition")
    memory = text_or_none(host, f"{card}/current_memory_partition")
    return Device(
        index=index,
        vendor="AMD",
        name=name,
        accelerator=accelerator_with_driver_name(name) or accelerator_with_driver_name(known or ""),
        address=address,
        select=f"HIP_VISIBLE_DEVICES={list(nodes).index(address) if address in nodes else index}",
        numa_node=int_or_none(host, f"{card}/numa_node"),
        memory_bytes=int_or_none(host, f"{card}/mem_info_vram_total"),
        memory_used_bytes=int_or_none(host, f"{card}/mem_info_vram_used"),
        utilization_percent=int_or_none(host, f"{card}/gpu_busy_percent"),
        clock_mhz=current,
        highest_clock_mhz=highest,
        temperature_c=temperature_c,
        slowdown_temperature_c=limit_c,
        power_w=_scaled(host, (f"{hwmon}/power1_input", f"{hwmon}/power1_average"), 1e-6),
        power_limit_w=_scaled(host, (f"{hwmon}/power1_cap",), 1e-6),
        default_power_limit_w=_scaled(host, (f"{hwmon}/power1_cap_default", f"{hwmon}/power1_cap_max"), 1e-6),
        pcie_width=int_or_none(host, f"{card}/current_link_width"),
        highest_pcie_width=int_or_none(host, f"{card}/max_link_width"),
        pcie_generation=PCIE_GENERATIONS.get((text_or_none(host, f"{card}/max_link_speed") or "").partition(" ")[0]),
        pcie_replays=int_or_none(host, f"{card}/pcie_replay_count"),
        scale_up_links=node.get("links") if len(nodes) > 1 else None,
        expected_scale_up_links=_expected_links(name, nodes),
        uncorrected_errors=_errors(host, card, "ue"),
        corrected_errors=_errors(host, card, "ce"),
        is_repair_pending="P" in pages,
        is_repair_failed="F" in pages,
        slowdowns=("performance level is low",) if level == "low" else (),
        firmware=text_or_none(host, f"{card}/vbios_version"),
        partition=None if compute is None else "/".join(filter(None, (compute, memory))),
        processes=_processes(host, node.get("gpu_id")),
    )


def _temperature(host: Host, hwmon: str, sensor: str) -> tuple[float | None, float | None]:
    """Temperature of a sensor and its critical limit: temp1 edge, temp2 junction, temp3 memory."""
    return _scaled(host, (f"{hwmon}/{sensor}_input",), 1e-3), _scaled(host, (f"{hwmon}/{sensor}_crit",), 1e-3)


def _expected_links(name: str, nodes: dict[str, dict[str, int]]) -> int | None:
    """Return the number of links that the best device of the node has; modules of a board have one at least."""
    if len(nodes) < 2:
        return None
    return max(1 if ON_A_BOARD.search(name) else 0, *(n["links"] for n in nodes.values()))


def _address(host: Host, card: str) -> str:
    match = re.search(r"^PCI_SLOT_NAME=(\S+)", text_or_none(host, f"{card}/uevent") or "", re.MULTILINE)
    return match[1].lower() if match else card


def _clocks(host: Host, card: str) -> tuple[float | None, float | None]:
    """Return the current clock, marked with a star, and the highest level: `1: 2400Mhz *`."""
    text = text_or_none(host, f"{card}/pp_dpm_sclk") or ""
    levels = [(float(mhz), bool(star)) for mhz, star in re.findall(r"^\s*\S+:\s*(\d+)Mhz\s*(\*?)", text, re.M | re.I)]
    current = next((mhz for mhz, star in levels if star), None)
    return current, max((mhz for mhz, _ in levels), default=None)


def _topology(host: Host) -> dict[str, dict[str, int]]:
    """Return the compute driver's devices by PCI address: its number, and the number of links to others."""
    nodes = {}
    for folder in host.glob("/sys/class/kfd/kfd/topology/nodes/*"):
        properties = _properties(text_or_none(host, f"{folder}/properties") or "")
        if not properties.get("simd_count"):
            continue  # a processor
        location, domain = properties.get("location_id", 0), properties.get("domain", 0)
        address = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
        files = host.glob(f"{folder}/io_links/*/properties")
        kinds = [_properties(text_or_none(host, file) or "").get("type") for file in files]
        gpu_id = int_or_none(host, f"{folder}/gpu_id")
        nodes[address] = {"links": kinds.count(XGMI), "gpu_id": gpu_id or 0}
    return nodes


def _properties(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}


def _processes(host: Host, gpu_id: int | None) -> tuple[Process, ...] | None:
    if not gpu_id or not host.exists("/sys/class/kfd/kfd/proc"):
        return None
    found = []
    for folder in host.glob("/sys/class/kfd/kfd/proc/*"):
        memory_bytes = int_or_none(host, f"{folder}/vram_{gpu_id}")
        if memory_bytes:
            pid = int(folder.rpartition("/")[2])
            found.append(Process(pid=pid, name=text_or_none(host, f"/proc/{pid}/comm"), memory_bytes=memory_bytes))
    return tuple(found)


def _names_by_tool(host: Host) -> tuple[dict[str, str], float | None]:
    """Return product names by PCI address, and the duration of the tool; None without a tool."""
    for command, read in ((AMD_SMI, _read_amd_smi), (ROCM_SMI, _read_rocm_smi)):
        try:
            output = host.run(*command)
        except Unseen:
            continue
        try:
            return read(parse_json(output.stdout)), output.seconds
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}, output.seconds
    return {}, None


def _read_amd_smi(document: Any) -> dict[str, str]:
    rows = document["gpu_data"] if isinstance(document, dict) else document  # an object since ROCm 7
    return {row["bus"]["bdf"].lower(): row["asic"]["market_name"] for row in rows}


def _read_rocm_smi(document: Any) -> dict[str, str]:
    return {row["PCI Bus"].lower(): row["Card Series"] for row in document.values() if "PCI Bus" in row}


def _errors(host: Host, card: str, kind: str) -> int | None:
    """Return the errors of all blocks of the device: files with lines `ue: 0` and `ce: 3`.

    Kernels with ACA name the files `aca_BLOCK` (drivers/gpu/drm/amd/amdgpu/amdgpu_aca.c).
    """
    counts = []
    for file in (*host.glob(f"{card}/ras/*_err_count"), *host.glob(f"{card}/ras/aca_*")):
        match = re.search(rf"^{kind}:\s*(\d+)", text_or_none(host, file) or "", re.MULTILINE)
        if match:
            counts.append(int(match[1]))
    return sum(counts) if counts else None


def _scaled(host: Host, names: tuple[str, ...], scale: float) -> float | None:
    for name in names:
        value = int_or_none(host, name)
        if value is not None:
            return value * scale
    return None


def _kernel_driver(host: Host) -> str | None:
    """Return the kernel's version: the amdgpu driver built into a kernel has no version of its own."""
    try:
        return f"of kernel {host.read('/proc/sys/kernel/osrelease')}"
    except Unseen:
        return None
