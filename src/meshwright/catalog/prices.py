"""Rental prices of devices, and assumptions about the power drawn around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log
from statistics import median
from typing import Any

from meshwright.catalog.accelerators import accelerator
from meshwright.catalog.entries import DATA, by_name
from meshwright.errors import InputError
from meshwright.files import toml_table
from meshwright.specs.estimate import Tier


@dataclass(frozen=True, kw_only=True)
class Price:
    """One published price of one device for one hour."""

    accelerator: str
    usd_per_device_hour: float
    region: str
    offer: str  # who, what, where
    date: str
    source: str


@dataclass(frozen=True, kw_only=True)
class PowerAssumptions:
    """Assumptions that turn a device's power into a cluster's: not measured but for `capped`, as `tier` says.

    A node draws `num_devices * device power * (1 + node_overhead_ratio)`, the building that times `pue`.
    """

    idle_ratio: float  # power of an idle device over its design power
    node_overhead_ratio: float  # processors, memory, network cards and fans over the devices' power
    pue: float  # power usage effectiveness of the building
    tier: Tier
    capped: tuple[Mapping[str, Any], ...]  # rates of GEMMs under two power limits (`power.toml`)
    sources: dict[str, str]

    def clock_under(self, *, tdp_w: float, limit_w: float) -> tuple[float, float]:
        """(clock under a power limit over the usual one, half of the 80 % interval of its logarithm).

        Dynamic power is C V^2 f. The voltage V follows the clock f down to a floor, so that a share x of the power
        leaves a clock between x, at the floor, and x^(1/3): the interval. The value is x^(1/k) with the median k of
        `capped`. Work that fills the matrix units is taken to draw all of the usual limit.
        """

        def power_left(usual_w: float, limit_w: float) -> float:
            return log((limit_w - self.idle_ratio * usual_w) / (usual_w - self.idle_ratio * usual_w))

        k = median(power_left(one["from_w"], one["to_w"]) / log(one["rate_ratio"]) for one in self.capped)
        left = power_left(tdp_w, limit_w)
        return exp(left / k), -left * (1 - 1 / 3) / 2


@cache
def prices() -> tuple[Price, ...]:
    """All known prices."""
    return tuple(Price(**row) for row in toml_table(DATA / "prices.toml")["price"])


@cache
def market_prices() -> tuple[Price, ...]:
    """Later prices of several sellers; `prices` has the source documents'."""
    return tuple(Price(**row) for row in toml_table(DATA / "prices.toml")["market"])


@by_name
def market_sentence(accelerator_name: str) -> str:
    """The range of the market's prices of an accelerator with its dates; empty where none is known.

    A device that was measured and is not in the catalogue has none.

    >>> market_sentence("b200")
    '6.00 to 8.60 USD per device-hour, 3 offers read 2026-08 to 2026-09'
    >>> market_sentence("AMD EPYC")
    ''
    """
    found = [p for p in market_prices() if p.accelerator == accelerator_name]
    if not found:
        return ""
    usd = sorted(p.usd_per_device_hour for p in found)
    dates = sorted({p.date[:7] for p in found})
    ends = f"{usd[0]:.2f}" if usd[0] == usd[-1] else f"{usd[0]:.2f} to {usd[-1]:.2f}"
    read = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    offers = "1 offer" if len(found) == 1 else f"{len(found)} offers"
    return f"{ends} USD per device-hour, {offers} read {read}"


@dataclass(frozen=True, kw_only=True)
class Licence:
    """One published price of a software licence for one device for one year. Open engines need none."""

    name: str
    usd_per_device_year: float
    date: str
    source: str


@cache
def licences() -> tuple[Licence, ...]:
    """All known licences; both, if sources disagree."""
    return tuple(Licence(**row) for row in toml_table(DATA / "prices.toml")["licence"])


@by_name
def price_per_device_hour(accelerator_name: str, *, region: str | None = None) -> Price:
    """The median of the market's offers of this accelerator; the source documents' price in `region` if one is given.

    The lowest of the documents' where the market has none. Raises InputError when no price is known; the caller then
    asks the user for one.

    >>> price_per_device_hour("mi300x", region="East US 2").usd_per_device_hour
    6.0
    >>> price_per_device_hour("b200").usd_per_device_hour
    6.69
    """
    name = accelerator(accelerator_name).name
    if region is None and (market := [p for p in market_prices() if p.accelerator == name]):
        return _median(market)
    known = [price for price in prices() if price.accelerator == name]
    if region is not None and known:
        of_device, known = known, [price for price in known if price.region.lower() == region.strip().lower()]
        if not known:
            raise InputError(
                f"no price of {name} is known in this region", got=region,
                allowed=", ".join(sorted({price.region for price in of_device})),
            )  # fmt: skip
    if not known:
        raise InputError(
            "no price is known for this accelerator", got=name,
            allowed=", ".join(sorted({price.accelerator for price in (*prices(), *market_prices())})),
            hint="give yours: --set costs.usd_per_device_hour=USD",
        )  # fmt: skip
    return min(known, key=lambda price: price.usd_per_device_hour)


def _median(offers: list[Price]) -> Price:
    """The median of several offers, a single one as it is."""
    if len(offers) == 1:
        return offers[0]
    return replace(
        offers[0],
        usd_per_device_hour=median(p.usd_per_device_hour for p in offers),
        region="",
        offer=f"median of {len(offers)} offers",
        date=max(p.date for p in offers),
        source="; ".join(dict.fromkeys(p.source for p in offers)),
    )


@cache
def power_assumptions() -> PowerAssumptions:
    """The power assumptions that apply when the user states none."""
    values = toml_table(DATA / "power.toml")
    return PowerAssumptions(**{**values, "tier": Tier[values["tier"].upper()], "capped": tuple(values["capped"])})
