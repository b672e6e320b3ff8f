"""Uncertainty of a comparison of two sizes: what they have in common cancels.

Both steps are predictions of one model of one system, so a GEMM that runs faster than calibrated makes both
faster. With g the derivatives of log step time to the calibrated parameters,

    sd^2 of log(T_a / T_b) = scale^2 Σ_parameters (g_a - g_b)^2 sd_parameter^2

What no parameter explains (`cost.uncertainty`) is taken as common to both and drops out: an assumption, for
sizes of one run on one machine.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from meshwright.calibration.parameters import Calibration, fitted
from meshwright.cost.rates import bf16_factors, factors_of, rates_from_etas
from meshwright.cost.step import estimate_steps
from meshwright.cost.tables import plan_row
from meshwright.cost.uncertainty import Z80, Etas, derivatives, kinds_of, log_variances
from meshwright.planner.request import PlanRequest
from meshwright.specs.plan import Plan


def log_slopes(
    request: PlanRequest, plan: Plan, *, calibration: Calibration | None = None, load_factor: float = 1.0
) -> dict[str, float]:
    """d log(step time) / d parameter, in transformed units of `calibration.parameters`."""
    calibration = calibration or fitted()
    facts = request.system_facts
    factors = factors_of(request.cluster, request.precision, request.stack)

    def log_step(etas: Etas, bf16: Etas) -> NDArray[np.float64]:
        steps = estimate_steps(
            model=request.model_table,
            batch=request.batch_table,
            plan=plan_row(plan),
            precision=request.precision_table,
            rates=rates_from_etas(calibration, facts, etas, bf16),
            load_factor=load_factor,
        )
        return np.log(steps.step_s)

    slopes = derivatives(log_step, calibration.etas([factors]), calibration.etas([bf16_factors(factors)]))
    return {name: float(slope[0]) for name, slope in slopes.items()}


def log_deviations(
    request: PlanRequest,
    slopes: Mapping[str, float],
    others: Mapping[str, float],
    *,
    calibration: Calibration | None = None,
) -> dict[str, float]:
    """Signed standard deviation that each parameter gives log(T / T of the others)."""
    difference = {name: np.array([slope - others[name]]) for name, slope in slopes.items()}
    variances = log_variances(
        difference,
        calibration or fitted(),
        [factors_of(request.cluster, request.precision, request.stack)],
        kinds=np.atleast_1d(kinds_of(request.model_table)),
    )
    return {name: float(np.sqrt(variances[name][0]) * np.sign(difference[name][0])) for name in difference}


def interval_factor(deviations: Mapping[str, float]) -> float:
    """The factor between a ratio and either end of its 80 % interval.

    >>> interval_factor({"a": 0.0})
    1.0
    """
    return float(np.exp(Z80 * np.sqrt(sum(sd**2 for sd in deviations.values()))))
