"""Price and energy of tokens.

    USD per million tokens = price of the devices per hour x 1e6 / (tokens/s x 3600 x utilisation)
    output, input          the price of an hour split by device time: decoding pays for output, prefill for input
    J per token            (device power x devices x (1 + node overhead)) x PUE / tokens/s

Utilisation: share of paid hours in which the server runs at this load. Devices are assumed to draw their design power
while they serve, which is an upper bound. Systems are compared at equal bounds of TTFT and ITL, never each at its own
maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.catalog.lookup import power_assumptions
from meshwright.cost.money import owned_usd_per_device_hour
from meshwright.errors import InputError
from meshwright.inference.estimate import LoadEstimate
from meshwright.specs.hardware import Accelerator
from meshwright.units import HOUR_S, YEAR_S

MAX_USD = 1e9


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Costs of a device that is bought. Capital has the device's share of node, network, storage and installation."""

    capital_usd: float
    life_years: float = 4.0
    yearly_rate: float = 0.08
    residual_ratio: float = 0.0
    usd_per_kwh: float = 0.08
    yearly_upkeep_ratio: float = 0.05

    def __post_init__(self) -> None:
        limits = {
            "capital_usd": MAX_USD, "life_years": 100, "yearly_rate": 10, "residual_ratio": 1, "usd_per_kwh": 1000,
            "yearly_upkeep_ratio": 10,
        }  # fmt: skip
        for name, most in limits.items():
            value = getattr(self, name)
            least = 0 if name not in ("capital_usd", "life_years") else 1e-9
            if not least <= value <= most:
                raise InputError(f"{name} is out of range", got=value, allowed=f"{least:g} to {most:g}")


@dataclass(frozen=True, kw_only=True)
class HourPrice:
    """Price of one device for one hour. `source` says where it is from."""

    usd_per_device_hour: float
    licence_usd_per_device_year: float = 0.0
    utilization: float = 1.0
    source: str = "given"

    def __post_init__(self) -> None:
        if not 0 < self.usd_per_device_hour <= MAX_USD:
            raise InputError("price per device-hour is out of range", got=self.usd_per_device_hour, allowed="above 0")
        if not 0 <= self.licence_usd_per_device_year <= MAX_USD:
            raise InputError("licence is out of range", got=self.licence_usd_per_device_year, allowed="0 or more")
        if not 0 < self.utilization <= 1:
            raise InputError("utilisation is out of range", got=self.utilization, allowed="above 0, up to 1")

    @property
    def total_usd_per_device_hour(self) -> float:
        """The licence included."""
        return self.usd_per_device_hour + self.licence_usd_per_device_year / (YEAR_S / HOUR_S)


def owned(terms: Ownership, device: Accelerator, **changes: Any) -> HourPrice:
    """Price of an hour of a bought device, power included."""
    usd = owned_usd_per_device_hour(
        capital_usd=terms.capital_usd,
        life_years=terms.life_years,
        yearly_rate_ratio=terms.yearly_rate,
        residual_ratio=terms.residual_ratio,
        facility_w=facility_w(device),
        usd_per_kwh=terms.usd_per_kwh,
        yearly_upkeep_ratio=terms.yearly_upkeep_ratio,
    )
    return HourPrice(usd_per_device_hour=float(usd), source="owned", **changes)


def facility_w(device: Accelerator) -> float:
    """Power at the building's meter of one serving device: its power limit, the node's share, and the building's."""
    power, usual = power_assumptions(), device.tdp_w or 0.0
    return ((device.power_w or usual) + usual * power.node_overhead_ratio) * power.pue


@dataclass(frozen=True, kw_only=True)
class TokenPrice:
    """Price and energy of tokens under one load."""

    hour: HourPrice
    usd_per_million_output: float  # all costs over output tokens
    usd_per_million_total: float  # all costs over prompt and output tokens
    usd_per_million_input_share: float  # prefill's share of the cost over input tokens
    usd_per_million_output_share: float  # decoding's share of the cost over output tokens
    joule_per_output_token: float | None  # None where the device's power is not known
    output_tokens_per_s_per_mw: float | None

    def as_json(self) -> dict[str, Any]:
        return {
            "usd_per_device_hour": self.hour.usd_per_device_hour, "source": self.hour.source,
            "licence_usd_per_device_year": self.hour.licence_usd_per_device_year,
            "utilization": self.hour.utilization, "usd_per_million_output_tokens": self.usd_per_million_output,
            "usd_per_million_total_tokens": self.usd_per_million_total,
            "usd_per_million_input_tokens_by_device_time": self.usd_per_million_input_share,
            "usd_per_million_output_tokens_by_device_time": self.usd_per_million_output_share,
            "joule_per_output_token": self.joule_per_output_token,
            "output_tokens_per_s_per_mw": self.output_tokens_per_s_per_mw,
        }  # fmt: skip


def token_price(found: LoadEstimate, hour: HourPrice, device: Accelerator) -> TokenPrice:
    """Price and energy of the tokens of a load.

    >>> HourPrice(usd_per_device_hour=6.0).total_usd_per_device_hour * 8 * 1e6 / (10_000 * 3600)
    1.3333333333333333
    """
    out, load = found.output_tokens_per_s.value, found.load
    usd_per_s = hour.total_usd_per_device_hour * found.num_devices / HOUR_S / hour.utilization
    watt = facility_w(device) * found.num_devices
    per_input = load.output_tokens / load.input_tokens
    return TokenPrice(
        hour=hour,
        usd_per_million_output=1e6 * usd_per_s / out,
        usd_per_million_total=1e6 * usd_per_s / found.total_tokens_per_s.value,
        usd_per_million_input_share=1e6 * usd_per_s * found.prefill_share / out * per_input,
        usd_per_million_output_share=1e6 * usd_per_s * (1 - found.prefill_share) / out,
        joule_per_output_token=watt / out if watt else None,
        output_tokens_per_s_per_mw=out / watt * 1e6 if watt else None,
    )
