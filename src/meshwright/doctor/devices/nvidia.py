"""NVIDIA devices from one call of `nvidia-smi -q -x`. A field that a driver lacks is absent rather than an error."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from xml.etree.ElementTree import Element

from meshwright.catalog.lookup import accelerator_with_driver_name
from meshwright.doctor.devices import Device, Devices, Process, addresses_on_bus, hottest, int_or_none, text_or_none
from meshwright.doctor.host import Host, Unseen
from meshwright.doctor.verdict import DATA
from meshwright.files import toml_table
from meshwright.units import MIB

VENDOR = "10de"
TOOL_TIMEOUT_S = 60.0
_TEXTS = toml_table(DATA / "nvidia.toml")
SLOWDOWNS = _TEXTS["slowdowns"]
ALL_INACTIVE = "all links are inactive"
"""Words of nvidia-smi for a device in place of its links."""
WITHOUT_LINKS = re.compile(r"PCI-?e|NVL\b|RTX|TITAN|Quadro|\bA(?:10|16|30|40)\b", re.IGNORECASE)
"""Names of cards whose links, if they have any, are bridges that a node may lack."""
WITHOUT_ECC = re.compile(r"GeForce|RTX|TITAN|Quadro", re.IGNORECASE)
"""Names of cards whose ECC, if they have it, is off by default or by choice."""
NO_VALUE = re.compile(r"\[?(?:Unknown Error|ERR!|GPU requires reset|GPU is lost|Reset Required)\]?$", re.IGNORECASE)
"""Texts that nvidia-smi writes in place of a value of a device that does not answer."""
MOST_RETIRED_PAGES, MOST_REMAPPED_ROWS = 60, 512
"""NVIDIA, Dynamic page retirement, and DCGM, DcgmGPUHardwareLimits.h: a device with as many is exchanged."""


def find(host: Host) -> Devices:
    """Return NVIDIA's devices; empty if there is neither a tool nor a device."""
    on_bus = addresses_on_bus(host, VENDOR)
    module = text_or_none(host, "/proc/driver/nvidia/version")
    try:
        output = host.run("nvidia-smi", "-q", "-x", timeout_s=TOOL_TIMEOUT_S)
    except Unseen as unseen:
        problem = unseen.reason if on_bus or module else None
        return Devices(on_bus=on_bus, driver=_module_version(module), problem=problem)
    try:
        text, end, behind = output.stdout.partition("</nvidia_smi_log>")
        log = ElementTree.fromstring(text + end)
    except ElementTree.ParseError:
        return Devices(on_bus=on_bus, driver=_module_version(module), problem=output.problem)
    links = _links(host)
    devices = [_device(host, i, gpu, *links.get(i, (None, None))) for i, gpu in enumerate(log.iter("gpu"))]
    return Devices(
        found=tuple(d for d in devices if d is not None),
        on_bus=on_bus,
        driver=_text(log, "driver_version") or _module_version(module),
        runtime=(version := _text(log, "cuda_version")) and f"CUDA {version}",
        tool_seconds=output.seconds,
        warnings=tuple(filter(None, map(str.strip, behind.splitlines()))),
    )


def _device(host: Host, index: int, gpu: Element, links: int | None, all_links: int | None) -> Device | None:
    name = _text(gpu, "product_name")
    if name is None or name.startswith("Unknown"):  # "GPU is lost": its fields say so instead of a value
        return None
    address = _address(gpu.get("id", ""))
    events = gpu.find("clocks_event_reasons")
    events = events if events is not None else gpu.find("clocks_throttle_reasons")
    power = next((p for n in ("gpu_power_readings", "power_readings") if (p := gpu.find(n)) is not None), None)
    temperature_c, limit_c = hottest([
        (_number(gpu, "temperature/gpu_temp"), _slowdown_temperature(gpu)),
        (_number(gpu, "temperature/memory_temp"), _number(gpu, "temperature/gpu_temp_max_mem_threshold")),
    ])  # fmt: skip
    return Device(
        index=index,
        vendor="NVIDIA",
        name=name,
        accelerator=accelerator_with_driver_name(name),
        address=address,
        select=f"CUDA_VISIBLE_DEVICES={_text(gpu, 'uuid') or index}",
        numa_node=int_or_none(host, f"/sys/bus/pci/devices/{address}/numa_node"),
        memory_bytes=_mib(gpu, "fb_memory_usage/total"),
        memory_used_bytes=_mib(gpu, "fb_memory_usage/used"),
        utilization_percent=_number(gpu, "utilization/gpu_util"),
        clock_mhz=_number(gpu, "clocks/sm_clock"),
        highest_clock_mhz=_number(gpu, "max_clocks/sm_clock"),
        temperature_c=temperature_c,
        slowdown_temperature_c=limit_c,
        power_w=_number(power, "instant_power_draw") or _number(power, "power_draw"),
        power_limit_w=_number(power, "current_power_limit") or _number(power, "power_limit"),
        default_power_limit_w=_number(power, "default_power_limit"),
        pcie_width=_whole(_number(gpu, "pci/pci_gpu_link_info/link_widths/current_link_width")),
        highest_pcie_width=_whole(_number(gpu, "pci/pci_gpu_link_info/link_widths/max_link_width")),
        pcie_generation=_whole(_number(gpu, "pci/pci_gpu_link_info/pcie_gen/max_link_gen")),
        pcie_replays=_whole(_number(gpu, "pci/replay_counter")),
        scale_up_links=links,
        expected_scale_up_links=all_links,
        uncorrected_errors=_errors(gpu, "uncorrect"),
        corrected_errors=_errors(gpu, "correctable"),
        is_ecc_off="Disabled" in (_text(gpu, "ecc_mode/current_ecc"), _text(gpu, "ecc_mode/pending_ecc"))
        and not WITHOUT_ECC.search(name),
        is_repair_pending=any(_text(gpu, path) == "Yes" for path in _TEXTS["pending"]),
        is_repair_failed=any(_text(gpu, path) == "Yes" for path in _TEXTS["failed"])
        or _retired_pages(gpu) >= MOST_RETIRED_PAGES
        or (_number(gpu, "remapped_rows/remapped_row_unc") or 0) >= MOST_REMAPPED_ROWS,
        complaints=_complaints(gpu),
        slowdowns=_slowdowns(events),
        firmware=_text(gpu, "vbios_version"),
        partition=_partition(gpu),
        fabric_state=_text(gpu, "fabric/state"),
        fabric_status=_text(gpu, "fabric/status"),
        processes=_processes(host, gpu),
    )


def _slowdown_temperature(gpu: Element) -> float | None:
    """The temperature at which the device slows down. Ada, Hopper and later tell distances to a limit instead."""
    own, limit = _number(gpu, "temperature/gpu_temp_slow_threshold"), _number(gpu, "temperature/gpu_temp_tlimit")
    now = _number(gpu, "temperature/gpu_temp")
    if own is not None or limit is None or now is None:
        return own
    return now + limit - (_number(gpu, "temperature/gpu_temp_slow_tlimit_threshold") or 0.0)


def _partition(gpu: Element) -> str | None:
    if _text(gpu, "mig_mode/current_mig") == "Enabled":
        return "MIG"
    return "whole until the next reset" if _text(gpu, "mig_mode/pending_mig") == "Enabled" else None


def _retired_pages(gpu: Element) -> float:
    return sum(_as_number(e.text) or 0.0 for e in gpu.iterfind("retired_pages/*/retired_count"))


def _complaints(gpu: Element) -> tuple[str, ...]:
    """Return what the driver says of a device that programs cannot use, or whose fabric has not its full rate."""
    found = [f"{e.tag}: {(e.text or '').strip()}" for e in gpu.iter() if NO_VALUE.match((e.text or "").strip())][:1]
    if (action := _text(gpu, "gpu_recovery_action")) not in (None, "None", "Unknown"):
        found.append(f"recovery action: {action}")
    found += [name for name in ("reset_required",) if _text(gpu, f"gpu_reset_status/{name}") == "Yes"]
    if _text(gpu, "compute_mode") == "Prohibited":
        found.append("compute mode: Prohibited")
    for e in gpu.iterfind("fabric/health/*"):
        text = (e.text or "").strip()
        if text in ("Unhealthy", "Degraded", "Limited Capacity") or (text == "True" and e.tag != "partition_assigned"):
            found.append(f"fabric {e.tag}: {text}")
    return tuple(found)


def _processes(host: Host, gpu: Element) -> tuple[Process, ...] | None:
    listed = gpu.find("processes")
    if listed is None or (listed.text or "").strip() in ("N/A", "Insufficient Permissions"):
        return None
    found = []
    for info in listed.iter("process_info"):
        pid = _number(info, "pid")
        if pid is not None:
            name = _text(info, "process_name") or text_or_none(host, f"/proc/{pid:.0f}/comm")
            found.append(Process(pid=int(pid), name=name, memory_bytes=_mib(info, "used_memory")))
    return tuple(found)


def _links(host: Host) -> dict[int, tuple[int, int]]:
    """Return the numbers of active links and of all links by device; empty without NVLink.

    Devices of a node have as many links each: one of which the tool lists fewer, or none, has lost them.
    """
    try:
        text = host.ask("nvidia-smi", "nvlink", "--status")
    except Unseen:
        return {}
    blocks = re.split(r"^(?=GPU \d+:)", text, flags=re.MULTILINE)
    listed = {int(head[1]): block for block in blocks if (head := re.match(r"GPU (\d+):", block))}
    states = {index: re.findall(r"^\s+Link \d+: (.+)$", block, re.MULTILINE) for index, block in listed.items()}
    expected = max(map(len, states.values()), default=0)
    if not expected and any(ALL_INACTIVE in b.lower() and not WITHOUT_LINKS.search(b) for b in listed.values()):
        expected = 1  # at least
    return {index: (sum("GB/s" in s for s in states[index]), expected) for index in states} if expected else {}


def _errors(gpu: Element, kind: str) -> int | None:
    """Return the number of errors of a kind since the driver started. "uncorrectable" is not "correctable"."""
    volatile = gpu.find("ecc_errors/volatile")
    if volatile is None:
        return None
    is_wanted = (lambda tag: "uncorrect" in tag) if kind == "uncorrect" else (lambda tag: "_correctable" in tag)
    counts = [_as_number(e.text) for e in volatile.iter() if is_wanted(e.tag)]
    counts.append(_number(volatile, f"{'double' if kind == 'uncorrect' else 'single'}_bit/total"))  # Volta and before
    known = [c for c in counts if c is not None]
    return int(sum(known)) if known else None


def _slowdowns(events: Element | None) -> tuple[str, ...]:
    if events is None:
        return ()
    found = []
    for event in events:
        name = re.sub(r"^clocks_(?:event|throttle)_reason_", "", event.tag)
        if (event.text or "").strip() == "Active" and name in SLOWDOWNS:
            found.append(SLOWDOWNS[name])
    return tuple(found)


def _address(identity: str) -> str:
    """sysfs writes the domain with four digits, nvidia-smi with eight."""
    domain, _, rest = identity.partition(":")
    return f"{domain[-4:]}:{rest}".lower()


def _module_version(text: str | None) -> str | None:
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", f"{text or ''} ")
    return match[1] if match else None


def _text(element: Element | None, path: str) -> str | None:
    found = None if element is None else element.find(path)
    text = "" if found is None else (found.text or "").strip()
    return None if text in _TEXTS["nothing"] else text


def _number(element: Element | None, path: str) -> float | None:
    return _as_number(_text(element, path))


def _as_number(text: str | None) -> float | None:
    match = re.match(r"\s*(-?\d+(?:\.\d+)?)", text or "")
    return float(match[1]) if match else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _mib(element: Element, path: str) -> int | None:
    value = _number(element, path)
    return None if value is None else int(value * MIB)
