"""All checks of one node, and the report of their results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from meshwright.doctor.checks import Node, groups
from meshwright.doctor.checks.network import ports
from meshwright.doctor.checks.process import container
from meshwright.doctor.devices import text_or_none
from meshwright.doctor.host import Host, Unseen
from meshwright.doctor.verdict import CheckStatus, CheckVerdict, skipped
from meshwright.training.machine import processor_in

REPORT, VERSION = "meshwright doctor", 1


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Results of one node. `facts` are the properties that nodes of one cluster should share."""

    host: str
    facts: dict[str, str]
    node: Node
    verdicts: tuple[CheckVerdict, ...]

    @property
    def status(self) -> CheckStatus:
        """The worst status of all checks; skipped when every check was."""
        seen = {v.status for v in self.verdicts}
        return next(
            (s for s in (CheckStatus.FAIL, CheckStatus.WARN, CheckStatus.PASS) if s in seen), CheckStatus.SKIPPED
        )

    @property
    def counts(self) -> dict[str, int]:
        counted = Counter(v.status.value for v in self.verdicts)
        return {status.value: counted[status.value] for status in CheckStatus}

    def document(self) -> dict[str, Any]:
        """Return the document that --json writes and --compare reads."""
        return {
            "report": REPORT,
            "version": VERSION,
            "host": self.host,
            "time": datetime.now(tz=UTC).isoformat(timespec="seconds"),
            "verdict": self.status,
            "counts": self.counts,
            "facts": self.facts,
            "devices": [asdict(d) for d in self.node.devices.found],
            "checks": self.verdicts,
        }


def examine(node: Node, *, chosen: Iterable[str]) -> Examination:
    """Run the groups of checks in `chosen`."""
    verdicts: list[CheckVerdict] = []
    for group, checks in groups().items():
        if group in chosen:
            for name, check in checks.items():
                verdicts += _answers(name, check, node)
    return Examination(host=node.host.name, facts=facts(node), node=node, verdicts=tuple(verdicts))


def _answers(name: str, check: Any, node: Node) -> list[CheckVerdict]:
    answers: list[CheckVerdict] = []
    try:
        answers.extend(check(node))  # keeps the verdicts before the exception
    except Unseen as unseen:
        answers.append(skipped(name, unseen.reason))
    return answers


def facts(node: Node) -> dict[str, str]:
    """Return the properties that nodes of one cluster should share, without those that cannot be read."""
    host, devices = node.host, node.devices
    names = Counter(d.name for d in devices.found)
    firmware = sorted({d.firmware for d in devices.found if d.firmware})
    all_ports = ports(host)
    cards = sorted({f"{p.model} {p.firmware}" for p in all_ports if p.firmware})
    links = Counter(f"PCIe {d.pcie_generation} x{d.pcie_width}" for d in devices.found if d.pcie_generation)
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)', text_or_none(host, "/etc/os-release") or "", re.MULTILINE)
    seen = {
        "kernel": text_or_none(host, "/proc/sys/kernel/osrelease"),
        "system": match[1] if match else None,
        "container": container(host),
        "processor": processor_in(text_or_none(host, "/proc/cpuinfo") or ""),
        "memory": _memory(host),
        "devices": _counted(names),
        "driver": devices.driver,
        "runtime": devices.runtime,
        "device firmware": ", ".join(firmware),
        "device links": _counted(links),
        "network cards": ", ".join(cards),
        "card links": _counted(Counter(p.pci_link for p in all_ports if p.pci_link)),
        "card MTU": _counted(Counter(mtu for p in all_ports for mtu in p.mtu_bytes)),
        "torch": _torch(),
    }
    return {name: value for name, value in seen.items() if value}


def _counted(values: Counter[str]) -> str:
    return ", ".join(f"{count} x {value}" for value, count in sorted(values.items()))


def _memory(host: Host) -> str | None:
    """Return the memory in whole GiB: the kernel reserves a slightly different amount at each boot."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", text_or_none(host, "/proc/meminfo") or "", re.MULTILINE)
    return f"{int(match[1]) / 2**20:.0f} GiB" if match else None


def _torch() -> str | None:
    """Return the installed version without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None
