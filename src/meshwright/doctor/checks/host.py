"""The host: processors, memory, NUMA, disks, time."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.doctor.checks import Check, Node
from meshwright.doctor.devices import int_or_none, text_or_none
from meshwright.doctor.host import Host, Unseen
from meshwright.doctor.verdict import CheckStatus, CheckVerdict, found, judge
from meshwright.units import GIB

GROUP = "host"
FILE_SYSTEMS = ("/", "/tmp", "/var/tmp")
KIB = 1024
SMALLEST_NODE = 0.9
"""Of the memory of the largest NUMA node. The kernel takes some percent of the first one; a missing module is more."""
OLDEST_KERNEL = (5, 5)
"""Accelerate, utils/other.py, check_os_kernel: before it, a training may hang."""
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
"""Sources that are read through the kernel and a device, and not by an instruction."""


def meminfo(host: Host) -> dict[str, int]:
    """Return /proc/meminfo in bytes."""
    text = host.read("/proc/meminfo")
    return {name: int(kib) * KIB for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def num_listed(text: str) -> int:
    """Return how many numbers a list of the kernel holds.

    >>> num_listed("0-3,8")
    5
    """
    spans = [part.partition("-") for part in text.split(",") if part.strip()]
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


def num_processors(host: Host) -> int:
    """Return the number of online processors."""
    return num_listed(host.read("/sys/devices/system/cpu/online"))


def _load(node: Node) -> Iterator[CheckVerdict]:
    load = float(node.host.read("/proc/loadavg").split()[0])
    yield judge("host.load", load / num_processors(node.host))


def _processors(node: Node) -> Iterator[CheckVerdict]:
    present = num_listed(node.host.read("/sys/devices/system/cpu/present"))
    online = num_processors(node.host)
    yield found("host.processors", online == present, measured=online, expected=present)


def _governor(node: Node) -> Iterator[CheckVerdict]:
    names = node.host.glob("/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor")
    if not names:
        raise Unseen("this processor has no governor that the kernel shows")
    held = sorted({node.host.read(name) for name in names})
    yield found("host.governor", held == ["performance"], measured=", ".join(held))


def _memory(node: Node) -> Iterator[CheckVerdict]:
    memory = meminfo(node.host)
    if "MemAvailable" not in memory:
        raise Unseen("/proc/meminfo does not state the available memory")
    yield judge("memory.free", memory["MemAvailable"] / memory["MemTotal"])


def _swap(node: Node) -> Iterator[CheckVerdict]:
    memory = meminfo(node.host)
    yield judge("memory.swap-used", (memory.get("SwapTotal", 0) - memory.get("SwapFree", 0)) / GIB)


def _memory_errors(node: Node) -> Iterator[CheckVerdict]:
    """Errors of host memory since boot, as the memory controllers count them."""
    controllers = node.host.glob("/sys/devices/system/edac/mc/mc*/ue_count")
    if not controllers:
        raise Unseen("no memory controller reports errors (EDAC)")
    count = sum(node.host.read_int(name) for name in controllers)
    yield found("memory.errors", not count, measured=count)
    corrected = [int_or_none(node.host, name.replace("ue_count", "ce_count")) for name in controllers]
    yield judge("memory.corrected-errors", sum(filter(None, corrected)))


def _numa(node: Node) -> Iterator[CheckVerdict]:
    """Nodes without processors are the memory of devices (GH200), or placeholders for parts of it."""
    sizes = {}
    for name in node.host.glob("/sys/devices/system/node/node*/meminfo"):
        match = re.search(r"MemTotal:\s+(\d+) kB", node.host.read(name))
        if match and text_or_none(node.host, name.replace("meminfo", "cpulist")):
            sizes[re.sub(r"\D", "", name.split("/")[-2])] = int(match[1])
    if not sizes:
        raise Unseen("the kernel shows no NUMA nodes with processors")
    few = [number for number, size in sizes.items() if size < SMALLEST_NODE * max(sizes.values())]
    message = f"less memory than the others, or none: node {', '.join(few)}" if few else ""
    yield found("host.numa", not few, message, measured=len(sizes), unit="node" if len(sizes) == 1 else "nodes")


def _kernel(node: Node) -> Iterator[CheckVerdict]:
    """Kernels of Red Hat keep an old number and have later code."""
    release = node.host.read("/proc/sys/kernel/osrelease")
    match = re.match(r"(\d+)\.(\d+)(?!.*\.el\d)", release)
    if match is None:
        raise Unseen(f"the kernel's release does not say how old it is: {release[:40]}")
    yield found("host.kernel", (int(match[1]), int(match[2])) >= OLDEST_KERNEL, measured=release)


def _clock_source(node: Node) -> Iterator[CheckVerdict]:
    source = node.host.read("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    yield found("host.clock-source", source not in SLOW_CLOCKS, measured=source)


def _free(node: Node, unit: str) -> Iterator[tuple[str, int, int]]:
    """Yield folder, size and free part of each file system, in the unit of an option of `df`; each counts once."""
    seen = set()
    for path in FILE_SYSTEMS:
        fields = node.host.ask("df", "-P", unit, str(node.host.path(path))).splitlines()[-1].split()
        try:
            device, size, free = fields[0], int(fields[1]), int(fields[3])
        except (IndexError, ValueError):
            raise Unseen("df printed no sizes") from None
        if (device, free) not in seen:
            seen.add((device, free))
            yield path, size, free


def _disk(node: Node) -> Iterator[CheckVerdict]:
    for path, _, free_kib in _free(node, "-k"):
        yield judge("disk.free", free_kib * KIB / GIB, where=path)


def _inodes(node: Node) -> Iterator[CheckVerdict]:
    """File systems that make inodes as they need them report none at all."""
    for path, size, free in _free(node, "-i"):
        if size:
            yield judge("disk.inodes", free / size, where=path)


def _time(node: Node) -> Iterator[CheckVerdict]:
    """Offset from network time by chrony, positive when fast; without it, systemd's synchronization state."""
    try:
        tracking = node.host.ask("chronyc", "-n", "tracking")
    except Unseen:
        yield from _time_by_systemd(node)
        return
    match = re.search(r"^System time\s*:\s*([\d.eE+-]+) seconds (slow|fast)", tracking, re.MULTILINE)
    if re.search(r"^Leap status\s*:\s*Not synchronised", tracking, re.MULTILINE) or match is None:
        yield found("time.offset", CheckStatus.WARN, "chrony is not synchronised", hint="`chronyc sources -v`")
        return
    yield judge("time.offset", float(match[1]) * (1 if match[2] == "fast" else -1))


def _time_by_systemd(node: Node) -> Iterator[CheckVerdict]:
    text = node.host.ask("timedatectl", "show", "-p", "NTPSynchronized", "--value").strip()
    if text not in ("yes", "no"):
        raise Unseen("neither chrony nor systemd says whether the clock is synchronised")
    yield found(
        "time.offset", CheckStatus.PASS if text == "yes" else CheckStatus.WARN, measured=f"synchronised: {text}",
        hint="`timedatectl set-ntp true`, or run chronyd",
    )  # fmt: skip


CHECKS: dict[str, Check] = {
    "host.load": _load, "host.processors": _processors, "host.governor": _governor, "host.numa": _numa,
    "host.kernel": _kernel, "host.clock-source": _clock_source, "memory.free": _memory, "memory.swap-used": _swap,
    "memory.errors": _memory_errors, "disk.free": _disk, "disk.inodes": _inodes, "time.offset": _time,
}  # fmt: skip
