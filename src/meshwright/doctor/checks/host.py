"""The host: processors, memory, NUMA, disks, time."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.doctor.checks import Check, Node
from meshwright.doctor.devices import int_or_none
from meshwright.doctor.host import Host, Unseen
from meshwright.doctor.verdict import CheckStatus, CheckVerdict, found, judge
from meshwright.units import GIB

GROUP = "host"
FILE_SYSTEMS = ("/", "/tmp", "/var/tmp")
KIB = 1024


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
    names = node.host.glob("/sys/devices/system/node/node*/meminfo")
    if not names:
        raise Unseen("the kernel shows no NUMA nodes")
    empty = []
    for name in names:
        match = re.search(r"MemTotal:\s+(\d+) kB", node.host.read(name))
        if match and int(match[1]) == 0:
            empty.append(re.sub(r"\D", "", name.split("/")[-2]))
    message = f"without memory: node {', '.join(empty)}" if empty else ""
    yield found("host.numa", not empty, message, measured=len(names), unit="node" if len(names) == 1 else "nodes")


def _disk(node: Node) -> Iterator[CheckVerdict]:
    """Free space by `df`; each file system counts once."""
    seen = set()
    for path in FILE_SYSTEMS:
        try:
            fields = node.host.ask("df", "-P", "-k", str(node.host.path(path))).splitlines()[-1].split()
            device, free_kib = fields[0], int(fields[3])
        except (IndexError, ValueError):
            raise Unseen("df printed no sizes") from None
        if (device, free_kib) not in seen:
            seen.add((device, free_kib))
            yield judge("disk.free", free_kib * KIB / GIB, where=path)


def _time(node: Node) -> Iterator[CheckVerdict]:
    """Offset from network time by chrony; without it, systemd's synchronization state."""
    try:
        tracking = node.host.ask("chronyc", "-n", "tracking")
    except Unseen:
        yield from _time_by_systemd(node)
        return
    match = re.search(r"^System time\s*:\s*([\d.eE+-]+) seconds", tracking, re.MULTILINE)
    if re.search(r"^Leap status\s*:\s*Not synchronised", tracking, re.MULTILINE) or match is None:
        yield found("time.offset", CheckStatus.WARN, "chrony is not synchronised", hint="`chronyc sources -v`")
        return
    yield judge("time.offset", abs(float(match[1])))


def _time_by_systemd(node: Node) -> Iterator[CheckVerdict]:
    text = node.host.ask("timedatectl", "show", "-p", "NTPSynchronized", "--value").strip()
    if text not in ("yes", "no"):
        raise Unseen("neither chrony nor systemd says whether the clock is synchronised")
    yield found(
        "time.offset", CheckStatus.PASS if text == "yes" else CheckStatus.WARN, measured=f"synchronised: {text}",
        hint="`timedatectl set-ntp true`, or run chronyd",
    )  # fmt: skip


CHECKS: dict[str, Check] = {
    "host.load": _load,
    "host.processors": _processors,
    "host.governor": _governor,
    "host.numa": _numa,
    "memory.free": _memory,
    "memory.swap-used": _swap,
    "memory.errors": _memory_errors,
    "disk.free": _disk,
    "time.offset": _time,
}
