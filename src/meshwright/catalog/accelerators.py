"""Accelerators that Meshwright knows by name, and the system each is usually sold in."""

from __future__ import annotations

from functools import cache

from meshwright.catalog.entries import Kind, entry, names
from meshwright.specs.hardware import Accelerator

_SYSTEM_KEYS = ("default_fabric", "devices_per_node", "announced", "marketed_memory")
"""Keys of an entry that describe its usual system or its marketing, not the device."""


def accelerator_names() -> tuple[str, ...]:
    """Names of all accelerators in the catalogue."""
    return names(Kind.ACCELERATOR)


@cache
def accelerator(name: str) -> Accelerator:
    """The accelerator `name`; names under which published runs list it work too.

    Raises UnknownNameError with the nearest known name: an unknown device is never a silent A100.

    >>> accelerator("H100-SXM-80GB").name
    'h100'
    >>> accelerator("mi355x").peak_flops_per_s["bf16"] / 1e12
    2500.0
    """
    found = entry(Kind.ACCELERATOR, name)
    values = {key: value for key, value in found.values.items() if key not in _SYSTEM_KEYS}
    values["peak_flops_per_s"] = {f: float(peak) for f, peak in values["peak_flops_per_s"].items()}
    values["memory_bytes"] = int(values["memory_bytes"])
    return Accelerator(name=found.name, aliases=found.aliases, sources=found.sources, **values)


def default_fabric_name(accelerator_name: str) -> str:
    """Name of the fabric of the system that this accelerator usually comes in."""
    return entry(Kind.ACCELERATOR, accelerator_name).values["default_fabric"]


def usual_devices_per_node(accelerator_name: str) -> int:
    """Devices in one node of the system that this accelerator usually comes in."""
    return entry(Kind.ACCELERATOR, accelerator_name).values["devices_per_node"]
