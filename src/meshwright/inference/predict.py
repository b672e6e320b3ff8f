"""Predictions with intervals: values at the fitted constants, and their spread by the constants' covariance.

variance of log = J C Jᵀ + source² + row²        J: derivatives of the logarithm by the unknowns
interval        = value x exp(± 1.2816 scale sqrt(variance))        80 % for scale 1 and a Gaussian

The scale is that with which intervals of held-out sources hold 80 %, by group of quantities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.arrays import FloatArray
from meshwright.inference.constants import ServingCalibration, design, factors_of, peaks_of, rates_from, unknowns
from meshwright.inference.points import PointConditions, Quantity
from meshwright.inference.rates import ServingRates
from meshwright.inference.serving import EngineTraits, RequestWork, Steady, request_work, steady
from meshwright.inference.work import Served

NORMAL_80 = 1.2815515594
"""Half width of the central 80 % of a Gaussian, in standard deviations."""

FIRST_TOKEN = "time to first token"
"""Group of intervals of TTFT."""

TIMES = (Quantity.ITL, Quantity.USER_RATE, Quantity.BATCH)
"""Quantities of one request or batch; the others are rates of a server."""

STEP = 1e-4
"""Of a derivative, in units of a logarithm."""


@dataclass(frozen=True, kw_only=True)
class ServingPredictions:
    """Values in SI units with the ends of their 80 % interval, one element per point."""

    value: FloatArray
    low: FloatArray
    high: FloatArray


def quantity_of(found: Steady, quantities: Sequence[Quantity]) -> FloatArray:
    """The asked quantity of each element."""
    columns = {
        Quantity.OUTPUT_RATE: found.output_tokens_per_s,
        Quantity.TOTAL_RATE: found.total_tokens_per_s,
        Quantity.ITL: found.itl_s,
        Quantity.USER_RATE: 1 / np.maximum(found.itl_s, 1e-12),
        Quantity.TTFT: found.ttft_s,
        Quantity.BATCH: found.batch_s,
    }
    size = len(quantities)
    wide = {q: np.broadcast_to(np.asarray(v, dtype=float), (size,)) for q, v in columns.items()}
    return np.array([wide[q][i] for i, q in enumerate(quantities)])


def table_of(points: Sequence[PointConditions]) -> RequestWork:
    """Work of all points as one table."""
    return RequestWork.stack([request_work(p.served, p.load, p.engine, p.limit) for p in points])


def log_predictor(points: Sequence[PointConditions]) -> tuple[list, Callable[[FloatArray], FloatArray]]:
    """The unknowns of these points, and the logarithm of their predictions as a function of them."""
    systems = [factors_of(p.served, p.engine) for p in points]
    columns = unknowns(systems)
    matrices, peaks = design(systems, columns), peaks_of([p.served for p in points])
    work, quantities = table_of(points), [p.quantity for p in points]

    def log_values(x: FloatArray) -> FloatArray:
        return np.log(quantity_of(steady(work, rates_from(peaks, matrices, x)), quantities))

    return columns, log_values


def derivatives(function: Callable[[FloatArray], FloatArray], x: FloatArray) -> FloatArray:
    """Central differences: one column per unknown."""
    columns = []
    for i in range(len(x)):
        step = np.zeros(len(x))
        step[i] = STEP
        columns.append((function(x + step) - function(x - step)) / (2 * STEP))
    return np.stack(columns, axis=1)


def predict_points(points: Sequence[PointConditions], calibration: ServingCalibration) -> ServingPredictions:
    """Predictions of points with conditions."""
    if not points:
        empty = np.empty(0)
        return ServingPredictions(value=empty, low=empty, high=empty)
    columns, log_values = log_predictor(points)
    x, covariance = calibration.prior_and_values(columns)
    value = np.exp(log_values(x))
    scales = np.array([calibration.scale_of(interval_group(p)) for p in points])
    spread = spread_of(derivatives(log_values, x), covariance, calibration, scales=scales)
    clock_width = np.array([p.served.cluster.accelerator.clock_width for p in points])
    spread = np.exp(np.hypot(np.log(spread), clock_width))
    return ServingPredictions(value=value, low=value / spread, high=value * spread)


def interval_group(point: PointConditions) -> str:
    """Group of points whose intervals have one scale: those of a kind are off by as much."""
    if point.quantity is Quantity.TTFT:
        return FIRST_TOKEN
    kind = "dense" if point.served.model.experts is None else "mixture of experts"
    return f"{kind}, {'times' if point.quantity in TIMES else 'rates'}"


def spread_of(
    jacobian: FloatArray, covariance: FloatArray, calibration: ServingCalibration, *, scales: FloatArray
) -> FloatArray:
    """Factor between a value and the ends of its interval. `scales` of the values' groups."""
    variance = np.einsum("ij,jk,ik->i", jacobian, covariance, jacobian)
    variance = variance + calibration.source_sd**2 + calibration.row_sd**2
    return np.exp(NORMAL_80 * scales * np.sqrt(variance))


def rates_for(served: Served, engine: EngineTraits, calibration: ServingCalibration) -> ServingRates:
    """Rates of one system."""
    systems = [factors_of(served, engine)]
    columns = unknowns(systems)
    x, _ = calibration.prior_and_values(columns)
    return rates_from(peaks_of([served]), design(systems, columns), x)
