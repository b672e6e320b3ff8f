"""Failure rates of devices and durations of recovery, from `data/reliability.toml`.

A rate is stored as its source counts it and turned here into device seconds per failure,

    M_device = devices * time / failures

so that a run of n devices sees a failure every M_device / n. An assumption is a number that no source publishes
for one system; it has a value, the range between a fast and a slow system, and its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.catalog.entries import DATA
from meshwright.errors import InputError, UnknownNameError, value_named
from meshwright.files import toml_table
from meshwright.units import DAY_S

_FILE = DATA / "reliability.toml"


@dataclass(frozen=True, kw_only=True)
class FailureRate:
    """One published count. `device_mtbf_s` is device seconds of work per failure, `causes` counts them by cause."""

    name: str
    device_mtbf_s: float
    accelerator: str
    scope: str  # what was counted as a failure
    source: str
    causes: Mapping[str, int]  # empty: the source does not say


@dataclass(frozen=True, kw_only=True)
class FailureRange:
    """The rate to plan with and the published range around it, with the reason of the choice."""

    value: FailureRate
    low: FailureRate  # fails most often
    high: FailureRate
    reason: str


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A stated number with the plausible range around it; the unit is the end of its name."""

    name: str
    value: float
    low: float
    high: float
    reason: str


def failure_rate(name: str) -> FailureRate:
    """The published rate called `name`; `UnknownNameError` with the nearest known one."""
    row = value_named("failure rate", name, toml_table(_FILE)["rates"])
    said = {key: row[key] for key in ("accelerator", "scope", "source")}
    causes = row.get("causes", {})
    return FailureRate(name=name, device_mtbf_s=_device_seconds_per_failure(row), causes=causes, **said)


def failure_rate_names() -> tuple[str, ...]:
    """All rates, in the order of the file."""
    return tuple(toml_table(_FILE)["rates"])


def failure_range() -> FailureRange:
    """The chosen rate with the published range around it."""
    choice = toml_table(_FILE)["choice"]
    rates = {key: failure_rate(choice[key]) for key in ("value", "low", "high")}
    return FailureRange(**rates, reason=choice["reason"])


def assumption(name: str) -> Assumption:
    """The stated assumption called `name`, for example `detect_s`."""
    return Assumption(name=name, **value_named("assumption", name, toml_table(_FILE)["assumptions"]))


def assumption_names() -> tuple[str, ...]:
    """All assumptions, in the order of the file."""
    return tuple(toml_table(_FILE)["assumptions"])


def assumed(given: Mapping[str, float] | None = None) -> dict[str, float]:
    """The value of every assumption, with those that are `given` in their place.

    >>> assumed({"detect_s": 10.0})["detect_s"]
    10.0
    """
    values = {name: float(row["value"]) for name, row in toml_table(_FILE)["assumptions"].items()}
    for name, value in (given or {}).items():
        if name not in values:
            raise UnknownNameError("assumption", name, known=values)
        is_rate = name.endswith("_per_s")  # something is divided by it
        if not (value > 0 if is_rate else value >= 0):
            raise InputError(f"{name} is too small", got=value, allowed="> 0" if is_rate else ">= 0")
        values[name] = value
    return values


def _device_seconds_per_failure(row: dict[str, Any]) -> float:
    if "failures_per_1000_node_days" in row:
        return 1000 * row["devices_per_node"] * DAY_S / row["failures_per_1000_node_days"]
    return row["num_devices"] * row["days"] * DAY_S / row["num_failures"]
