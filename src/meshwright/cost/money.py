"""Money: the cost of a run at a price per device hour, and the price of an hour of owned devices.

    cost = devices * wall hours * price        USD per million tokens = 1e6 * cost / tokens

A device that is held costs the same whether it trains, restarts or waits, so goodput divides the tokens and
not the price. Prices are the caller's: on demand, reserved, or owned (`owned_usd_per_device_hour`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.arrays import Array
from meshwright.units import HOUR_S, YEAR_S

_WATT_PER_KILOWATT = 1000


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """Cost of a run at one price."""

    device_hours: Array
    usd: Array
    usd_per_million_tokens: Array


def run_cost(
    *, num_devices: Array, wall_s: Array, num_tokens: Array, usd_per_device_hour: Array, num_spare_devices: Array = 0
) -> RunCost:
    """Cost of a run; devices held as spares are paid for."""
    device_hours = (num_devices + num_spare_devices) * wall_s / HOUR_S
    usd = device_hours * usd_per_device_hour
    return RunCost(device_hours=device_hours, usd=usd, usd_per_million_tokens=1e6 * usd / num_tokens)


def usd_per_million_tokens(
    *, usd_per_device_hour: Array, tokens_per_s_per_device: Array, goodput_ratio: Array = 1.0
) -> Array:
    """1e6 * price / (3600 * tokens/s/device * goodput): the run's length and size cancel.

    >>> usd_per_million_tokens(usd_per_device_hour=3.6, tokens_per_s_per_device=10_000)
    0.1
    """
    return 1e6 * usd_per_device_hour / (HOUR_S * tokens_per_s_per_device * goodput_ratio)


def capital_recovery_ratio(*, yearly_rate_ratio: Array, life_years: Array) -> Array:
    """Yearly payment per unit borrowed that repays capital and interest over the life: r / (1 - (1 + r)^-n),
    and 1/n without interest (any text on engineering economics, for example Newnan et al., chapter "Annual
    cash flow").

    >>> float(capital_recovery_ratio(yearly_rate_ratio=0.0, life_years=4))
    0.25
    """
    rate = np.asarray(yearly_rate_ratio, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = rate / -np.expm1(-life_years * np.log1p(rate))
    return np.where(rate == 0, 1 / np.asarray(life_years), ratio)[()]


def owned_usd_per_device_hour(
    *,
    capital_usd: Array,
    life_years: Array,
    yearly_rate_ratio: Array,
    residual_ratio: Array = 0.0,
    facility_w: Array = 0.0,
    usd_per_kwh: Array = 0.0,
    yearly_upkeep_ratio: Array = 0.0,
    utilization_ratio: Array = 1.0,
) -> Array:
    """Price of an owned device per hour in use.

    Per device: `capital_usd` with its share of node, network, storage and installation; `residual_ratio` of
    it comes back at the end of life; `facility_w` is drawn at the building's meter, used or not;
    `yearly_upkeep_ratio` of the capital goes to staff, spares and licences. `utilization_ratio` is the share
    of hours in use.
    """
    recovery = capital_recovery_ratio(yearly_rate_ratio=yearly_rate_ratio, life_years=life_years)
    residual_usd = capital_usd * residual_ratio
    # What comes back at the end need not be repaid, only its interest.
    capital_per_year = (capital_usd - residual_usd) * recovery + residual_usd * yearly_rate_ratio
    upkeep_per_year = capital_usd * yearly_upkeep_ratio
    power_per_hour = facility_w / _WATT_PER_KILOWATT * usd_per_kwh
    hours_per_year = YEAR_S / HOUR_S
    return ((capital_per_year + upkeep_per_year) / hours_per_year + power_per_hour) / utilization_ratio
