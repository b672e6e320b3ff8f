"""Checks of a node, in groups. A check is a function from a `Node` to verdicts.

Each group is a table of names and functions. A check that cannot read its inputs raises `Unseen` and is skipped with
that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from meshwright.doctor.devices import Devices
from meshwright.doctor.host import Host
from meshwright.doctor.verdict import CheckVerdict

LOG_HOURS = 24.0


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node and the options of the checks. `rates` None: measure if there are devices. `stress_s`: seconds of a
    stress; None: no stress."""

    host: Host
    devices: Devices = field(default_factory=Devices)
    num_expected_devices: int | None = None
    log_hours: float = LOG_HOURS
    rates: bool | None = None
    stress_s: float | None = None


Check = Callable[[Node], Iterator[CheckVerdict]]


def groups() -> dict[str, dict[str, Check]]:
    """Return all checks by group."""
    from meshwright.doctor.checks import devices, host, kernel_log, network, process, rates, stress

    modules = (host, process, kernel_log, network, devices, rates, stress)
    return {module.GROUP: module.CHECKS for module in modules}


GROUP_NAMES = ("host", "limits", "log", "network", "devices", "rates", "stress")
