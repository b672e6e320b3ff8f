"""Clock and temperature of a device, if its driver or the Linux kernel reports them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

CPU_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")  # kHz
CPU_TEMPERATURE = Path("/sys/class/thermal/thermal_zone0/temp")  # thousandths of a degree
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Sensors:
    """Readings; None where nothing is reported."""

    clock_hz: float | None = None
    temperature_c: float | None = None


def read_sensors(device: torch.device) -> Sensors:
    """Read the sensors of `device`."""
    if device.type == "cuda":
        return _gpu(device)
    khz, milli = _number(CPU_CLOCK), _number(CPU_TEMPERATURE)
    return Sensors(
        clock_hz=_cpuinfo_hz() if khz is None else khz * 1e3, temperature_c=None if milli is None else milli / 1e3
    )


def _gpu(device: torch.device) -> Sensors:
    try:
        with warnings.catch_warnings(action="ignore"):
            return Sensors(
                clock_hz=torch.cuda.clock_rate(device) * 1e6, temperature_c=float(torch.cuda.temperature(device))
            )
    except (ImportError, RuntimeError, OSError):  # the vendor's management library is absent
        return Sensors()


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _cpuinfo_hz() -> float | None:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return None
    found = (line.partition(":")[2] for line in lines if line.startswith("cpu MHz"))
    return next((float(mhz) * 1e6 for mhz in found), None)
