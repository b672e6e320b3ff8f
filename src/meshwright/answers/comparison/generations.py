"""Ratios of hardware: datasheets beside a comparison, generation over generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.answers.comparison.ratios import MeanRatio
from meshwright.catalog import lookup as catalog
from meshwright.catalog.generations import line_of_succession
from meshwright.errors import UnknownNameError
from meshwright.specs.hardware import Accelerator


@dataclass(frozen=True, kw_only=True)
class HardwareRatio:
    """Datasheet values of one accelerator over another's. None where a datasheet lacks the value."""

    older: str
    newer: str
    line: str  # of the vendor's products in which the other is a later generation; empty: none
    line_source: str
    measured: float  # geometric mean of the comparison
    metric: str
    bf16: float | None
    fp8: float | None
    memory_capacity: float
    memory_bandwidth: float
    scale_up_bandwidth: float | None
    design_power: float | None


def hardware_ratios(means: Sequence[MeanRatio]) -> list[HardwareRatio]:
    """One row for each mean whose two sides are one accelerator each, and not the same."""
    found = []
    for mean in means:
        names = [
            {getattr(r, side).conditions.get("accelerator", "") for r in mean.ratios} for side in ("baseline", "other")
        ]
        if any(len(n) != 1 for n in names) or mean.metric not in ("throughput", "time to train", "output rate"):
            continue
        older, newer = (_known(next(iter(n))) for n in names)
        if older is None or newer is None or older.name == newer.name:
            continue
        found.append(_row(older, newer, mean))
    return found


def _known(name: str) -> Accelerator | None:
    try:
        return catalog.accelerator(name.lower())
    except UnknownNameError:
        return None


def _row(older: Accelerator, newer: Accelerator, mean: MeanRatio) -> HardwareRatio:
    def over(of: Accelerator, to: Accelerator, number_format: str) -> float | None:
        peaks = of.peak_flops_per_s.get(number_format), to.peak_flops_per_s.get(number_format)
        return peaks[1] / peaks[0] if peaks[0] and peaks[1] else None

    line = line_of_succession(older.name, newer.name)
    return HardwareRatio(
        older=older.name, newer=newer.name, line="" if line is None else f"{line.vendor} {line.name}",
        line_source="" if line is None else line.source, measured=mean.value, metric=mean.metric,
        bf16=over(older, newer, "bf16"), fp8=over(older, newer, "fp8"),
        memory_capacity=newer.memory_bytes / older.memory_bytes,
        memory_bandwidth=newer.memory_bytes_per_s / older.memory_bytes_per_s,
        scale_up_bandwidth=newer.scale_up_bytes_per_s / older.scale_up_bytes_per_s
        if older.scale_up_bytes_per_s else None,
        design_power=newer.tdp_w / older.tdp_w if older.tdp_w and newer.tdp_w else None,
    )  # fmt: skip
