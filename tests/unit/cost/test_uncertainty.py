"""The calibration's spread carried through to an interval."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from tests.shipped_rows import shipped_runs

from meshwright.accuracy.predict import log_step_of
from meshwright.accuracy.tables import tables_of
from meshwright.calibration.parameters import Offset, fitted, prior
from meshwright.catalog import lookup as catalog
from meshwright.cost.rates import factors_of
from meshwright.cost.uncertainty import BF16_GEMM, DERIVATIVE_STEP, Z80, derivatives, log_variances, spread
from meshwright.specs.hardware import Stack
from meshwright.specs.precision import PRECISIONS

FACTORS = factors_of(catalog.cluster("h100-8x4"), PRECISIONS["bf16"], Stack(framework="nemo"))


def test_z80_leaves_a_tenth_on_either_side():
    assert NormalDist().cdf(Z80) == pytest.approx(0.9)


@pytest.mark.when_touched  # the arithmetic is that of the test below
def test_parameters_that_move_at_once_give_what_each_gives_by_itself():
    """Published runs with every axis of parallelism, dense and mixtures of experts."""
    runs = [run.conditions for run in shipped_runs() if run.conditions is not None][::10]
    tables, calibration = tables_of(runs), fitted()
    log_step = log_step_of(tables, calibration)
    etas, bf16 = calibration.etas(tables.factors), calibration.etas(tables.bf16_factors)
    slopes = derivatives(log_step, etas, bf16)
    assert slopes.keys() == {*etas, BF16_GEMM}
    for name in etas:
        moved = log_step({**etas, name: etas[name] + DERIVATIVE_STEP}, bf16)
        expected = (moved - log_step(etas, bf16)) / DERIVATIVE_STEP
        assert slopes[name] == pytest.approx(expected, abs=1e-9), name


def test_derivatives_of_a_linear_model_are_its_coefficients():
    etas = {"gemm_ratio": np.array([0.3, -0.2]), "step_s": np.array([1.0, 2.0])}
    bf16 = {"gemm_ratio": np.array([0.1, 0.1])}

    def log_step(eta, bf16_eta):
        return 2 * eta["gemm_ratio"] - 3 * eta["step_s"] + 0.5 * bf16_eta["gemm_ratio"]

    slopes = derivatives(log_step, etas, bf16)
    assert slopes["gemm_ratio"] == pytest.approx([2, 2])
    assert slopes["step_s"] == pytest.approx([-3, -3])
    assert slopes[BF16_GEMM] == pytest.approx([0.5, 0.5])


def variances(calibration=None, *, slope: float = 1.0, kind: str = "dense") -> dict[str, np.ndarray]:
    slopes = {name: np.array([0.0]) for name in prior().parameters} | {"memory_ratio": np.array([slope])}
    slopes[BF16_GEMM] = np.array([0.0])
    return log_variances(slopes, calibration or prior(), [FACTORS], kinds=np.array([kind]))


def test_a_parameter_counts_with_its_slope_and_its_spread():
    sd = prior().sds(FACTORS)["memory_ratio"]
    assert variances(slope=0.5)["memory_ratio"] == pytest.approx((0.5 * sd) ** 2)
    assert variances()["gemm_ratio"] == 0


def test_what_the_fit_leaves_unexplained_differs_by_kind_of_model():
    fitted = replace(prior(), residual_sd={"dense": 0.02, "moe": 0.08})
    assert variances(fitted)["unexplained"] == pytest.approx(0.02**2)
    assert variances(fitted, kind="moe")["unexplained"] == pytest.approx(0.08**2)
    assert variances(fitted, kind="novel")["unexplained"] == pytest.approx(0.08**2)


def test_what_strangers_err_by_widens_their_kind_and_the_kinds_of_few_rows():
    wide = replace(prior(), residual_sd={"dense": 0.0, "moe": 0.0}, stranger_sd={"dense": 0.1, "moe": 0.3})
    found = {kind: float(variances(wide, kind=kind)["unexplained"][0]) for kind in ("dense", "moe", "novel")}
    assert found == pytest.approx({"dense": 0.1**2, "moe": 0.3**2, "novel": 0.3**2})
    assert variances(wide)["memory_ratio"] == variances()["memory_ratio"]


def test_a_measurement_narrows_it():
    known = replace(
        prior(), offsets={("memory_ratio", "architecture", "Hopper"): Offset(value=0.1, sd=0.02, num_rows=9)}
    )
    assert variances(known)["memory_ratio"] < variances()["memory_ratio"]


def test_spread_is_the_ratio_of_value_and_end():
    assert spread({"a": np.array([0.03**2]), "b": np.array([0.04**2])}) == pytest.approx(np.exp(Z80 * 0.05))
