"""Predictions for published runs, with intervals.

The interval of a step time T is exp(log T ± z sd) with z = 1.2816 (80 %) and

    sd^2 = scale^2 ( residual_sd^2 + Σ_parameters (d log T / d parameter)^2 sd_parameter^2 )

Derivatives are taken by costing every run once per parameter with that parameter moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.accuracy.metrics import Predictions
from meshwright.accuracy.rows import PublishedRun
from meshwright.accuracy.tables import RunTables, tables_of
from meshwright.catalog.calibration import Calibration, fitted
from meshwright.cost.memory import estimate_memory
from meshwright.cost.rates import rates_from_etas
from meshwright.cost.step import estimate_steps

Etas = Mapping[str, NDArray[np.float64]]
Z80 = 1.2815515655446004
DERIVATIVE_STEP = 0.02


def log_step_s(tables: RunTables, calibration: Calibration, etas: Etas, half: Etas) -> NDArray[np.float64]:
    """Log seconds per step of every run."""
    rates = rates_from_etas(calibration, tables.facts, etas, half)
    steps = estimate_steps(
        model=tables.model, batch=tables.batch, plan=tables.plan, precision=tables.precision, rates=rates
    )
    return np.log(steps.step_s)


def derivatives(
    tables: RunTables, calibration: Calibration, etas: Etas, half: Etas, base: NDArray[np.float64]
) -> dict[str, NDArray[np.float64]]:
    """d log(step) / d eta per parameter. `gemm_ratio` moves alone; `half_gemm_ratio` is its 16-bit twin."""
    result = {}
    for name in etas:
        moved = log_step_s(tables, calibration, {**etas, name: etas[name] + DERIVATIVE_STEP}, half)
        result[name] = (moved - base) / DERIVATIVE_STEP
    moved = log_step_s(
        tables, calibration, etas, {**half, "gemm_ratio": half["gemm_ratio"] + DERIVATIVE_STEP}
    )
    result["half_gemm_ratio"] = (moved - base) / DERIVATIVE_STEP
    return result


def log_sd(
    tables: RunTables, calibration: Calibration, slopes: Mapping[str, NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Standard deviation of each log step time."""
    sds = [calibration.sds(f) for f in tables.factors]
    residual = calibration.residual_sd
    own = np.where(
        np.asarray(tables.model.num_moe_layers) > 0, residual.get("moe", 0.15), residual.get("dense", 0.1)
    )
    variance = own**2
    for name, slope in slopes.items():
        sd = np.array([s["gemm_ratio" if name == "half_gemm_ratio" else name] for s in sds])
        variance = variance + (slope * sd) ** 2
    return calibration.interval_scale * np.sqrt(variance)


def predict(runs: Sequence[PublishedRun], *, calibration: Calibration | None = None) -> Predictions:
    """Rate and memory of every run; each must have conditions."""
    calibration = calibration or fitted()
    conditions = [run.conditions for run in runs if run.conditions is not None]
    tables = tables_of(conditions)
    etas, half = calibration.etas(tables.factors), calibration.etas(tables.half_factors)
    base = log_step_s(tables, calibration, etas, half)
    spread = np.exp(Z80 * log_sd(tables, calibration, derivatives(tables, calibration, etas, half, base)))
    tokens = tables.batch.global_batch * tables.batch.seq_len / tables.plan.num_devices
    rate = tokens / np.exp(base)
    memory = estimate_memory(
        model=tables.model,
        batch=tables.batch,
        plan=tables.plan,
        precision=tables.precision,
        constants=tables.memory,
    )
    return Predictions(
        tokens_per_s_per_device=rate,
        low=rate / spread,
        high=rate * spread,
        memory_allocated_bytes=memory.allocated_bytes,
        memory_reserved_bytes=memory.reserved_bytes,
        fits=memory.reserved_bytes <= tables.facts.memory_bytes,
    )
