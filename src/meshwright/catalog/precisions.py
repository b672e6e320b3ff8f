"""Devices on which a precision runs, from the formats of their units and `data/precisions.toml`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import log2

from meshwright.catalog.engines import engine_facts
from meshwright.catalog.entries import DATA
from meshwright.errors import InputError
from meshwright.files import toml_table
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
    return {name: DeviceNeed(**need) for name, need in toml_table(DATA / "precisions.toml").items()}


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
    """Raise InputError if `engine` cannot run `precision` on a device of `cluster`.

    Those that the devices multiply are allowed; the hint has the nearest of them in which the engine trains.
    """
    for device in _devices(cluster):
        if multiplies(device, precision, engine=engine):
            continue
        has_units = multiplied_on(device, precision).matmul in device.peak_flops_per_s
        allowed = usable_precisions(cluster, engine=engine)
        raise InputError(
            f"{device.name} does not multiply {precision.name if has_units else precision.matmul}",
            got=precision.name,
            allowed=", ".join(sorted(allowed)),
            hint=_nearest_hint(precision, allowed, engine=engine),
        )


def _nearest_hint(precision: Precision, allowed: Collection[str], *, engine: str) -> str | None:
    trained = engine_facts(engine).precisions if engine else ()
    usable = [name for name in allowed if not trained or name in trained]
    if not usable:
        return None
    of_engine = f" and {engine} trains in" if trained else ""
    return f"precision: {nearest_precision(precision, usable)} is the nearest that it multiplies{of_engine}"


def usable_precisions(cluster: Cluster | None, *, engine: str = "", among: Collection[str] = ()) -> tuple[str, ...]:
    """Return the precisions of `among` (empty: of all) that every device of `cluster` multiplies under `engine`."""
    return tuple(
        name
        for name, recipe in PRECISIONS.items()
        if name in (among or PRECISIONS)
        and all(multiplies(device, recipe, engine=engine) for device in _devices(cluster))
    )


def _devices(cluster: Cluster | None) -> tuple[Accelerator, ...]:
    return tuple(part.accelerator for part in cluster.parts or (cluster,)) if cluster else ()


def nearest_precision(precision: Precision, usable: Collection[str]) -> str:
    """Return the `usable` recipe with the nearest number of bits and, among equals, the nearest scales; fp16
    comes last."""
    order = list(PRECISIONS)

    def distance(name: str) -> tuple[float, bool, int]:
        bits = log2(PRECISIONS[name].linear_input_bytes / precision.linear_input_bytes)
        return abs(bits), name == "fp16", abs(order.index(name) - order.index(precision.name))

    return min(usable, key=distance)
