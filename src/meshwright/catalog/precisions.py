"""Devices on which a precision runs, from the formats of their units and `data/precisions.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import log2

from meshwright.catalog.entries import DATA
from meshwright.errors import InputError
from meshwright.specs.hardware import Accelerator, Cluster
from meshwright.specs.precision import PRECISIONS, Precision


@dataclass(frozen=True, kw_only=True)
class DeviceNeed:
    """The architectures that run a precision, where units for its format are not enough."""

    architectures: tuple[str, ...]  # that have it
    source: str
    engines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # those of an engine that has fewer
    engine_sources: Mapping[str, str] = field(default_factory=dict)


@cache
def device_needs() -> dict[str, DeviceNeed]:
    """Return the needs of the precisions that have any, by name."""
    document = tomllib.loads((DATA / "precisions.toml").read_text(encoding="utf-8"))
    return {name: DeviceNeed(**need) for name, need in document.items()}


def multiplied_on(accelerator: Accelerator, precision: Precision) -> Precision:
    """Return `precision` with the format that `accelerator` multiplies.

    fp16 shares the rate of bf16, except on devices older than bf16, whose datasheets give fp16 its own.
    """
    formats = accelerator.peak_flops_per_s
    if precision.matmul in formats or precision.name not in formats:
        return precision
    return replace(precision, matmul=precision.name)


def multiplies(accelerator: Accelerator, precision: Precision, *, engine: str = "") -> bool:
    """Return True if `accelerator` has units for `precision` and its scales, and `engine` uses them there.

    >>> from meshwright.catalog.accelerators import accelerator
    >>> [multiplies(accelerator(name), PRECISIONS["mxfp8"]) for name in ("h100", "b200", "mi300x", "mi355x")]
    [False, True, False, True]
    """
    if multiplied_on(accelerator, precision).matmul not in accelerator.peak_flops_per_s:
        return False
    need = device_needs().get(precision.name)
    return need is None or accelerator.architecture in need.engines.get(engine, need.architectures)


def refuse_precision(precision: Precision, cluster: Cluster, *, engine: str = "") -> None:
    """Raise InputError, with the nearest that runs, if `engine` cannot run `precision` on a device of `cluster`."""
    devices = [part.accelerator for part in cluster.parts or (cluster,)]
    for device in devices:
        if multiplies(device, precision, engine=engine):
            continue
        usable = [
            name
            for name, recipe in PRECISIONS.items()
            if all(multiplies(other, recipe, engine=engine) for other in devices)
        ]
        has_units = multiplied_on(device, precision).matmul in device.peak_flops_per_s
        raise InputError(
            f"{device.name} does not multiply {precision.name if has_units else precision.matmul}",
            got=precision.name,
            allowed=", ".join(sorted(usable)),
            hint=f"precision: {_nearest(precision, usable)} is the nearest that it multiplies"
            if usable
            else None,
        )


def _nearest(precision: Precision, usable: list[str]) -> str:
    """The one of `usable` with the nearest number of bits and, of these, the nearest scales; fp16 comes last."""
    order = list(PRECISIONS)

    def distance(name: str) -> tuple[float, bool, int]:
        bits = log2(PRECISIONS[name].linear_input_bytes / precision.linear_input_bytes)
        return abs(bits), name == "fp16", abs(order.index(name) - order.index(precision.name))

    return min(usable, key=distance)
