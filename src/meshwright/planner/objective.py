"""Objectives as arrays: the smaller the value, the better the plan.

    throughput  seconds per step: tokens, devices and with them tokens/s/device follow
    time        seconds of the whole run
    cost        USD per step: devices x step time x price, and the electricity where it is paid apart
    energy      joules per step: facility power at the step's activity x step time

For one cluster and batch the first three order plans alike unless electricity is paid apart. Energy does not:
a plan that waits more draws less power for longer. `Goal.bound` turns a bound of step time into one of the
value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.arrays import Array, FloatArray
from meshwright.catalog.prices import power_assumptions, price_per_device_hour
from meshwright.cost.energy import PowerModel, activity_ratio, facility_power_w
from meshwright.cost.step import StepTable
from meshwright.errors import InputError, UnknownNameError
from meshwright.specs.hardware import Accelerator, Cluster
from meshwright.specs.run import Costs, Objective
from meshwright.units import HOUR_S, JOULE_PER_KWH

INTENSITY_RATIO = {"bubble": 0.0, "host": 0.0, "fixed": 0.0, "stragglers": 0.0, "other": 1.0}
"""Assumption: a device that waits draws idle power and one that works draws its design power."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """An objective with the prices and powers that it needs."""

    objective: Objective = Objective.THROUGHPUT
    num_devices: int = 1
    num_idle: int = 0  # devices that are there besides, and wait
    num_steps: float = 1.0  # of the whole run, for `time`
    usd_per_device_hour: float | None = None
    usd_per_kwh: float = 0.0  # 0: electricity is in the price
    power: PowerModel | None = None
    intensity_ratio: Mapping[str, float] = field(default_factory=lambda: INTENSITY_RATIO)  # by component

    def __post_init__(self) -> None:
        if self.objective is Objective.COST and self.usd_per_device_hour is None:
            raise InputError("the objective cost needs a price", hint="give costs.usd_per_device_hour")
        if self.power is None and (self.objective is Objective.ENERGY or self.usd_per_kwh > 0):
            raise InputError("energy needs the power of the accelerator", hint="its catalogue entry has no tdp_w")

    def value(self, steps: StepTable) -> FloatArray:
        """One number per plan, smaller is better."""
        seconds = np.asarray(steps.step_s, dtype=np.float64)
        if self.objective is Objective.THROUGHPUT:
            return seconds
        if self.objective is Objective.TIME:
            return seconds * self.num_steps
        if self.objective is Objective.ENERGY:
            return self.energy_j(steps)
        return np.asarray(self._rent_usd(seconds) + self._electricity_usd(steps))

    def bound(self, bound_s: FloatArray) -> FloatArray:
        """No plan whose step takes at least `bound_s` has a smaller value; idle power is the least."""
        if self.objective is Objective.THROUGHPUT:
            return bound_s
        if self.objective is Objective.TIME:
            return bound_s * self.num_steps
        idle_j = 0.0 if self.power is None else bound_s * self._facility_w(0.0)
        if self.objective is Objective.ENERGY:
            return np.asarray(idle_j)
        return np.asarray(self._rent_usd(bound_s) + idle_j / JOULE_PER_KWH * self.usd_per_kwh)

    def energy_j(self, steps: StepTable) -> FloatArray:
        """Joules per step, at the facility."""
        activity = activity_ratio(components_s=steps.components_s, intensity_ratio=self.intensity_ratio)
        return np.asarray(self._facility_w(activity) * steps.step_s)

    @property
    def rate_unit(self) -> str:
        """The unit of tokens over the value of their step."""
        return {Objective.COST: "tokens/USD", Objective.ENERGY: "tokens/J"}.get(self.objective, "tokens/s")

    def leaving_idle(self, num_idle: int) -> Goal:
        """The same goal where `num_idle` of the devices wait."""
        return replace(self, num_devices=self.num_devices - num_idle, num_idle=num_idle)

    def _facility_w(self, activity: Array) -> Array:
        assert self.power is not None
        busy_w = facility_power_w(power=self.power, activity_ratio=activity, num_devices=self.num_devices)
        return busy_w + facility_power_w(power=self.power, activity_ratio=0.0, num_devices=self.num_idle)

    def _rent_usd(self, seconds: Array) -> Array:
        assert self.usd_per_device_hour is not None
        return seconds * (self.num_devices + self.num_idle) * self.usd_per_device_hour / HOUR_S

    def _electricity_usd(self, steps: StepTable) -> Array:
        if self.usd_per_kwh == 0.0:
            return 0.0
        return self.energy_j(steps) / JOULE_PER_KWH * self.usd_per_kwh


def goal_for(
    objective: Objective, *, cluster: Cluster, costs: Costs | None = None, num_steps: float | None = None
) -> Goal:
    """The goal with the catalogue's price and power where `costs` states none.

    Raises InputError when the objective needs a price or a power that is unknown.
    """
    costs = costs or Costs()
    price = costs.usd_per_device_hour
    if price is None and objective is Objective.COST:
        if cluster.is_mixed:
            raise InputError(
                "devices of several parts have several prices", got=cluster.name,
                hint="give their mean as costs.usd_per_device_hour",
            )  # fmt: skip
        price = _catalogue_price(cluster.accelerator.name)
    return Goal(
        objective=objective,
        num_devices=cluster.num_devices,
        num_steps=1.0 if num_steps is None else num_steps,
        usd_per_device_hour=price,
        usd_per_kwh=costs.usd_per_kwh or 0.0,
        power=_power(cluster.accelerator),
    )


def _catalogue_price(accelerator: str) -> float:
    """USD per device hour. Devices of a user's file and measured ones have none."""
    try:
        return price_per_device_hour(accelerator).usd_per_device_hour
    except UnknownNameError:
        raise InputError(
            "no price is known for this accelerator",
            got=accelerator,
            hint="give yours: --set costs.usd_per_device_hour=USD",
        ) from None


def _power(accelerator: Accelerator) -> PowerModel | None:
    """Power of a device up to its limit; the rest of the node, which is constant, is of the usual limit."""
    usual_w, assumed = accelerator.tdp_w, power_assumptions()
    if usual_w is None:
        return None
    return PowerModel(
        idle_w=assumed.idle_ratio * usual_w,
        tdp_w=accelerator.power_w or usual_w,
        node_w=assumed.node_overhead_ratio * usual_w,
        pue_ratio=assumed.pue,
    )
