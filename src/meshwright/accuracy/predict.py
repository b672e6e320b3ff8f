"""Predictions for published runs, with intervals (`cost.uncertainty`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.accuracy.metrics import Predictions
from meshwright.accuracy.rows import PublishedRun
from meshwright.accuracy.tables import RunTables, memory_of, tables_of
from meshwright.calibration.parameters import Calibration, fitted
from meshwright.cost.rates import rates_from_etas
from meshwright.cost.step import estimate_steps
from meshwright.cost.uncertainty import Etas, LogStep, derivatives, kinds_of, log_variances, spread
from meshwright.specs.memory_budget import WHOLE_DEVICE_RATIO, MemoryBudget


def log_step_of(tables: RunTables, calibration: Calibration) -> LogStep:
    """Log seconds per step of every run, as a function of the calibrated parameters."""

    def log_step(etas: Etas, bf16: Etas) -> NDArray[np.float64]:
        rates = rates_from_etas(calibration, tables.facts, etas, bf16)
        steps = estimate_steps(
            model=tables.model, batch=tables.batch, plan=tables.plan, precision=tables.precision, rates=rates
        )
        return np.log(steps.step_s)

    return log_step


def predict_steps(
    tables: RunTables, calibration: Calibration
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """(log seconds per step, variance of it by source) of every run."""
    etas, bf16 = calibration.etas(tables.factors), calibration.etas(tables.bf16_factors)
    log_step = log_step_of(tables, calibration)
    variances = log_variances(
        derivatives(log_step, etas, bf16),
        calibration,
        tables.factors,
        kinds=np.broadcast_to(kinds_of(tables.model), len(tables.factors)),
        clock_width=tables.facts.clock_width,
    )
    return log_step(etas, bf16), variances


def predict(runs: Sequence[PublishedRun], *, calibration: Calibration | None = None) -> Predictions:
    """Rate and memory of every run. Each must have conditions."""
    conditions = [run.conditions for run in runs if run.conditions is not None]
    tables = tables_of(conditions)
    log_step_s, variances = predict_steps(tables, calibration or fitted())
    factor = spread(variances)
    rate = tables.batch.global_batch * tables.batch.seq_len / tables.plan.num_devices / np.exp(log_step_s)
    memory = memory_of(conditions, tables)
    return Predictions(
        tokens_per_s_per_device=rate,
        low=rate / factor,
        high=rate * factor,
        memory_allocated_bytes=np.asarray(memory.allocated_bytes),
        memory_reserved_bytes=np.asarray(memory.reserved_bytes),
        fit_probability=_fit_probabilities(tables, np.asarray(memory.reserved_bytes), calibration or fitted()),
    )


def _fit_probabilities(
    tables: RunTables, reserved_bytes: NDArray[np.float64], calibration: Calibration
) -> NDArray[np.float64]:
    """That each run fits all memory of its device: its outcome is known, and a reserve would count as an error."""
    capacity = np.broadcast_to(tables.facts.memory_bytes, reserved_bytes.shape)
    budgets = (MemoryBudget(capacity_bytes=c, ratio=WHOLE_DEVICE_RATIO, log_sd=calibration.memory_sd) for c in capacity)
    return np.array([budget.probability(size) for budget, size in zip(budgets, reserved_bytes, strict=True)])
