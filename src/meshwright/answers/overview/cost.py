"""Dollars per million tokens and per run, rented or owned, with the sensitivity to each assumption.

    USD per million tokens = (price + licence / 8,766 h) x 1e6 / (3600 s x tokens/s/device x utilisation)
    USD per run            = that x tokens of the run / 1e6

A rented price has power in it. An owned one is capital, interest, upkeep and electricity over the hours of its life.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.answers.comparison.sides import OUTPUT_RATE, THROUGHPUT, Side, SideValue, known_accelerator
from meshwright.answers.serving_question import PriceTerms
from meshwright.catalog import lookup as catalog
from meshwright.catalog.prices import Price, licences
from meshwright.errors import InputError
from meshwright.inference.price import HourPrice, owned
from meshwright.units import HOUR_S

UTILISATIONS = (0.5, 1.0)
"""Ends of the sensitivity to utilisation, where none is given."""
ELECTRICITY_RATIO = 2.0
"""Factor of the sensitivity to the price of electricity, down and up. An assumption."""


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """Cost of the tokens of one entry at one price."""

    name: str
    accelerator: str
    offer: str
    date: str
    source: str
    usd_per_device_hour: float  # licence included
    usd_per_million_tokens: float
    low: float | None  # of the rate's interval
    high: float | None
    usd_per_run: float | None


@dataclass(frozen=True, kw_only=True)
class CostSensitivity:
    """USD per million tokens when one assumption is varied."""

    what: str
    low_case: str
    high_case: str
    low: float
    high: float


def priced_values(side: Side) -> list[SideValue]:
    """Rates per device of one side, each under the side's name and workload."""
    found = []
    for value in side.values:
        devices = value.conditions.get("devices", "")
        if value.metric == THROUGHPUT:
            rate = 1.0
        elif value.metric == OUTPUT_RATE and devices.isdecimal() and int(devices):
            rate = 1 / int(devices)
        else:
            continue
        scaled = {k: v * rate for k in ("low", "high") if (v := getattr(value, k)) is not None}
        name = (
            side.name
            if len([v for v in side.values if v.metric == value.metric]) == 1
            else f"{side.name}: {value.workload}"
        )
        found.append(
            replace(
                value, workload=name, value=value.value * rate, samples=tuple(s * rate for s in value.samples), **scaled
            )
        )
    return found


def cost_rows(
    values: Sequence[SideValue], terms: PriceTerms, *, tokens: dict[str, float] | None = None
) -> list[CostRow]:
    """Each value at each price that is known of its accelerator; `tokens` of the run by name."""
    names = {value.conditions.get("accelerator", "") for value in values}
    prices = {name: hour_prices(name, terms) for name in names}
    return [
        _row(value, price, offer, tokens=(tokens or {}).get(value.workload))
        for value in values
        for price, offer in prices[value.conditions.get("accelerator", "")]
    ]


def unpriced(values: Sequence[SideValue], rows: Sequence[CostRow]) -> str:
    """A sentence that names the accelerators of the catalogue without a price; empty where all have one."""
    asked = dict.fromkeys(value.conditions.get("accelerator", "") for value in values)
    missing = [
        name for name in asked if known_accelerator(name) is not None and name not in {row.accelerator for row in rows}
    ]
    return f"No price of {' and '.join(missing)} is known: --price USD gives one for all rows." if missing else ""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Origin of a price."""

    name: str
    date: str
    source: str


def hour_prices(accelerator: str, terms: PriceTerms) -> list[tuple[HourPrice, Offer]]:
    """Prices of one device for one hour under the terms: the given one, the owned one, or the catalogue's offers."""
    if terms.usd_per_device_hour is not None:
        price = HourPrice(usd_per_device_hour=terms.usd_per_device_hour, **terms.of_every_price)
        return [(price, Offer(name="price given", date="", source="given"))]
    regions = sorted({p.region for p in (*catalog.prices(), *catalog.market_prices()) if p.region})
    if terms.region is not None and terms.region.lower() not in (r.lower() for r in regions):
        raise InputError("no price is known in this region", got=terms.region, allowed=", ".join(regions))
    device = known_accelerator(accelerator)
    if device is None:
        return []
    if terms.ownership is not None:
        offer = Offer(name=f"owned for {terms.ownership.life_years:g} years", date="", source="terms given")
        return [(owned(terms.ownership, device, **terms.of_every_price), offer)]
    return [
        (
            HourPrice(usd_per_device_hour=p.usd_per_device_hour, source=p.source, **terms.of_every_price),
            Offer(name=p.offer, date=p.date, source=p.source),
        )
        for p in offers(device.name)
        if terms.region is None or p.region.lower() == terms.region.lower()
    ]  # fmt: skip


def offers(accelerator: str) -> list[Price]:
    """The catalogue's offers of one accelerator: the source documents', then the market's; lowest first."""
    return [
        p
        for prices in (catalog.prices(), catalog.market_prices())
        for p in sorted(prices, key=lambda p: p.usd_per_device_hour)
        if p.accelerator == accelerator
    ]


def usd_per_million(price: HourPrice, tokens_per_s_per_device: float) -> float:
    """
    >>> usd_per_million(HourPrice(usd_per_device_hour=3.6), 1000.0)
    1.0
    """
    return 1e6 * price.total_usd_per_device_hour / (HOUR_S * tokens_per_s_per_device * price.utilization)


def sensitivities(value: SideValue, terms: PriceTerms) -> list[CostSensitivity]:
    """One assumption at a time, largest effect first: region, utilisation, licence, electricity, rate."""
    known = hour_prices(value.conditions.get("accelerator", ""), terms)
    if not known:
        return []
    base = known[0][0]
    found = []

    def vary(what: str, cases: Sequence[tuple[str, HourPrice, float]]) -> None:
        usd = [(usd_per_million(price, rate), case) for case, price, rate in cases]
        (low, low_case), (high, high_case) = min(usd), max(usd)
        if high > low:
            found.append(CostSensitivity(what=what, low_case=low_case, high_case=high_case, low=low, high=high))

    rate = value.value
    vary("offer", [(offer.name, price, rate) for price, offer in known])
    vary("utilisation", [(f"{u:.0%}", replace(base, utilization=u), rate) for u in (*UTILISATIONS, base.utilization)])
    licence = sorted({0.0, base.licence_usd_per_device_year, *(x.usd_per_device_year for x in licences())})
    vary(
        "licence per device and year",
        [(f"{usd:,.0f} USD", replace(base, licence_usd_per_device_year=usd), rate) for usd in licence],
    )
    ends = [e for e in (*value.samples, value.low, value.high) if e]
    if ends:
        vary("tokens/s of a device", [(f"{r:,.0f}", base, r) for r in (min(ends), max(ends))])
    own, device = terms.ownership, known_accelerator(value.conditions.get("accelerator", ""))
    if own is not None and device is not None:
        shared = terms.of_every_price
        cases = [own.usd_per_kwh / ELECTRICITY_RATIO, own.usd_per_kwh * ELECTRICITY_RATIO]
        vary(
            "electricity",
            [(f"{usd:g} USD/kWh", owned(replace(own, usd_per_kwh=usd), device, **shared), rate) for usd in cases],
        )
        lives = [own.life_years - 1, own.life_years + 1]
        vary(
            "years of life",
            [(f"{y:g}", owned(replace(own, life_years=y), device, **shared), rate) for y in lives if y > 0],
        )
    return sorted(found, key=lambda s: s.low - s.high)


def _row(value: SideValue, price: HourPrice, offer: Offer, *, tokens: float | None) -> CostRow:
    usd = usd_per_million(price, value.value)
    ends = [e for e in (value.low, value.high) if e] or [s for s in value.samples if s > 0]
    return CostRow(
        name=value.workload, accelerator=value.conditions.get("accelerator", ""), offer=offer.name, date=offer.date,
        source=offer.source, usd_per_device_hour=price.total_usd_per_device_hour, usd_per_million_tokens=usd,
        low=usd_per_million(price, max(ends)) if ends else None,
        high=usd_per_million(price, min(ends)) if ends else None,
        usd_per_run=None if tokens is None else usd * tokens / 1e6,
    )  # fmt: skip
