"""Clusters by name: ACCELERATOR-GPUS_PER_NODExNODES on the accelerator's usual fabric, or on a named one.

    h100-8x16          16 nodes of 8 H100 on NVSwitch and a rail-optimised 400 Gbit/s fat tree
    gb200-4x18         18 trays of 4: one NVL72 rack
    mi355x-8x12288     98,304 devices

A fabric whose scale-up links stay inside a node (`spans_nodes = false`) joins as many devices as the node
has. One that spans nodes (an NVL72 rack, a TPU pod) joins as many devices as the cluster uses of it: see `_domain`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from meshwright.catalog.accelerators import (
    accelerator,
    accelerator_names,
    accelerator_of,
    default_fabric_name,
    host_memory_of,
    usual_devices_per_node,
)
from meshwright.catalog.entries import CatalogEntry, CatalogKind, by_name, entry, names
from meshwright.errors import InputError
from meshwright.specs.hardware import Accelerator, Cluster, Fabric

_NAME = re.compile(r"(?P<accelerator>.+)-(?P<devices_per_node>\d+)x(?P<num_nodes>\d+)", re.IGNORECASE)

MAX_LENGTH = 200
"""Characters of a name. Python converts no number of thousands of digits."""

MAX_COUNT = 10**9
"""Nodes of a cluster and devices of a node."""

NAMING_RULE = "ACCELERATOR-GPUS_PER_NODExNODES, as in mi355x-8x64, gb200-4x18 or tpu-v5p-4x16"


def fabric_names() -> tuple[str, ...]:
    """Names of all fabrics in the catalogue."""
    return names(CatalogKind.FABRIC)


@by_name
@cache
def fabric(name: str) -> Fabric:
    """Return the fabric `name` of a whole system, before `placed_fabric` restricts it to a cluster."""
    found = entry(CatalogKind.FABRIC, name)
    values = {key: value for key, value in found.values.items() if key not in ("spans_nodes", "segment")}
    return Fabric(name=found.name, sources=found.sources, **values)


@by_name
@cache
def cluster(name: str, *, fabric_name: str | None = None) -> Cluster:
    """Return the cluster that `name` describes, on its accelerator's usual fabric or on `fabric_name`.

    Raises InputError when the name has another form or asks for no devices, UnknownNameError when the
    accelerator or the fabric is unknown.

    >>> c = cluster("mi355x-8x12288")
    >>> (c.accelerator.name, c.num_devices, c.fabric.scale_up_domain)
    ('mi355x', 98304, 8)
    >>> cluster("gb200-4x18").fabric.scale_up_domain
    72
    """
    device_name, devices_per_node, num_nodes = shape_of(name)
    device = accelerator(device_name)
    return Cluster(
        name=f"{device.name}-{devices_per_node}x{num_nodes}",
        accelerator=device,
        fabric=placed_fabric(
            fabric_name or default_fabric_name(device.name), devices_per_node=devices_per_node, num_nodes=num_nodes
        ),
        devices_per_node=devices_per_node,
        num_nodes=num_nodes,
        host_memory_bytes=host_memory_of(entry(CatalogKind.ACCELERATOR, device.name), devices_per_node),
    )


def shape_of(name: str) -> tuple[str, int, int]:
    """Return the accelerator's name, the devices of a node and the nodes that a cluster's name gives.

    Raises InputError when the name has another form or asks for no devices.

    >>> shape_of("mi355x-8x64")
    ('mi355x', 8, 64)
    """
    match = _NAME.fullmatch(name.strip())
    if match is None or len(name) > MAX_LENGTH or name.strip().lower().rpartition("x")[0] in accelerator_names():
        got = name[:MAX_LENGTH]
        raise InputError("a cluster name has another form", got=got, allowed=NAMING_RULE, hint=_shape_hint(got))
    devices_per_node, num_nodes = int(match["devices_per_node"]), int(match["num_nodes"])
    if devices_per_node < 1 or num_nodes < 1:
        raise InputError("a cluster needs at least one device and one node", got=name, allowed=NAMING_RULE)
    return match["accelerator"], devices_per_node, num_nodes


def own_cluster(own: CatalogEntry, *, devices_per_node: int, num_nodes: int, fabric_name: str | None = None) -> Cluster:
    """Return a cluster of the accelerator that a user's file describes.

    Links that the file states replace the links of its `default_fabric` and keep its latencies and
    efficiency. A `fabric_name` keeps its own links.
    """
    usual = own.values["default_fabric"]
    device = with_links(accelerator_of(own), fabric(usual), stated=own.values)
    return Cluster(
        name=f"{device.name}-{devices_per_node}x{num_nodes}",
        accelerator=device,
        fabric=placed_fabric(
            fabric_name or usual, devices_per_node=devices_per_node, num_nodes=num_nodes,
            links=None if fabric_name else device,
        ),
        devices_per_node=devices_per_node,
        num_nodes=num_nodes,
        stated=(f"accelerator {device.name} as its file describes it",),
        host_memory_bytes=host_memory_of(own, devices_per_node),
    )  # fmt: skip


_LINKS = ("scale_up_domain", "scale_up_bytes_per_s", "scale_up_peer_bytes_per_s", "scale_out_bytes_per_s")
"""Fields that accelerators and fabrics have alike."""


def with_links(device: Accelerator, usual: Fabric, *, stated: Mapping[str, Any]) -> Accelerator:
    """Return the accelerator with the links of its usual fabric where its file states none.

    The rate to one peer keeps its share of the rate of all links, which tells a mesh from a switch.
    """
    links = {key: stated.get(key, getattr(usual, key)) for key in _LINKS}
    if "scale_up_peer_bytes_per_s" not in stated:
        share = usual.scale_up_peer_bytes_per_s / usual.scale_up_bytes_per_s
        links["scale_up_peer_bytes_per_s"] = links["scale_up_bytes_per_s"] * share
    return replace(device, **links)


def _shape_hint(name: str) -> str:
    """Return names of complete clusters where `name` begins with an accelerator's, or the way to the list."""
    if "+" in name or name.count(":") > 1:
        return "a training run may have several parts, as in h100-8x8+h200-8x8 or h100-8x8+h100-4x1; elsewhere name one"
    text = name.strip().lower()
    if text in accelerator_names():
        return _shapes(text, 0)
    for form in (_COUNT_LAST, _COUNT_FIRST):
        if (match := form.fullmatch(text)) and match["device"] in accelerator_names():
            return _shapes(match["device"], int(match["count"] or 0))
    return "list the accelerators: meshwright catalog accelerators"


_COUNT_LAST = re.compile(r"(?P<device>.+?)\s*[-x*:\s]\s*(?P<count>\d{0,9})x?")
_COUNT_FIRST = re.compile(r"(?P<count>\d{1,9})\s*[-x*:\s]?\s*(?P<device>.+)")


def _shapes(device: str, count: int) -> str:
    """Names of clusters of `count` devices, one node and one device where there is no number.

    >>> _shapes("h100", 16), _shapes("h100", 13)
    ('16 devices are h100-8x2', '13 devices are h100-1x13 with one in each node; nodes of 8 are h100-8x1, h100-8x2')
    """
    usual = usual_devices_per_node(device)
    if not count:
        return f"{device}-1x1 is one device" + (f", {device}-{usual}x1 one node" if usual > 1 else "")
    if count <= usual or count % usual == 0:
        return f"{count} devices are {device}-{min(count, usual)}x{max(1, count // usual)}"
    below = count // usual
    return (
        f"{count} devices are {device}-1x{count} with one in each node; nodes of {usual} are "
        f"{device}-{usual}x{below}, {device}-{usual}x{below + 1}"
    )


def with_nodes(cluster: Cluster, num_nodes: int) -> Cluster:
    """Return the cluster of one part with `num_nodes` nodes, and the memory and network that a run states of it.

    >>> with_nodes(cluster("gb200-4x2"), 18).fabric.scale_up_domain
    72
    """
    placed = placed_fabric(
        cluster.fabric.name, devices_per_node=cluster.devices_per_node, num_nodes=num_nodes,
        links=cluster.accelerator if cluster.fabric.links_of else None,
    )  # fmt: skip
    fabric = replace(
        cluster.fabric, scale_up_domain=placed.scale_up_domain, scale_up_bytes_per_s=placed.scale_up_bytes_per_s
    )
    name = f"{cluster.accelerator.name}-{cluster.devices_per_node}x{num_nodes}"
    return replace(cluster, name=name, num_nodes=num_nodes, fabric=fabric)


@by_name
def placed_fabric(name: str, *, devices_per_node: int, num_nodes: int, links: Accelerator | None = None) -> Fabric:
    """Return the fabric `name` restricted to a cluster of this shape, with the rates and domain of `links` if given.

    On a mesh (links to each peer are separate) a domain of q devices has q-1 of the links: its scale-up rate
    is the sum of those. On a switch a smaller domain keeps the full rate.
    """
    for field, value in (("devices_per_node", devices_per_node), ("num_nodes", num_nodes)):
        if type(value) is not int or not 1 <= value <= MAX_COUNT:
            raise InputError(field, got=str(value)[:MAX_LENGTH], allowed=f"a whole number, 1 to {MAX_COUNT}")
    whole = fabric(name) if links is None else _with_links_of(fabric(name), links)
    domain = _domain(whole, devices_per_node=devices_per_node, num_nodes=num_nodes)
    reachable_bytes_per_s = whole.scale_up_peer_bytes_per_s * max(1, domain - 1)
    return replace(
        whole, scale_up_domain=domain, scale_up_bytes_per_s=min(whole.scale_up_bytes_per_s, reachable_bytes_per_s)
    )


def _with_links_of(whole: Fabric, device: Accelerator) -> Fabric:
    """The fabric with the links of an accelerator that a file describes."""
    own = {key: getattr(device, key) for key in _LINKS}
    source = f"accelerator {device.name}: {device.sources['all']}"
    return replace(whole, **own, links_of=device.name, sources={**whole.sources, **dict.fromkeys(own, source)})


def _domain(whole: Fabric, *, devices_per_node: int, num_nodes: int) -> int:
    """Devices per scale-up domain.

    A cluster that is neither one rack nor whole racks takes the same `segment` of every rack, as rack-aware
    schedulers place it: 256 GB200 are 4 x 64, not 3 x 72 + 40.
    """
    values = entry(CatalogKind.FABRIC, whole.name).values
    limit, num_devices = whole.scale_up_domain, devices_per_node * num_nodes
    if not values.get("spans_nodes", False):
        if devices_per_node > limit:
            raise InputError(
                f"a node on fabric {whole.name} has at most {limit} devices", got=devices_per_node,
                allowed=f"1 to {limit}", hint=f"the rule is {NAMING_RULE}",
            )  # fmt: skip
        return devices_per_node
    if num_devices <= limit:
        return num_devices
    return limit if num_devices % limit == 0 else min(limit, values.get("segment", limit))
