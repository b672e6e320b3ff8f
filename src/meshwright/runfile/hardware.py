"""Hardware that a run file states of its cluster: the network of a node, and the memory of a device.

    network: 25Gb/s               one port of 25 Gbit/s for all devices of a node
    network: 4x100Gb/s RoCE       four ports of 100 Gbit/s, with the latency and the efficiency of RoCE
    accelerator: ./my.toml        the accelerator `my` of a user's file (`accelerator_file`)
    device_memory: 40GiB          a partition of a device, or what others leave of it
    host_memory: 2TB              of a node, which offloaded tensors may fill
    power_w: 500                  limit of a device below its usual one, which lowers the clock of its matrix units

Everything else of the cluster, its scale-up links among them, is the catalogue's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.calibration.collectives import constants_for
from meshwright.catalog import lookup as catalog
from meshwright.catalog.interconnects import network_kinds
from meshwright.catalog.joint_clusters import joined
from meshwright.catalog.prices import power_assumptions
from meshwright.errors import nearest
from meshwright.runfile.problems import BelowError
from meshwright.specs.hardware import Accelerator, Cluster, Fabric
from meshwright.units import TB, format_bytes, parse_memory, parse_rate

MAX_PORTS = 1024
MIN_BYTES_PER_S, MAX_BYTES_PER_S = 12.5e6, 100 * TB
"""Rates of a node, one direction: 0.1 Gbit/s, and above what a rack of the newest devices has."""

MAX_HOST_BYTES = 10**15

_NETWORK = re.compile(
    r"(?:(?P<ports>[0-9]{1,4})\s*[x\N{MULTIPLICATION SIGN}*]\s*)?"
    r"(?P<rate>[0-9.]+\s*[A-Za-z]+(?:/[A-Za-z]+)?)(?:\s+(?P<kind>\S.*))?"
)
_FORM = "as in 25Gb/s, 4x100Gb/s or 8x400Gb/s RoCE"
_UNITS = "Gb/s and Tb/s count bits, GB/s and TB/s bytes, one direction"


@dataclass(frozen=True, kw_only=True)
class NodeNetwork:
    """The network of a node. `kind` None: the kind of the cluster's fabric."""

    text: str
    bytes_per_s: float  # of the node, one direction
    num_ports: int
    kind: str | None = None


def read_network(text: str) -> NodeNetwork:
    """Return the network that `text` describes: [PORTSx]RATE [KIND].

    Raises BelowError at `network` for another form or unit, an unknown kind, and a rate that no node has.

    >>> read_network("4x100Gb/s roce")
    NodeNetwork(text='4x100Gb/s RoCE', bytes_per_s=50000000000.0, num_ports=4, kind='RoCE')
    """
    match = _NETWORK.fullmatch(text.strip())
    if match is None:
        raise _no_rate(text)
    try:
        port_bytes_per_s = parse_rate(match["rate"])
    except ValueError:
        raise _no_rate(text) from None
    num_ports, kind = int(match["ports"] or 1), _kind(match["kind"])
    bytes_per_s = num_ports * port_bytes_per_s
    if not 1 <= num_ports <= MAX_PORTS:
        raise BelowError("network", "has no such number of ports", got=text, allowed=f"1 to {MAX_PORTS}")
    if not MIN_BYTES_PER_S <= bytes_per_s <= MAX_BYTES_PER_S:
        raise BelowError("network", "is out of range", got=text, allowed="0.1Gb/s to 100TB/s of a node", hint=_UNITS)
    plain = text.strip() if kind is None else f"{text.strip()[: match.start('kind')]}{kind}"
    return NodeNetwork(text=plain, bytes_per_s=bytes_per_s, num_ports=num_ports, kind=kind)


def _no_rate(text: str) -> BelowError:
    return BelowError("network", "is no rate of a node's network", got=text, allowed=_FORM, hint=_UNITS)


def _kind(text: str | None) -> str | None:
    """The known kind of network that `text` names, whatever its capitals."""
    known = {kind.lower(): kind for kind in network_kinds()}
    if text is None or text.lower() in known:
        return None if text is None else known[text.lower()]
    close = nearest(text.lower(), known)
    raise BelowError(
        "network", "is no kind of network", got=text, allowed=", ".join(known.values()),
        hint=f"did you mean {known[close]!r}?" if close else "without a kind, the cluster's fabric has it",
    )  # fmt: skip


def stated_cluster(
    name: str | Mapping[str, Any], *, accelerator: str | os.PathLike[str] | None = None, **stated: str | None
) -> str | dict[str, Any]:
    """Return a cluster as a run file has it: its name, or a mapping where an argument states some of its hardware.

    `stated` are `network` and `device_memory`. The path of an accelerator's file becomes absolute, so that it is found
    from the folder of any run file.
    """
    file = None if accelerator is None else os.path.abspath(accelerator)  # noqa: PTH100  without `..`
    given = {key: value for key, value in {"accelerator": file, **stated}.items() if value is not None}
    if isinstance(name, str):
        return {"name": name, **given} if given else name
    return {**name, **given}


def with_hardware(
    cluster: Cluster,
    *,
    fabric: str | None = None,
    network: str | None = None,
    oversubscription: float | None = None,
    device_memory: str | None = None,
    host_memory: str | None = None,
    power_w: float | None = None,
) -> Cluster:
    """Return the cluster, which is on the `fabric` that a run names, with what else it states; None: the catalogue's.

    Raises BelowError at the key whose value cannot be.
    """
    if cluster.parts:
        given = {
            "fabric": fabric, "network": network, "oversubscription": oversubscription,
            "device_memory": device_memory, "host_memory": host_memory, "power_w": power_w,
        }  # fmt: skip
        return joined(tuple(with_hardware(part, **given) for part in cluster.parts))
    stated, links, accelerator = [*cluster.stated], cluster.fabric, cluster.accelerator
    stated += [] if fabric is None else [f"fabric {links.name}"]
    if network is not None:
        found = read_network(network)
        links = with_network(links, found, devices_per_node=cluster.devices_per_node)
        kind = "" if found.kind else f" (of the kind of {links.name})"
        stated.append(f"a network of {found.text} a node{kind}")
    if oversubscription is not None:
        links = replace(links, oversubscription=oversubscription)
        stated.append(f"oversubscription {oversubscription:g}")
    if device_memory is not None:
        accelerator = replace(
            accelerator,
            memory_bytes=_memory(device_memory, accelerator),
            sources=_stated_sources(accelerator.sources, "memory_bytes", f"{device_memory} of memory"),
        )
        stated.append(f"{format_bytes(accelerator.memory_bytes)} of memory a device")
    if host_memory is not None:
        try:
            size = parse_memory(host_memory)
        except ValueError:
            size = 0
        if not 0 < size <= MAX_HOST_BYTES:
            raise BelowError(
                "host_memory", "is no size of a host's memory", got=host_memory, allowed="as in 2TB or 1024GiB"
            )
        cluster = replace(cluster, host_memory_bytes=size)
        stated.append(f"{format_bytes(size)} of memory a host")
    if power_w is not None and power_w != accelerator.tdp_w:
        accelerator = _limited(accelerator, power_w)
        clock = f"matrix units at {100 * accelerator.clock_ratio:.0f} % of their usual clock"
        stated.append(f"a power limit of {power_w:g} W a device ({clock})")
    states_network = network is not None or oversubscription is not None
    return replace(cluster, fabric=links, accelerator=accelerator, stated=tuple(stated), states_network=states_network)


def _limited(accelerator: Accelerator, power_w: float) -> Accelerator:
    """The accelerator under a power limit, with what this leaves of its clock."""
    power, usual_w = power_assumptions(), accelerator.tdp_w
    if usual_w is None:
        message = f"is stated of a device whose usual limit is not known: {accelerator.name}"
        raise BelowError("power_w", message, got=power_w, hint="state tdp_w in a file of the accelerator")
    least_w = power.idle_ratio * usual_w
    if not least_w < power_w < usual_w:
        raise BelowError(
            "power_w", f"is no power limit of {accelerator.name}", got=f"{power_w:g} W",
            allowed=f"above {least_w:g} W (idle), to {usual_w:g} W (the usual limit)",
        )  # fmt: skip
    ratio, width = power.clock_under(tdp_w=usual_w, limit_w=power_w)
    return replace(accelerator, power_w=power_w, clock_ratio=ratio, clock_width=width)


def with_network(fabric: Fabric, network: NodeNetwork, *, devices_per_node: int) -> Fabric:
    """Return the fabric with another network: each device has an equal share of the node's rate."""
    stated = f"{network.text} a node of {devices_per_node}"
    changed = replace(
        fabric,
        scale_out_bytes_per_s=network.bytes_per_s / devices_per_node,
        devices_per_nic=devices_per_node / network.num_ports,
        sources=_stated_sources(fabric.sources, "scale_out_bytes_per_s", stated),
    )
    return changed if network.kind is None else _of_kind(changed, network.kind)


def _stated_sources(sources: Mapping[str, str], key: str, value: str) -> dict[str, str]:
    """The sources of a value that the run states, and of the others."""
    stated = f"{value}: stated by the run"
    return {**sources, "all": f"{stated}; the rest: {sources['all']}", key: stated}


def _of_kind(fabric: Fabric, kind: str) -> Fabric:
    """The fabric with the latency and the efficiency of a kind of network; itself where it has them."""
    other = catalog.fabric(network_kinds()[kind])
    same_latency = other.scale_out_latency_s == fabric.scale_out_latency_s
    if same_latency and constants_for(other).out == constants_for(fabric).out:
        return fabric
    source = other.sources.get("scale_out_latency_s", other.sources["all"])
    return replace(
        fabric,
        scale_out_latency_s=other.scale_out_latency_s,
        network_of=other.name,
        sources={**fabric.sources, "scale_out_latency_s": f"{kind}, as fabric {other.name}: {source}"},
    )


def _memory(text: str, accelerator: Accelerator) -> int:
    """Bytes of a device that `text` states: above 0, at most the data sheet's."""
    try:
        stated = parse_memory(text)
    except ValueError:
        raise BelowError(
            "device_memory", "is no size of a device's memory", got=text, allowed="as in 40GiB or 40GB"
        ) from None
    if not 0 < stated <= accelerator.memory_bytes:
        raise BelowError(
            "device_memory",
            f"is not in the range of {accelerator.name}",
            got=text,
            allowed=f"above 0, to {format_bytes(accelerator.memory_bytes)}",
            hint=_larger_hint(accelerator, stated),
        )
    return stated


def _larger_hint(accelerator: Accelerator, stated: int) -> str | None:
    """Accelerators of the same die that have so much memory; None where there is none."""
    if stated <= accelerator.memory_bytes or not accelerator.die:
        return None
    others = map(catalog.accelerator, catalog.accelerator_names())
    larger = [one for one in others if one.die == accelerator.die and one.memory_bytes >= stated]
    if not larger:
        return None
    nearest_one = min(larger, key=lambda one: one.memory_bytes)
    return f"{nearest_one.name} has the same die and {format_bytes(nearest_one.memory_bytes)}"
