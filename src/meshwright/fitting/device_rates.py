"""Rates of a measured device, and the cost model's kernel times at these rates.

peak of a format   best rate of a GEMM             (a catalogued device keeps its datasheet's)
memory rate        best copy that no cache holds, else the largest copy
kernel_s           shortest launch
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from meshwright.calibration.parameters import prior
from meshwright.catalog import lookup as catalog
from meshwright.cost.compute import gemm_s
from meshwright.records.device import DeviceRow
from meshwright.records.points import Point, PointFamily
from meshwright.specs.hardware import THIS_MACHINE, Accelerator

RowsByFamily = Mapping[PointFamily, list[DeviceRow]]

BF16 = "bf16"
ELEMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}
LEAST_COPY_BYTES = 2**25  # few caches hold it twice
BISECTIONS = 60


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """Rates that the kernels of one device are modelled with."""

    accelerator: Accelerator
    memory_ratio: float  # of the accelerator's memory rate
    kernel_s: float  # seconds of one launch

    @property
    def streaming_bytes_per_s(self) -> float:
        return self.accelerator.memory_bytes_per_s * self.memory_ratio

    def gemm_s(self, point: Point, ratio: float) -> float:
        """Modelled seconds of a GEMM at `ratio` of the peak of its format."""
        a = self.accelerator
        peak = a.peak_flops_per_s[point.format]
        seconds = gemm_s(
            float(point.m), float(point.n), float(point.k),
            flops_per_s=peak * ratio, bytes_per_s=self.streaming_bytes_per_s, num_units=a.num_compute_units,
            kernel_s=self.kernel_s, output_tiles=int(a.output_tiles), element_bytes=ELEMENT_BYTES[point.format],
        )  # fmt: skip
        return float(seconds)

    def attention_s(self, point: Point, ratio: float) -> float:
        """Modelled seconds of attention at `ratio` of the 16-bit peak, in any format."""
        peaks = self.accelerator.peak_flops_per_s
        return point.flops / (peaks.get(BF16, peaks.get(point.format, 0.0)) * ratio) + self.kernel_s


def rows_by_family(rows: Iterable[DeviceRow], *, threads: int) -> dict[PointFamily, list[DeviceRow]]:
    """The rows measured with `threads` threads; 0: with all."""
    own = [r for r in rows if r.point.threads == threads]
    return {family: [r for r in own if r.point.family is family] for family in PointFamily}


def accelerator_of(device: Mapping[str, Any], of: RowsByFamily) -> Accelerator:
    """The catalogued accelerator that the sidecar names, or one with the measured rates."""
    if device["accelerator"] is not None:
        return catalog.accelerator(device["accelerator"])
    return Accelerator(
        name=device["name"],
        vendor=THIS_MACHINE,
        architecture=device["type"],
        peak_flops_per_s=peaks_of(of[PointFamily.GEMM]),
        memory_bytes=device["memory_bytes"],
        memory_bytes_per_s=copy_bytes_per_s(of[PointFamily.MEMORY]),
        num_compute_units=device["compute_units"],
        output_tiles=device["type"] != "cpu",
        sources={"all": "measured: bench records"},
    )


def peaks_of(gemms: Iterable[DeviceRow]) -> dict[str, float]:
    """Best FLOP/s of the GEMMs of each number format."""
    peaks: dict[str, float] = {}
    for row in gemms:
        rate = row.point.flops / row.seconds_median
        peaks[row.point.format] = max(rate, peaks.get(row.point.format, 0.0))
    return peaks


def copy_bytes_per_s(copies: Iterable[DeviceRow]) -> float:
    """Best rate of the copies that no cache holds, else of the largest copy."""
    rows = sorted(copies, key=lambda r: -r.point.size_bytes)
    large = [r for r in rows if r.point.size_bytes >= LEAST_COPY_BYTES] or rows[:1]
    return max(r.point.bytes / r.seconds_median for r in large)


def launch_s(of: RowsByFamily) -> float:
    """Shortest measured launch; the prior where none was measured."""
    launches = [row.seconds_median for row in of[PointFamily.LAUNCH]]
    return min(launches) if launches else prior().parameters["kernel_s"].prior


def bisect(is_too_low: Callable[[float], bool], low: float, high: float) -> float:
    """The largest value between `low` and `high` at which `is_too_low` holds, by bisection of logarithms."""
    for _ in range(BISECTIONS):
        middle = sqrt(low * high)
        low, high = (middle, high) if is_too_low(middle) else (low, middle)
    return low
