"""Parameters and efficiency corrections of a device's kernels, from their measured seconds.

    gemm_ratio          such that half of the larger GEMMs take longer than modelled, half less
    attention ratios    likewise, 16 bits
    elementwise_factor  bytes that activation and norm appear to move, over the least that they must
    optimizer_passes    likewise, of AdamW

Measured over modelled seconds that remain, by shape, become an efficiency correction
(`calibration.correction`). The points' spread around a parameter is its standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.calibration.correction import EfficiencyCorrection, fit_correction
from meshwright.calibration.parameters import MeasuredParameter
from meshwright.cost.update import OPTIMIZER_BYTES
from meshwright.fitting.device_rates import BF16, MeasuredRates, RowsByFamily, bisect
from meshwright.fitting.errors import Errors, errors_of, sd_of
from meshwright.records.device import DeviceRow
from meshwright.records.points import Point, PointFamily

AXES = {
    PointFamily.GEMM: ("m", "n", "k"),
    PointFamily.ATTENTION: ("rows", "seq_len", "head_dim"),
    PointFamily.ELEMENTWISE: ("elements",),
    PointFamily.OPTIMIZER: ("parameters",),
}
LAUNCH_SHARE = 0.1
"""Largest share of a call's seconds that its launch may take where bytes moved are inferred from it."""
LEAST_RATIO = 1e-6
MAX_RATIO = 1 - LEAST_RATIO


@dataclass(frozen=True, kw_only=True)
class KernelPoints:
    """Measured points of one kernel in one format, compared with the model at its fitted ratio."""

    log_ratios: NDArray[np.float64]  # log(measured / modelled)
    correction: EfficiencyCorrection | None  # None: too few points

    @property
    def residuals(self) -> NDArray[np.float64]:
        """log(measured / predicted) of each point, predicted from the other points where there are enough."""
        if self.correction is None:
            return self.log_ratios
        return self.correction.y - self.correction.leave_one_out().mean


@dataclass(frozen=True, kw_only=True)
class KernelFits:
    """Parameters, corrections and errors of all kernels. `fit_kernels` fills them family by family."""

    rates: MeasuredRates
    parameters: dict[str, MeasuredParameter]
    kernels: dict[str, KernelPoints] = field(default_factory=dict)
    errors: dict[PointFamily, Errors] = field(default_factory=dict)

    @property
    def corrections(self) -> dict[str, EfficiencyCorrection]:
        return {name: k.correction for name, k in self.kernels.items() if k.correction is not None}

    def fit_gemms(self, rows: list[DeviceRow]) -> None:
        """Fit one ratio, and a correction for each layout and format."""
        rows = [r for r in rows if r.point.format in self.rates.accelerator.peak_flops_per_s]
        ratio = _ratio(rows, self.rates.gemm_s)
        kernels = _kernels(rows, lambda point: self.rates.gemm_s(point, ratio))
        self._keep(PointFamily.GEMM, kernels)
        self.parameters["gemm_ratio"] = MeasuredParameter(value=ratio, sd=_sd(kernels.values()))

    def fit_attention(self, rows: list[DeviceRow]) -> None:
        """Fit a ratio for each direction, and a correction for each direction and format."""
        found: dict[str, KernelPoints] = {}
        for kernel in ("forward", "backward"):
            own = [r for r in rows if r.point.kernel == kernel]
            in_16_bits = [r for r in own if r.point.format == BF16] or own
            if not in_16_bits:
                continue
            ratio = _ratio(in_16_bits, self.rates.attention_s)
            kernels = _kernels(own, lambda point, ratio=ratio: self.rates.attention_s(point, ratio))
            found |= kernels
            self.parameters[f"attention_{kernel}_ratio"] = MeasuredParameter(value=ratio, sd=_sd(kernels.values()))
        if found:
            self._keep(PointFamily.ATTENTION, found)

    def fit_bytes_moved(self, name: str, rows: list[DeviceRow], least_bytes: Callable[[Point], float]) -> None:
        """Fit parameter `name`: bytes that a kernel's seconds correspond to, over `least_bytes`.

        Only points whose launch is a small share of their seconds count.
        """
        start_s, streaming = self.rates.kernel_s, self.rates.streaming_bytes_per_s
        large = [r for r in rows if start_s < LAUNCH_SHARE * r.seconds_median]
        if not large:
            return
        logs = np.array([math.log((r.seconds_median - start_s) * streaming / least_bytes(r.point)) for r in large])
        factor = math.exp(float(np.median(logs)))
        kernels = _kernels(rows, lambda p: least_bytes(p) * factor / streaming + start_s)
        self.parameters[name] = MeasuredParameter(value=factor, sd=_sd(kernels.values()))
        self._keep(large[0].point.family, kernels)

    def _keep(self, family: PointFamily, kernels: dict[str, KernelPoints]) -> None:
        self.kernels.update(kernels)
        corrected = [k for k in kernels.values() if k.correction is not None]
        if corrected:
            self.errors[family] = errors_of(
                np.concatenate([-k.residuals for k in corrected]), np.concatenate([k.log_ratios for k in corrected])
            )


def fit_kernels(
    rates: MeasuredRates, of: RowsByFamily, *, parameters: dict[str, MeasuredParameter] | None = None
) -> KernelFits:
    """Fits of all kernels; found values are added to `parameters`."""
    found = KernelFits(rates=rates, parameters={} if parameters is None else parameters)
    found.fit_gemms(of[PointFamily.GEMM])
    found.fit_attention(of[PointFamily.ATTENTION])
    found.fit_bytes_moved("elementwise_factor", of[PointFamily.ELEMENTWISE], lambda p: p.bytes)
    found.fit_bytes_moved("optimizer_passes", of[PointFamily.OPTIMIZER], lambda p: OPTIMIZER_BYTES * p.m)
    return found


def coordinates(point: Point) -> tuple[float, ...]:
    """log2 of the point's sizes along the axes of its correction."""
    match point.family:
        case PointFamily.GEMM:
            sizes = (point.m, point.n, point.k)
        case PointFamily.ATTENTION:
            sizes = (point.sequences * point.heads, point.seq_len, point.head_dim)
        case _:
            sizes = (point.m * max(point.n, 1),)
    return tuple(math.log2(size) for size in sizes)


def correction_name(point: Point) -> str:
    """Key of the point's correction: "gemm/forward/bf16"."""
    return f"{point.family}/{point.kernel}/{point.format}"


def _ratio(rows: list[DeviceRow], model_s: Callable[[Point, float], float]) -> float:
    """The share of the peak at which half of the larger rows take longer than modelled."""
    flops = float(np.median([r.point.flops for r in rows]))
    large = [r for r in rows if r.point.flops >= flops]

    def is_too_slow(ratio: float) -> bool:
        return float(np.median([math.log(r.seconds_median / model_s(r.point, ratio)) for r in large])) < 0

    return bisect(is_too_slow, LEAST_RATIO, MAX_RATIO)


def _kernels(rows: list[DeviceRow], model_s: Callable[[Point], float]) -> dict[str, KernelPoints]:
    by_name: dict[str, list[DeviceRow]] = {}
    for row in rows:
        by_name.setdefault(correction_name(row.point), []).append(row)
    return {name: _kernel(own, model_s) for name, own in by_name.items()}


def _kernel(rows: list[DeviceRow], model_s: Callable[[Point], float]) -> KernelPoints:
    y = np.array([math.log(r.seconds_median / model_s(r.point)) for r in rows])
    x = np.array([coordinates(r.point) for r in rows])
    noise = np.array([r.log_sd for r in rows])
    axes = AXES[rows[0].point.family]
    return KernelPoints(log_ratios=y, correction=fit_correction(x, y, noise, axes=axes))


def _sd(kernels: Iterable[KernelPoints]) -> float:
    """Standard deviation of the logarithm of a kernel's seconds around the prediction of the other points."""
    return sd_of([k.residuals for k in kernels])
