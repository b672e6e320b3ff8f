"""Network cards: ports that RDMA uses, their rates, PCI links, firmware and error counters."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from meshwright.doctor.checks import Check, Node
from meshwright.doctor.devices import int_or_none, pci_errors, text_or_none
from meshwright.doctor.host import Host, Unseen
from meshwright.doctor.verdict import CheckStatus, CheckVerdict, found, judge, limits
from meshwright.units import gbit_per_s_to_bytes_per_s

GROUP = "network"
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
ERROR_COUNTERS = (
    "symbol_error", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)  # fmt: skip
LOSS_COUNTERS = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rx_icrc_encapsulated")
FEWEST_PACKETS = 1_000_000
"""Fewer received packets say nothing of the share that is lost."""


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port of one RDMA card. `model` groups cards of a kind."""

    name: str  # mlx5_0/1
    model: str
    state: str  # ACTIVE, DOWN, INIT, ...
    gbit_per_s: float
    link_layer: str
    firmware: str | None
    num_errors: int
    num_downs: int | None  # since the driver started
    lost_ratio: float | None  # packets of RoCE that were lost on their way, of those received
    width: str  # 4X
    has_routable_address: bool | None  # has a RoCE v2 entry; None on InfiniBand
    pci_link: str | None  # of the card, as it runs: 32.0 GT/s PCIe x16
    highest_pci_link: str | None
    mtu_bytes: tuple[str, ...]  # of the card's network interfaces

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


def ports(host: Host) -> list[Port]:
    """Return all ports of the RDMA cards."""
    return [_port(host, folder) for folder in host.glob("/sys/class/infiniband/*/ports/*")]


def _port(host: Host, folder: str) -> Port:
    card = folder.split("/ports/")[0]
    rate = re.match(r"([\d.]+) Gb/sec", text_or_none(host, f"{folder}/rate") or "")
    layer = text_or_none(host, f"{folder}/link_layer") or "unknown"
    interfaces = host.glob(f"{card}/device/net/*")
    counters = [int_or_none(host, f"{folder}/counters/{name}") for name in ERROR_COUNTERS]
    counters += [int_or_none(host, f"{name}/statistics/rx_crc_errors") for name in interfaces]
    downs = [int_or_none(host, f"{folder}/counters/link_downed")]
    downs += [int_or_none(host, f"{name}/carrier_down_count") for name in interfaces if layer == "Ethernet"]
    lost = [int_or_none(host, f"{folder}/hw_counters/{name}") for name in LOSS_COUNTERS]
    received = int_or_none(host, f"{folder}/counters/port_rcv_packets") or 0
    width = re.search(r"\((\d+X)\b", text_or_none(host, f"{folder}/rate") or "")
    types = [text_or_none(host, name) for name in host.glob(f"{folder}/gid_attrs/types/*")]
    return Port(
        name=f"{card.rpartition('/')[2]}/{folder.rpartition('/')[2]}",
        model=text_or_none(host, f"{card}/board_id") or text_or_none(host, f"{card}/hca_type") or "unknown",
        state=(text_or_none(host, f"{folder}/state") or "unknown").rpartition(": ")[2],
        gbit_per_s=float(rate[1]) if rate else 0.0,
        link_layer=layer,
        firmware=text_or_none(host, f"{card}/fw_ver"),
        num_errors=sum(c for c in counters if c is not None),
        num_downs=max((d for d in downs if d is not None), default=None),
        lost_ratio=sum(filter(None, lost)) / received if received >= FEWEST_PACKETS else None,
        width=width[1] if width else "",
        has_routable_address="RoCE v2" in types if layer == "Ethernet" and types else None,
        pci_link=_pci_link(host, card, "current"),
        highest_pci_link=_pci_link(host, card, "max"),
        mtu_bytes=tuple(mtu for name in interfaces if (mtu := text_or_none(host, f"{name}/mtu"))),
    )


def _pci_link(host: Host, card: str, which: str) -> str | None:
    """Speed of a lane and number of lanes. Virtual functions report neither."""
    speed, width = (text_or_none(host, f"{card}/device/{which}_link_{what}") for what in ("speed", "width"))
    return f"{speed} x{width}" if speed and width and "Unknown" not in speed and width != "0" else None


def _require_ports(node: Node) -> list[Port]:
    found_ports = ports(node.host)
    if not found_ports:
        raise Unseen("no RDMA card: a training on many nodes would go over TCP")
    return found_ports


def _states(node: Node) -> Iterator[CheckVerdict]:
    """A port that is down fails if others of its kind are up; otherwise it may be unused."""
    all_ports = _require_ports(node)
    for port in all_ports:
        num_alike = sum(p.model == port.model and p.is_active for p in all_ports)
        status = CheckStatus.PASS if port.is_active else CheckStatus.FAIL if num_alike else CheckStatus.WARN
        message = f"{num_alike} others of its kind are active" if not port.is_active else ""
        yield found("rdma.state", status, message, where=port.name, measured=port.state)


def _rates(node: Node) -> Iterator[CheckVerdict]:
    active = [p for p in _require_ports(node) if p.is_active]
    for port in active:
        if port.link_layer == "InfiniBand" and port.width == "1X":
            yield found(
                "rdma.rate", CheckStatus.WARN, "one lane of four", where=port.name, measured=port.gbit_per_s,
                unit="Gbit/s", hint=limits()["rdma.rate"].hint,
            )  # fmt: skip
            continue
        usual = statistics.median(p.gbit_per_s for p in active if p.model == port.model)
        if usual:
            yield judge("rdma.rate", port.gbit_per_s, expected=usual, where=port.name)


def _total(node: Node) -> Iterator[CheckVerdict]:
    """All active ports against the network rate of the catalogue's usual system for these devices."""
    known = [d.accelerator for d in node.devices.found if d.accelerator]
    if not known:
        raise Unseen("no device that the catalogue knows")
    from meshwright.catalog.lookup import accelerator

    expected = sum(accelerator(name).scale_out_bytes_per_s for name in known)
    active = [p for p in _require_ports(node) if p.is_active]
    if not expected:
        raise Unseen("the catalogue knows no network rate of this device")
    total = sum(gbit_per_s_to_bytes_per_s(p.gbit_per_s) for p in active)
    yield judge("rdma.total", total / 1e9, expected=expected / 1e9)


def _pci_links(node: Node) -> Iterator[CheckVerdict]:
    """Unlike a device, a network card keeps the speed of its lanes when it is idle."""
    for port in _require_ports(node):
        if port.is_active and port.pci_link and port.highest_pci_link:
            link, highest = port.pci_link, port.highest_pci_link
            yield found("rdma.pcie", link == highest, where=port.name, measured=link, expected=highest)
        folder = f"/sys/class/infiniband/{port.name.partition('/')[0]}/device"
        many = limits()["links.errors"].status_of(pci_errors(node.host, folder, "correctable") or 0)
        if many is not CheckStatus.PASS or pci_errors(node.host, folder, "fatal"):
            hint = "seat the card, then exchange the riser or the cable"
            yield found("rdma.pcie", False, "errors of its PCI link", where=port.name, hint=hint)


def _errors(node: Node) -> Iterator[CheckVerdict]:
    for port in _require_ports(node):
        if port.is_active:
            yield judge("rdma.errors", port.num_errors, where=port.name)
            if port.num_downs is not None:
                yield judge("rdma.link-downs", port.num_downs, where=port.name)
            if port.lost_ratio is not None:
                yield judge("rdma.lost-packets", port.lost_ratio, where=port.name)


def _peer_memory(node: Node) -> Iterator[CheckVerdict]:
    """Cards of NVIDIA reach device memory through a kernel module, or through dma-buf of the open driver."""
    cards = [name for name in node.host.glob("/sys/class/infiniband/*") if "/mlx5" in name]
    if not cards or not any(d.vendor == "NVIDIA" for d in node.devices.found):
        return
    is_open = "Open Kernel Module" in (text_or_none(node.host, "/proc/driver/nvidia/version") or "")
    loaded = [m for m in PEER_MODULES if node.host.exists(f"/sys/module/{m}")]
    seen = ", ".join(loaded) or ("dma-buf" if is_open else "none")
    yield found("rdma.peer-memory", is_open or bool(loaded), measured=seen)


def _addresses(node: Node) -> Iterator[CheckVerdict]:
    for port in _require_ports(node):
        has_one = port.has_routable_address
        if port.is_active and has_one is not None:
            seen = "RoCE v2" if has_one else "none of RoCE v2"
            yield found("rdma.address", has_one, measured=seen, where=port.name)


def _alike(check: str, values: Callable[[Port], Iterable[str]]) -> Check:
    """Return the check that all ports of a kind have one value."""

    def judged(node: Node) -> Iterator[CheckVerdict]:
        by_model: dict[str, set[str]] = {}
        for port in _require_ports(node):
            by_model.setdefault(port.model, set()).update(values(port))
        for model, seen in by_model.items():
            if seen:
                yield found(check, len(seen) == 1, where=model, measured=", ".join(sorted(seen)))

    return judged


def _device_files(node: Node) -> Iterator[CheckVerdict]:
    """A container sees all cards in /sys, and reaches those alone whose device files it was given."""
    _require_ports(node)
    num_files = len(node.host.glob("/dev/infiniband/uverbs*"))
    yield found("rdma.device-files", num_files > 0, measured=num_files, unit="files")


CHECKS: dict[str, Check] = {
    "rdma.state": _states,
    "rdma.rate": _rates,
    "rdma.total": _total,
    "rdma.pcie": _pci_links,
    "rdma.errors": _errors,
    "rdma.address": _addresses,
    "rdma.peer-memory": _peer_memory,
    "rdma.firmware": _alike("rdma.firmware", lambda p: (p.firmware,) if p.firmware else ()),
    "rdma.mtu": _alike("rdma.mtu", lambda p: p.mtu_bytes if p.is_active and p.link_layer == "Ethernet" else ()),
    "rdma.device-files": _device_files,
}
