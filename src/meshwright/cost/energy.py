"""Power, energy and carbon of a run.

Power of a device is linear in its activity a, the share of its dynamic range in use averaged over time:

    P_device = P_idle + (TDP - P_idle) a
    P_facility = devices * (P_device + P_node) * PUE

P_node is the rest of the node per device: host processors, memory, network cards, fans, power supplies. PUE
is power of the building over power of the equipment (The Green Grid; ISO/IEC 30134-2). Because power is
linear in a, the mean power of a step is the power at the mean activity of its parts.

A thermal design power is a ceiling: the largest power of a node with eight H100 in training was 8.4 kW of
10.2 kW rated (Latif et al., "Empirical Measurements of AI Training Power Demand on a GPU-Accelerated Node",
arXiv 2412.08602, 2024). Numbers come in from the caller; none is fixed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.arrays import Array
from meshwright.errors import InputError
from meshwright.units import JOULE_PER_KWH


@dataclass(frozen=True, kw_only=True)
class PowerModel:
    """Power of one device and of its share of the node and the building."""

    idle_w: Array  # per device, powered and waiting
    tdp_w: Array  # per device
    node_w: Array  # per device: its share of the rest of the node
    pue_ratio: Array  # building over equipment, >= 1

    def __post_init__(self) -> None:
        if not np.all(np.less_equal(self.idle_w, self.tdp_w)):
            raise InputError("idle power is above the design power", got=self.idle_w, allowed=f"<= {self.tdp_w}")
        if not np.all(np.greater_equal(self.pue_ratio, 1)):
            raise InputError("power usage effectiveness cannot be below 1", got=self.pue_ratio, allowed=">= 1")


@dataclass(frozen=True, kw_only=True)
class RunEnergy:
    """Energy of a run. `device` counts accelerators only, `facility` everything up to the meter of the
    building."""

    device_w: Array  # mean per device
    facility_w: Array  # mean, all devices
    device_j: Array
    facility_j: Array
    facility_j_per_token: Array
    co2_kg: Array

    @property
    def facility_mwh(self) -> Array:
        return self.facility_j / (1000 * JOULE_PER_KWH)


def activity_ratio(*, components_s: Mapping[str, Array], intensity_ratio: Mapping[str, float]) -> Array:
    """Mean activity of a step: time-weighted mean of the intensity of its components.

    `components_s` is as in `specs.estimate.StepEstimate`; `intensity_ratio` gives the share of the dynamic
    range that a component draws (1 for large GEMMs, little for a bubble) and needs the key `other`
    for the rest.

    >>> intensity = {"matmul": 1.0, "other": 0.2}
    >>> activity_ratio(components_s={"matmul": 3.0, "bubble": 1.0}, intensity_ratio=intensity)
    0.8
    """
    if "other" not in intensity_ratio:
        raise InputError("the intensities need a value for all remaining components", allowed="a key 'other'")
    other = intensity_ratio["other"]
    drawn = sum(t * intensity_ratio.get(name, other) for name, t in components_s.items())
    return drawn / sum(components_s.values())


def device_power_w(*, power: PowerModel, activity_ratio: Array) -> Array:
    """P_idle + (TDP - P_idle) a, with a in [0, 1]."""
    return power.idle_w + (power.tdp_w - power.idle_w) * activity_ratio


def facility_power_w(*, power: PowerModel, activity_ratio: Array, num_devices: Array) -> Array:
    """Power of the building for `num_devices` devices and their nodes."""
    device_w = device_power_w(power=power, activity_ratio=activity_ratio)
    return num_devices * (device_w + power.node_w) * power.pue_ratio


def run_energy(
    *,
    power: PowerModel,
    activity_ratio: Array,
    num_devices: Array,
    wall_s: Array,
    num_tokens: Array,
    idle_ratio: Array = 0.0,
    grid_kg_per_kwh: Array = 0.0,
) -> RunEnergy:
    """Energy of a run of `wall_s` that trains on `num_tokens`.

    `activity_ratio` holds while steps run, useful or repeated; `idle_ratio` is the share of wall time in
    which they do not (`Losses.restart_ratio + Losses.spares_ratio`). `grid_kg_per_kwh` is the carbon
    intensity of the electricity.
    """
    mean_activity = activity_ratio * (1 - idle_ratio)
    device_w = device_power_w(power=power, activity_ratio=mean_activity)
    facility_w = facility_power_w(power=power, activity_ratio=mean_activity, num_devices=num_devices)
    facility_j = facility_w * wall_s
    return RunEnergy(
        device_w=device_w,
        facility_w=facility_w,
        device_j=device_w * num_devices * wall_s,
        facility_j=facility_j,
        facility_j_per_token=facility_j / num_tokens,
        co2_kg=facility_j / JOULE_PER_KWH * grid_kg_per_kwh,
    )
