"""Devices of a node as drivers and the PCI bus report them.

nvidia    one `nvidia-smi -q -x`, and `nvidia-smi nvlink --status`
amd       /sys/class/drm and /sys/class/kfd; no command is needed
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.doctor.host import Host, Unseen

COMPUTE_CLASSES = {"10de": ("0x0300", "0x0302"), "1002": ("0x0302", "0x0380", "0x1200")}
"""PCI classes of devices that compute, by vendor: VGA and 3D controllers, other displays, processing accelerators."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that uses a device. `name` is None if its PID belongs to another container."""

    pid: int
    name: str | None
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device. None: not reported. `accelerator` is its catalogue name, None where it is unknown."""

    index: int
    vendor: str
    name: str
    accelerator: str | None
    address: str  # on the PCI bus: 0000:75:00.0
    select: str  # NAME=VALUE, the environment variable that shows this device alone to PyTorch
    numa_node: int | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization_percent: float | None = None
    clock_mhz: float | None = None
    highest_clock_mhz: float | None = None
    temperature_c: float | None = None
    slowdown_temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    pcie_width: int | None = None
    highest_pcie_width: int | None = None
    pcie_generation: int | None = None  # that device and slot can have, also where an idle device has lowered it
    pcie_replays: int | None = None  # packets that the link sent again, since the driver started
    scale_up_links: int | None = None  # that are up
    expected_scale_up_links: int | None = None
    uncorrected_errors: int | None = None
    corrected_errors: int | None = None
    is_ecc_off: bool = False  # of a device that has it
    is_repair_pending: bool = False  # damaged memory will be mapped out at the next reset
    is_repair_failed: bool = False  # it could not be, or there is more than the maker allows
    complaints: tuple[str, ...] = ()  # of the driver about the device: it asks for a reset, or reads no value
    slowdowns: tuple[str, ...] = ()  # reasons for a reduced clock
    firmware: str | None = None
    fabric_state: str | None = None  # registration with the switches' manager: "Completed", "In Progress", ...
    fabric_status: str | None = None  # "Success" once it is completed
    partition: str | None = None  # MIG, CPX, ...: None or SPX where the device is whole
    processes: tuple[Process, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Devices:
    """All devices of a node. `on_bus` are PCI addresses; a device that is there and not in `found` is lost."""

    found: tuple[Device, ...] = ()
    on_bus: tuple[str, ...] = ()
    driver: str | None = None
    runtime: str | None = None  # "CUDA 12.8", "ROCm 7.0.0"
    tool_seconds: float | None = None
    problem: str | None = None  # reason that the driver or its tool gave no answer
    warnings: tuple[str, ...] = ()  # of the tool, behind its answer

    @property
    def lost(self) -> tuple[str, ...]:
        there = {d.address for d in self.found}
        return tuple(address for address in self.on_bus if address not in there)


def find_devices(host: Host) -> Devices:
    """Return the devices of the node, of either vendor."""
    from meshwright.doctor.devices import amd, nvidia

    for vendor in (nvidia, amd):
        devices = vendor.find(host)
        if devices.found or devices.on_bus or devices.problem:
            return devices
    return Devices()


def addresses_on_bus(host: Host, vendor: str) -> tuple[str, ...]:
    """Return the PCI addresses of a vendor's compute devices, with or without a driver."""
    found = []
    for folder in host.glob("/sys/bus/pci/devices/*"):
        try:
            is_ours = host.read(f"{folder}/vendor") == f"0x{vendor}"
            if is_ours and host.read(f"{folder}/class")[:6] in COMPUTE_CLASSES[vendor]:
                found.append(folder.rpartition("/")[2].lower())
        except Unseen:
            continue
    return tuple(found)


def hottest(sensors: Iterable[tuple[float | None, float | None]]) -> tuple[float | None, float | None]:
    """Return the temperature and the limit of the sensor with the least distance; the first one where none has both."""
    found = list(sensors)
    whole = [(limit - now, now, limit) for now, limit in found if now is not None and limit]
    return min(whole)[1:] if whole else found[0]


def pci_errors(host: Host, folder: str, kind: str) -> int | None:
    """Return the PCI errors of a device since it was found. `kind`: correctable, nonfatal, fatal."""
    match = re.search(r"^TOTAL_ERR_\w+ (\d+)$", text_or_none(host, f"{folder}/aer_dev_{kind}") or "", re.MULTILINE)
    return int(match[1]) if match else None


def int_or_none(host: Host, name: str) -> int | None:
    """Return a number of sysfs, or None if it is absent."""
    try:
        return host.read_int(name)
    except Unseen:
        return None


def text_or_none(host: Host, name: str) -> str | None:
    """Return a line of sysfs, or None if it is absent or empty."""
    try:
        return host.read(name) or None
    except Unseen:
        return None
