"""Devices: number, errors, temperature, clocks, links, and processes of others."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator

from meshwright.doctor.checks import Check, Node
from meshwright.doctor.checks.process import container
from meshwright.doctor.devices import Device, Process, pci_errors, text_or_none
from meshwright.doctor.host import Host, Unseen
from meshwright.doctor.verdict import CheckStatus, CheckVerdict, found, judge, limits, skipped
from meshwright.units import GIB

GROUP = "devices"
HIGHEST_CREDIBLE_MHZ = 10_000.0
"""No accelerator reaches half of this: a driver that reports more (such as 65535) reports no clock."""
NO_DEVICE = "no device was found"
SHARES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
"""Variables that may restrict the process to a part of the node's devices."""
OFF_THE_BUS = b"\xff\xff"
"""PCI configuration of a device that no longer answers."""


def where(device: Device) -> str:
    """Return the name of a device in verdicts."""
    return f"device {device.index}"


def _present(node: Node) -> Iterator[CheckVerdict]:
    devices = node.devices
    num_found = len(devices.found)
    for address in devices.lost if num_found else ():
        yield _missing(node, address)
    if devices.problem and not num_found:
        hint = "load the driver, or restart the node when driver and library differ in version"
        yield found("devices.present", CheckStatus.FAIL, devices.problem, measured=0, unit="devices", hint=hint)
    elif not num_found and node.num_expected_devices is None:
        raise Unseen("no accelerator: neither on the PCI bus nor through nvidia-smi")
    else:
        yield _count(node)


def _missing(node: Node, address: str) -> CheckVerdict:
    """Return the verdict of a device on the bus without a driver entry: lost, or hidden from this process."""
    is_off = node.host.begins(f"/sys/bus/pci/devices/{address}/config", OFF_THE_BUS)
    has_share = container(node.host) is not None or any(name in node.host.environment for name in SHARES)
    if has_share and not is_off:
        return found(
            "devices.present", CheckStatus.WARN, "on the bus, and not shown to this process: lost, or given to others",
            where=address, hint="run it outside the container or allocation, or say --expect-devices",
        )  # fmt: skip
    message = "it no longer answers on the bus" if is_off else "on the bus, but its driver does not have it"
    return found(
        "devices.present", CheckStatus.FAIL, message, where=address,
        hint="the device is lost: look at log.kernel, restart the node, then seat or exchange it",
    )  # fmt: skip


def _count(node: Node) -> CheckVerdict:
    num_found, expected = len(node.devices.found), node.num_expected_devices
    if expected is not None:
        hint = "--expect-devices sets the expected number"
        is_right = num_found == expected
        return found("devices.present", is_right, measured=num_found, expected=expected, unit="devices", hint=hint)
    usual = _usual_count(node)
    is_short = usual is not None and num_found < usual
    return found(
        "devices.present", CheckStatus.WARN if is_short else CheckStatus.PASS,
        f"a node of this device usually has {usual}" if is_short else "",
        measured=num_found, expected=usual, unit="devices",
        hint="the scheduler may have given a part of the node; `--expect-devices N` says how many there should be",
    )  # fmt: skip


def _usual_count(node: Node) -> int | None:
    """Devices of the catalogue's usual node; None for partitions and unknown devices."""
    names = {d.accelerator for d in node.devices.found}
    name = names.pop() if len(names) == 1 else None
    if name is None or any((d.partition or "SPX").startswith(("MIG", "DPX", "QPX", "CPX")) for d in node.devices.found):
        return None
    from meshwright.catalog.accelerators import usual_devices_per_node

    return usual_devices_per_node(name)


def _require(node: Node) -> tuple[Device, ...]:
    if not node.devices.found:
        raise Unseen(NO_DEVICE)
    return node.devices.found


def _known(node: Node) -> Iterator[CheckVerdict]:
    for device in _require(node):
        is_known = device.accelerator is not None
        message = "" if is_known else "not in the catalogue: no expected rates"
        seen = {"where": where(device), "measured": device.name, "expected": device.accelerator}
        yield found("devices.known", is_known, message, **seen)


def _has_parts(node: Node) -> bool:
    return any(d.partition for d in node.devices.found)


def _alike(node: Node) -> Iterator[CheckVerdict]:
    for what, values in {
        "model": [d.name for d in _require(node)],
        "firmware": [d.firmware for d in node.devices.found if d.firmware],
        "pcie": [f"PCIe {d.pcie_generation}" for d in node.devices.found if d.pcie_generation],
        "partition": [d.partition or "whole" for d in node.devices.found] if _has_parts(node) else [],
    }.items():
        if values:
            counts = Counter(values)
            listed = ", ".join(f"{n} x {value}" if len(counts) > 1 else value for value, n in counts.most_common())
            yield found(f"devices.{what}", len(counts) == 1, measured=listed)


def _memory(node: Node) -> Iterator[CheckVerdict]:
    from meshwright.catalog.lookup import accelerator

    for device in _require(node):
        if device.memory_bytes is None:
            yield _not_reported("devices.memory", device)
        elif device.accelerator is not None:
            expected = accelerator(device.accelerator).memory_bytes / GIB
            yield judge("devices.memory", device.memory_bytes / GIB, expected=expected, where=where(device))


def _processes(node: Node) -> Iterator[CheckVerdict]:
    """A foreign process fails when it holds memory that a training needs; else it may be a monitor."""
    is_inside = container(node.host) is not None
    for device in _require(node):
        if device.processes is None:
            yield _not_reported("devices.processes", device)
            continue
        if not device.processes:
            yield found("devices.processes", CheckStatus.PASS, where=where(device), measured=0, unit="processes")
        for process in device.processes:
            message = _process_message(process, is_inside=is_inside)
            yield found("devices.processes", _status_of(process), message, where=where(device), measured=process.pid)


def _status_of(process: Process) -> CheckStatus:
    bound = limits()["devices.memory-used"].fail_above
    is_large = bound is not None and (process.memory_bytes or 0) > bound * GIB
    return CheckStatus.FAIL if is_large else CheckStatus.WARN


def _process_message(process: Process, *, is_inside: bool) -> str:
    size = "" if process.memory_bytes is None else f" holds {process.memory_bytes / GIB:.1f} GiB"
    if process.name is not None:
        return f"{process.name}{size}"
    return f"a process that cannot be seen from {'this container' if is_inside else 'here'}{size}"


def _clocks(node: Node) -> Iterator[CheckVerdict]:
    by_name: dict[str, list[float]] = {}
    for device in _require(node):
        if _is_credible(device.highest_clock_mhz):
            by_name.setdefault(device.name, []).append(device.highest_clock_mhz or 0.0)
    for device in node.devices.found:
        highest = device.highest_clock_mhz
        for mhz in (device.clock_mhz, highest):
            if mhz is not None and not _is_credible(mhz):
                message = "no clock: the driver's answer is not to be believed"
                seen = {"where": where(device), "measured": mhz, "expected": HIGHEST_CREDIBLE_MHZ}
                yield found("clocks.credible", False, message, **seen)
                break
        if highest is not None and _is_credible(highest):
            expected = statistics.median(by_name[device.name])
            yield judge("clocks.highest", highest, expected=expected, where=where(device))


def _is_credible(mhz: float | None) -> bool:
    return mhz is not None and 0 < mhz <= HIGHEST_CREDIBLE_MHZ


def _slowdowns(node: Node) -> Iterator[CheckVerdict]:
    for device in _require(node):
        listed = ", ".join(device.slowdowns)
        is_set = device.slowdowns == ("clock set by somebody",)
        status = CheckStatus.PASS if not listed else CheckStatus.WARN if is_set else CheckStatus.FAIL
        yield found("clocks.slowdown", status, where=where(device), measured=listed or "none")


def _judging(
    check: str, measured: Callable[[Device], float | None], *, expected: Callable[[Device], float | None] | None = None
) -> Check:
    """Return the check of a value that the driver reports of each device. None: it does not."""

    def judged(node: Node) -> Iterator[CheckVerdict]:
        for device in _require(node):
            value = measured(device)
            if value is None:
                yield _not_reported(check, device)
            else:
                yield judge(check, value, expected=None if expected is None else expected(device), where=where(device))

    return judged


def _margin(device: Device) -> float | None:
    """Degrees to the temperature at which the device slows down."""
    if device.temperature_c is None or not device.slowdown_temperature_c:
        return None
    return device.slowdown_temperature_c - device.temperature_c


def _pcie(node: Node) -> Iterator[CheckVerdict]:
    """Lanes. The speed of a lane is no sign: an idle device lowers it."""
    for device in _require(node):
        if device.pcie_width is None or not device.highest_pcie_width:
            yield _not_reported("links.pcie", device)
        else:
            width, most = device.pcie_width, device.highest_pcie_width
            yield found("links.pcie", width >= most, where=where(device), measured=width, expected=most)


def _scale_up(node: Node) -> Iterator[CheckVerdict]:
    for device in _require(node):
        if device.scale_up_links is None or not device.expected_scale_up_links:
            if len(node.devices.found) > 1:
                yield _not_reported("links.scale-up", device)
        else:
            expected = device.expected_scale_up_links
            yield judge("links.scale-up", device.scale_up_links, expected=expected, where=where(device))


def _fabric(node: Node) -> Iterator[CheckVerdict]:
    """Registration with the manager of the switches, without which devices do not reach each other."""
    if _has_switches(node.host) and container(node.host) is None:
        # The manager may run in a container: it is known by its process, whose name the kernel cuts at 15 letters.
        names = {text_or_none(node.host, name) for name in node.host.glob("/proc/[0-9]*/comm")}
        if names and "nv-fabricmanage" not in names:
            yield found(
                "links.fabric", False, "the node has switches, and nothing manages them", measured="none",
                expected="nv-fabricmanager", hint="`systemctl start nvidia-fabricmanager`, in the driver's version",
            )  # fmt: skip
    for device in _require(node):
        if device.fabric_state in (None, "Not Supported"):
            continue
        is_done = device.fabric_state == "Completed" and device.fabric_status in (None, "Success")
        seen = " ".join(filter(None, (device.fabric_state, device.fabric_status)))
        yield found("links.fabric", is_done, where=where(device), measured=seen)


def _has_switches(host: Host) -> bool:
    """True with NVSwitches on the PCI bus: other bridges of that vendor."""
    folders = [f for f in host.glob("/sys/bus/pci/devices/*") if text_or_none(host, f"{f}/vendor") == "0x10de"]
    return any((text_or_none(host, f"{f}/class") or "").startswith("0x0680") for f in folders)


def _errors(node: Node) -> Iterator[CheckVerdict]:
    for device in _require(node):
        if (count := device.uncorrected_errors) is None:
            yield _not_reported("devices.errors", device)
        else:
            yield found("devices.errors", not count, where=where(device), measured=count)
        if device.corrected_errors is not None:
            yield judge("devices.corrected-errors", device.corrected_errors, where=where(device))
        if device.is_ecc_off:
            message = "now, or after the next reset: errors of its memory are neither corrected nor seen"
            yield found("devices.ecc", False, message, where=where(device), measured="off")
        if device.is_repair_failed or device.is_repair_pending:
            failed = device.is_repair_failed
            yield found(
                "devices.repair", CheckStatus.FAIL if failed else CheckStatus.WARN,
                "damaged memory could not be mapped out, or is more than its maker allows" if failed
                else "damaged memory is mapped out at the next reset",
                where=where(device), hint="exchange the device" if failed else "reset the device",
            )  # fmt: skip


def _state(node: Node) -> Iterator[CheckVerdict]:
    for device in _require(node):
        seen = ", ".join(device.complaints) or "usable"
        yield found("devices.state", not device.complaints, where=where(device), measured=seen)


def _pci_errors(node: Node) -> Iterator[CheckVerdict]:
    """Errors of the device's PCI link since it was found. Programs that probe for devices cause non-fatal ones."""
    for device in _require(node):
        folder = f"/sys/bus/pci/devices/{device.address}"
        if pci_errors(node.host, folder, "fatal"):
            yield found("links.errors", False, "a fatal error of its PCI link", where=where(device))
        elif known := [n for n in (pci_errors(node.host, folder, "correctable"), device.pcie_replays) if n is not None]:
            yield judge("links.errors", max(known), where=where(device))


def _numa(node: Node) -> Iterator[CheckVerdict]:
    nodes = [d.numa_node for d in _require(node)]
    if all(n is None or n < 0 for n in nodes):
        raise Unseen("the firmware does not say which NUMA node a device is near")
    counts = Counter(n for n in nodes if n is not None)
    listed = " + ".join(str(count) for _, count in sorted(counts.items()))
    yield found("devices.numa", len(set(counts.values())) == 1, measured=listed)


def _tool(node: Node) -> Iterator[CheckVerdict]:
    for warning in node.devices.warnings:
        yield found("devices.tool", False, warning)
    if node.devices.tool_seconds is None:
        raise Unseen("no tool was asked")
    yield judge("devices.tool-seconds", node.devices.tool_seconds)


def _not_reported(check: str, device: Device) -> CheckVerdict:
    return skipped(check, "the driver does not report it", where=where(device))


CHECKS: dict[str, Check] = {
    "devices.present": _present,
    "devices.known": _known,
    "devices.model": _alike,
    "devices.memory": _memory,
    "devices.memory-used": _judging("devices.memory-used", lambda d: d.memory_used_bytes and d.memory_used_bytes / GIB),
    "devices.utilization": _judging("devices.utilization", lambda d: d.utilization_percent),
    "devices.processes": _processes,
    "devices.errors": _errors,
    "devices.state": _state,
    "devices.numa": _numa,
    "devices.tool-seconds": _tool,
    "clocks.highest": _clocks,
    "clocks.slowdown": _slowdowns,
    "temperature.margin": _judging("temperature.margin", _margin),
    "power.limit": _judging(
        "power.limit", lambda d: d.power_limit_w if d.default_power_limit_w else None,
        expected=lambda d: d.default_power_limit_w,
    ),
    "links.pcie": _pcie,
    "links.errors": _pci_errors,
    "links.scale-up": _scale_up,
    "links.fabric": _fabric,
}  # fmt: skip
