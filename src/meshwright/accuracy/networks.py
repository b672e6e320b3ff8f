"""Network between nodes as published rows describe it, in the form of a run file: 8x100Gb/s RoCE.

    8x200 Gb/s, 4 HCAs of 200G     ports of a node and the rate of each
    400 Gbps per node, 3.2 Tb/s    the rate of a node
    400 Gb/s per GPU, NDR          the rate of a port: as many ports as the usual network of the device has
    25 Gb/s Ethernet               one port of a node

A part of the text about links inside a node, storage or management is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from meshwright.accuracy.csvfile import CsvRow
from meshwright.accuracy.shipped import wordings
from meshwright.accuracy.statements import plain
from meshwright.runfile.hardware import MAX_BYTES_PER_S, MIN_BYTES_PER_S, read_network, with_network
from meshwright.specs.hardware import Fabric

_PARTS = re.compile(r";|\+|\||,(?! ?\d+ ?[GT]B|\d)|\n|\band\b(?= *\d)")
_OTHER_LINKS = re.compile(
    r"nv-?link|nv-?switch|nvl ?\d|pcie|\bc2c\b|xgmi|infinity fabric|\bupi\b|\bici\b|storage|management|front-?end"
    r"|\bNS\b|north|\bhbm|memory|per dir",
    re.IGNORECASE,
)
_NODE_LINKS = re.compile(r"\bnv-?link|\bpci-?e\b", re.IGNORECASE)
_RATE = re.compile(
    r"(?<![\d.])(?<![A-WYZa-wyz])(?P<number>\d+(?:,\d{3})*(?:\.\d+)?)[ -]?"
    r"(?:(?P<bytes>[GT])B(?:ps|/[sS]ec|/s)(?![a-zA-Z])"
    r"|(?P<bits>[GT])(?:i?ga)?(?:b(?:/?[sS](?:ec)?|ps|its?(?:/s|ps)?|e)?|bE|E)?(?![a-zA-Z]))"
)
_GIGABIT = re.compile(r"(?<=\d)( ?)(?:[Gg]iga-?bit|gb(?=ps\b|/s|e\b))")
_COUNT = re.compile(
    r"(?<![\w.])(?P<first>\d{1,2}) ?[x\u00d7*](?=[ \w])|(?<![\w.])(?P<of>\d{1,2}) (?:[\w-]+ ){0,3}?"
    r"(?:nics?|hcas?|ports?|links?|rails?|cards?|adapters?)\b|[GT]\w*(?:/\w+)? ?[x\u00d7*] ?(?P<last>\d{1,2})\b",
    re.IGNORECASE,
)
_OF = r"(?:per|/|in each|each|for each|a) ?"
_OF_NODE = re.compile(_OF + r"(?:compute )?(?:nodes?|servers?|hosts?|machines?|instances?|vms?|dgx)\b|node-node", re.I)
_OF_DEVICE = re.compile(_OF + r"(?:gpus?|devices?|accelerators?|gcds?|chips?)\b", re.IGNORECASE)
_PORT = re.compile(r"\b(?:nics?|hcas?|ports?|rails?|cards?|adapters?)\b", re.IGNORECASE)
_OF_DEVICES = re.compile(r"(?:per|for|shared by) (\d+) (?:gpus|devices|accelerators)\b", re.IGNORECASE)
_LABELS = ("", "network:", "net:", "interconnect:", "inter node:")
_LABEL = re.compile(r"^(?:net|network|compute|interconnect|inter-?node):\s*", re.IGNORECASE)
_TAPERED = re.compile(r"over-?subscri|\btaper", re.IGNORECASE)
_KNOWN = re.compile(r"dgx|superpod|default|not stated|grand teton|omni-path|slingshot|rdma|in paper|frontier", re.I)
_NETWORK = re.compile(r"\bnics?\b|\bhcas?\b|network|inter-?connect|inter-?node|slingshot|omni-path|\brdma\b", re.I)
_NOT_THERE = re.compile(
    r"\b(?:no|not|never|without|w/o|disabled|off|unavailable|unused|planned|future|upgrade|instead of|vs)\b|n/a", re.I
)
"""Words of a part that speaks of a network which the run did not use: it stays unread."""
_LARGEST_PORT = 800.0
"""Gbit/s of the fastest port sold (XDR): a single larger rate is of a node."""
_FASTEST_TCP = 50.0
"""Gbit/s up to which "Ethernet" means a port of the host and TCP; the network cards of GPUs, 100 Gbit/s and more, have
RDMA over Ethernet."""


SAME_RATE = 0.01
"""Relative difference of rates that are the same."""


@dataclass(frozen=True, kw_only=True)
class StatedNetwork:
    """Network between the nodes of a row."""

    text: str = ""  # ports, rate and kind as a run file states them; "": the network of the fabric
    assumed: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    read: tuple[str, ...] = ()  # clauses of the note that are this statement, in plain form


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Ports of a node, the rate of each in Gbit/s (0: not stated) and the kind of network ("": not stated)."""

    ports: int
    gbit: float
    kind: str
    assumed: str = ""


def read_network_of(row: CsvRow, fabric: Fabric, *, devices_per_node: int) -> StatedNetwork:
    """Return the network that a row of several domains states: its column, else its note.

    fabric: of the system on which the row runs by default; gives what the row leaves open.
    """
    column = [(text, True) for text in _parts(row.text("interconnect"))]
    note = [(text, False) for text in _parts(f"{row.text('notes')}; {row.text('gpu')}", network_only=True)]
    found = [(text, own, part) for text, own in (*column, *note) if (part := _read(text, fabric, devices_per_node))]
    read = {text for text, _, _ in found}
    unread = tuple(
        f"interconnect: {t}" for t, _ in column if _TAPERED.search(t) or (t not in read and not _KNOWN.search(t))
    )
    rated = [part for _, _, part in found if part.gbit]
    best = max(rated, key=lambda part: part.ports * part.gbit, default=None)
    kinds = {part.kind for _, _, part in found if part.kind}
    if best is not None and not best.kind and len(kinds) == 1:
        best = replace(best, kind=next(iter(kinds)))
    if best is None and len(kinds) > 1:
        return StatedNetwork(unread=(*unread, f"interconnect: {' or '.join(sorted(kinds))}"))
    if best is None:
        best = _Part(ports=_ports(fabric, devices_per_node), gbit=0.0, kind=next(iter(kinds), ""))
    others = sorted({p.ports * p.gbit for p in rated} - {best.ports * best.gbit})
    assumed = (
        [f"network of {best.ports * best.gbit:g} Gbit/s a node: the largest that the row states"] if others else []
    )
    text = _as_in_a_run_file(best, fabric, devices_per_node)
    changes = bool(text) and _changes(fabric, text, devices_per_node)
    return StatedNetwork(
        text=text if changes else "",
        assumed=(*assumed, *filter(None, [best.assumed])) if changes else (),
        unread=unread,
        read=tuple(f"{label}{plain(text)}" for text, own, _ in found if not own for label in _LABELS),
    )


def links_of(row: CsvRow) -> str:
    """Return what the row says of links and network: its column, and the parts of its note that name a link."""
    note = [part.strip() for part in re.split(r"[;,.]\s", row.text("notes")) if _NODE_LINKS.search(part)]
    return "; ".join(filter(None, (row.text("interconnect"), *note)))


def _parts(text: str, *, network_only: bool = False) -> list[str]:
    """Parts of `text` that may speak of the network between nodes."""
    text = _GIGABIT.sub(r"\1Gb", text)
    clauses = [clause.strip(" .") for clause in re.split(r";|\n|\|", text)]
    parts = [
        part.strip(" .")
        for clause in clauses
        for part in ([clause] if _is_one(clause, labelled=network_only) else _PARTS.split(clause))
    ]
    parts = [p for p in parts if not network_only or _NETWORK.search(p) or _kind(p)]
    parts = [_LABEL.sub("", part) for part in parts]
    return [part for part in parts if re.search(r"\w", part) and not _OTHER_LINKS.search(part)]


def _is_one(clause: str, *, labelled: bool) -> bool:
    """True where a clause describes one network, whatever commas it has: "RoCE, 4 NICs of 100 Gb/s"."""
    if _OTHER_LINKS.search(clause) or (labelled and not _LABEL.match(clause)):
        return False
    return len(_RATE.findall(clause)) <= 1 and len(_kinds(clause)) <= 1


def _kind(text: str) -> str:
    return next(iter(_kinds(text)), "")


def _kinds(text: str) -> list[str]:
    return [one["name"] for one in wordings()["network_kind"] if re.search(one["say"], text, re.IGNORECASE)]


def _read(text: str, fabric: Fabric, devices_per_node: int) -> _Part | None:
    if _NOT_THERE.search(text):
        return None
    for entry in wordings()["network_number"]:
        text = re.sub(entry["say"], entry["number"], text, flags=re.IGNORECASE)
    kind, gbit, counted = _kind(text), _gbit(text), _COUNT.search(text)
    if not gbit:
        return (
            _Part(ports=_ports(fabric, devices_per_node), gbit=0.0, kind=kind) if kind not in ("", "Ethernet") else None
        )
    if kind == "Ethernet" and gbit > _FASTEST_TCP:
        kind = "RoCE"
    count = int(next(filter(None, counted.groups()))) if counted else 0
    rate = _RATE.search(text)
    if rate and counted and counted["of"] and _OF_NODE.search(text[rate.end() : counted.start()]):
        gbit /= count  # "400 Gb/s per node (4 NICs)"
    if not MIN_BYTES_PER_S <= max(count, 1) * gbit / 8 * 1e9 <= MAX_BYTES_PER_S:
        return None
    if counted and _OF_NODE.search(text) and "(" in text[counted.end() : rate.start() if rate else 0]:
        count = 0  # "4x HDR (800 Gb/s per node)"
    if group := _OF_DEVICES.search(text):
        return _Part(ports=max(1, max(count, 1) * devices_per_node // int(group[1])), gbit=gbit, kind=kind)
    if _OF_DEVICE.search(text):
        return _Part(ports=max(count, 1) * devices_per_node, gbit=gbit, kind=kind)
    if count:
        return _Part(ports=count, gbit=gbit, kind=kind)
    if _OF_NODE.search(text) or kind in ("EFA", "Ethernet") or gbit > _LARGEST_PORT:
        return _Part(ports=1, gbit=gbit, kind=kind)
    ports = _ports(fabric, devices_per_node)
    is_of_node = gbit > (1 + SAME_RATE) * _port_gbit(fabric, devices_per_node)
    if not kind and (is_of_node or gbit <= _FASTEST_TCP) and not _PORT.search(text):
        return _Part(ports=1, gbit=gbit, kind=kind, assumed=f"network of {gbit:g} Gbit/s a node: {text}")
    return _Part(ports=ports, gbit=gbit, kind=kind, assumed=f"network of {ports} such ports a node: {text}")


def _gbit(text: str) -> float:
    """Gbit/s that a text states in numbers, else by a generation of InfiniBand; 0 where it states none."""
    if found := _RATE.search(text):
        unit = found["bytes"] or found["bits"]
        return float(found["number"].replace(",", "")) * (1000 if unit[0] == "T" else 1) * (8 if found["bytes"] else 1)
    listed = wordings()["infiniband"]
    return next((one["gbit"] for one in listed if re.search(rf"\b(?:{one['say']})\b", text, re.IGNORECASE)), 0.0)


def _ports(fabric: Fabric, devices_per_node: int) -> int:
    return max(1, round(devices_per_node / fabric.devices_per_nic))


def _port_gbit(fabric: Fabric, devices_per_node: int) -> float:
    return fabric.scale_out_bytes_per_s * devices_per_node / _ports(fabric, devices_per_node) * 8 / 1e9


def _changes(fabric: Fabric, text: str, devices_per_node: int) -> bool:
    """True where the stated network is another than the fabric's."""
    stated = with_network(fabric, read_network(text), devices_per_node=devices_per_node)
    is_same_kind = (stated.network_of, stated.scale_out_latency_s) == (fabric.network_of, fabric.scale_out_latency_s)
    return not (is_same_kind and abs(stated.scale_out_bytes_per_s / fabric.scale_out_bytes_per_s - 1) < SAME_RATE)


def _as_in_a_run_file(part: _Part, fabric: Fabric, devices_per_node: int) -> str:
    """The network in the form of a run file; empty where the row states neither rate nor kind."""
    if not part.gbit:
        port = _port_gbit(fabric, devices_per_node)
        return f"{part.ports}x{port:g}Gb/s {part.kind}" if part.kind else ""
    return f"{part.ports}x{part.gbit:g}Gb/s {part.kind}".strip()
