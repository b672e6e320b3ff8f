"""From names and numbers to a question about serving: models, clusters, formats, engines, loads, prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.catalog import price_per_device_hour
from meshwright.errors import InputError, UnknownNameError
from meshwright.inference.capacity import shipped_reserve
from meshwright.inference.estimate import Server, server
from meshwright.inference.formats import cache_format, computed_in, usual_cache, weight_format
from meshwright.inference.layout import layout_of, legal_layouts
from meshwright.inference.points import engines
from meshwright.inference.price import HourPrice, Ownership, owned
from meshwright.inference.serving import EngineTraits, RequestLoad
from meshwright.inference.work import Served
from meshwright.runfile import named_cluster, named_model
from meshwright.specs.hardware import Accelerator


@dataclass(frozen=True, kw_only=True)
class PriceTerms:
    """Terms of a price: given, the catalogue's for a region, or those of a bought device."""

    usd_per_device_hour: float | None = None
    region: str | None = None
    ownership: Ownership | None = None
    licence_usd_per_device_year: float = 0.0
    utilization: float = 1.0


def hour_price(terms: PriceTerms, device: Accelerator) -> HourPrice | None:
    """Price of a device-hour; None where none was given and the catalogue knows none."""
    more: dict[str, Any] = {
        "licence_usd_per_device_year": terms.licence_usd_per_device_year, "utilization": terms.utilization,
    }  # fmt: skip
    if terms.ownership is not None:
        return owned(terms.ownership, device, **more)
    if terms.usd_per_device_hour is not None:
        return HourPrice(usd_per_device_hour=terms.usd_per_device_hour, **more)
    try:
        found = price_per_device_hour(device.name, region=terms.region)
    except InputError:
        if terms.region is not None:
            raise
        return None
    return HourPrice(
        usd_per_device_hour=found.usd_per_device_hour, source=f"{found.offer}, {found.date}", **more
    )


def engine_named(name: str) -> EngineTraits:
    """The traits of an inference engine. Raises UnknownNameError."""
    if name not in engines():
        raise UnknownNameError("inference engine", name, known=engines())
    return engines()[name]


def served_model(
    *, model: str, cluster: str, precision: str, kv_precision: str | None, degrees: Mapping[str, int]
) -> Served:
    """A model in its formats on a layout. Without degrees: tensor parallelism over a whole scale-up domain."""
    place = named_cluster(cluster)
    weights, found = weight_format(precision, place.accelerator), named_model(model)
    given = dict(degrees)
    if not given:
        widest = max(legal_layouts(found, place), key=lambda layout: layout.tensor, default=None)
        given = {"tensor": widest.tensor if widest else 1}
    return Served(
        model=found,
        cluster=place,
        weights=weights,
        cache=cache_format(kv_precision or usual_cache(weights), place.accelerator),
        layout=layout_of(given, place.num_devices),
    )


def served_by(
    of: Served, *, engine: str, memory_ratio: float | None = None, prefill_replicas: int = 0
) -> Server:
    """A server of `of` with the traits of an engine."""
    reserve = shipped_reserve()
    if memory_ratio is not None:
        reserve = replace(reserve, memory_ratio=memory_ratio)
    return server(of, engine_named(engine), reserve=reserve, prefill_replicas=prefill_replicas)


def notes_of(of: Served, loads: Sequence[RequestLoad]) -> tuple[str, ...]:
    """Cautions that hold for every estimate of these loads."""
    found = []
    device = of.cluster.accelerator
    gemms = computed_in(of.weights, device)
    if gemms != of.weights.matmul:
        found.append(f"{device.name} does not multiply {of.weights.matmul}: weights are widened to {gemms}")
    if any(load.drafted_per_step for load in loads):
        found.append("speculative decoding: verification is counted, the time of drafting is not")
    if of.model.experts is not None:
        found.append("experts are assumed to be chosen uniformly (balanced routing)")
    found.append("ITL is (end-to-end - TTFT) / (output tokens - 1), the mean over a request (TPOT)")
    return tuple(found)
