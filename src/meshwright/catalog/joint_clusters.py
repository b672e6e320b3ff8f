"""Clusters of two generations, or of nodes of two sizes: names of their parts, joined with a plus.

    h100-8x8+h200-8x8      64 H100 and 64 H200
    h100-8x8+h100-4x1      64 H100 in nodes of 8, and a node of 4

Equal shares of batch and layers let the slowest part set the pace; the smallest memory is the limit, and
collectives run at the rates of the slowest links. Accelerator and fabric have these values. Nodes of several sizes
count as nodes of as many devices as divide all sizes: groups of that many neighbours lie in one node wherever they
begin, and a ring over all nodes has the network of the smallest one. Plans whose pipeline stages lie on one part each
are costed part by part (`planner.generations`).
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from meshwright.catalog.clusters import cluster, own_cluster, shape_of
from meshwright.catalog.entries import CatalogEntry, normal_name
from meshwright.errors import InputError
from meshwright.specs.hardware import Accelerator, Cluster, Fabric

SEPARATOR = "+"
MOST_PARTS = 8


def joint_cluster(name: str, *, fabric_name: str | None = None, own: CatalogEntry | None = None) -> Cluster:
    """Return the cluster that `name` describes, of one part or of several; all on `fabric_name`, if it is given.

    Parts that name the accelerator `own`, which a user's file holds, have it.

    Raises InputError when parts cannot train together, and as `cluster` for each of them.

    >>> c = joint_cluster("h100-8x8+h200-8x4")
    >>> (c.num_devices, c.accelerator.name, [part.name for part in c.parts])
    (96, 'h100', ['h100-8x8', 'h200-8x4'])
    """
    names = name.split(SEPARATOR)
    if len(names) > MOST_PARTS:
        raise InputError("a cluster has too many parts", got=len(names), allowed=f"2 to {MOST_PARTS}")
    parts = tuple(_part(part.strip(), fabric_name=fabric_name, own=own) for part in names)
    return parts[0] if len(parts) == 1 else joined(parts)


def names_device(name: str, own: CatalogEntry) -> bool:
    """Return whether a part of the cluster `name` is of the accelerator `own`. Raises InputError for no name."""
    return any(_is_of(part, own) for part in name.split(SEPARATOR))


def _is_of(part: str, own: CatalogEntry) -> bool:
    return normal_name(shape_of(part)[0]) in map(normal_name, (own.name, *own.aliases))


def _part(name: str, *, fabric_name: str | None, own: CatalogEntry | None) -> Cluster:
    if own is None or not _is_of(name, own):
        return cluster(name, fabric_name=fabric_name)
    _, devices_per_node, num_nodes = shape_of(name)
    return own_cluster(own, devices_per_node=devices_per_node, num_nodes=num_nodes, fabric_name=fabric_name)


def joined(parts: tuple[Cluster, ...]) -> Cluster:
    """Return the cluster of several parts. Raises InputError when they cannot train together."""
    first, *others = parts
    for other in others:
        one, two = first.accelerator.vendor, other.accelerator.vendor
        if one != two:
            raise InputError(
                "parts of a cluster must have the same vendor",
                got=f"{first.name}: {one}, {other.name}: {two}",
                hint="plan each part by itself",
            )
    slowest = slowest_part(parts)
    return Cluster(
        name=SEPARATOR.join(part.name for part in parts),
        stated=tuple(dict.fromkeys(text for part in parts for text in part.stated)),
        accelerator=_common_accelerator(parts, slowest.accelerator),
        fabric=_common_fabric(parts, slowest.fabric),
        devices_per_node=gcd(*(part.devices_per_node for part in parts)),
        num_nodes=sum(part.num_nodes for part in parts),
        parts=parts,
    )


def slowest_part(parts: tuple[Cluster, ...]) -> Cluster:
    """The part whose devices have the lowest peak in bf16, of equal ones the least memory bandwidth."""
    return min(parts, key=lambda part: (_bf16(part.accelerator), part.accelerator.memory_bytes_per_s))


def smallest_part(parts: tuple[Cluster, ...]) -> Cluster:
    """The part whose devices have the least memory."""
    return min(parts, key=lambda part: part.accelerator.memory_bytes)


def _bf16(accelerator: Accelerator) -> float:
    peaks = accelerator.peak_flops_per_s
    return peaks.get("bf16", min(peaks.values()))


def _common_accelerator(parts: tuple[Cluster, ...], slowest: Accelerator) -> Accelerator:
    """The slowest accelerator with the formats, memory and links that all have, and the mean power."""
    devices = [part.accelerator for part in parts]
    formats = set.intersection(*(set(d.peak_flops_per_s) for d in devices))
    watts = [(d.tdp_w, part.num_devices) for d, part in zip(devices, parts, strict=True)]
    known = [watt * count for watt, count in watts if watt is not None]
    num_devices = sum(part.num_devices for part in parts)
    return replace(
        slowest,
        peak_flops_per_s={f: min(d.peak_flops_per_s[f] for d in devices) for f in sorted(formats)},
        memory_bytes=min(d.memory_bytes for d in devices),
        memory_bytes_per_s=min(d.memory_bytes_per_s for d in devices),
        host_bytes_per_s=min(d.host_bytes_per_s for d in devices),
        tdp_w=sum(known) / num_devices if len(known) == len(parts) else None,
    )


def _common_fabric(parts: tuple[Cluster, ...], slowest: Fabric) -> Fabric:
    """The fabric of the slowest part with the slowest links of all."""
    fabrics = [part.fabric for part in parts]
    return replace(
        slowest,
        scale_up_domain=gcd(*(f.scale_up_domain for f in fabrics)),
        scale_up_bytes_per_s=min(f.scale_up_bytes_per_s for f in fabrics),
        scale_up_peer_bytes_per_s=min(f.scale_up_peer_bytes_per_s for f in fabrics),
        scale_up_latency_s=max(f.scale_up_latency_s for f in fabrics),
        scale_out_bytes_per_s=min(f.scale_out_bytes_per_s for f in fabrics),
        scale_out_latency_s=max(f.scale_out_latency_s for f in fabrics),
        devices_per_nic=max(f.devices_per_nic for f in fabrics),
        rail_optimized=all(f.rail_optimized for f in fabrics),
        nodes_per_pod=min(f.nodes_per_pod for f in fabrics),
        oversubscription=max(f.oversubscription for f in fabrics),
    )
