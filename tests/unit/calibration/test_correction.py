"""Efficiency corrections: measured points, uncertainty, and the range of the measured ratios."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.calibration.correction import (
    FEWEST_POINTS,
    EfficiencyCorrection,
    fit_correction,
    from_document,
    to_document,
)

AXES = ("m", "n", "k")
RNG = np.random.default_rng(7)
X = RNG.uniform(5, 12, size=(80, 3))


def truth(x: np.ndarray) -> np.ndarray:
    """log(measured / modelled): small products are slower than the formula says."""
    return 0.8 * np.exp(-(x.min(axis=1) - 5) / 2) + 0.1 * np.sin(x[:, 0])


def correction(noise: float = 0.02, *, num_points: int = 80) -> EfficiencyCorrection:
    x = X[:num_points]
    y = truth(x) + np.random.default_rng(3).normal(0, noise, len(x))
    found = fit_correction(x, y, np.full(len(x), noise), axes=AXES)
    assert found is not None
    return found


FITTED = correction()
ANY_SIZE = st.floats(1e-3, 1e12)


def test_measured_points_come_back_within_their_noise():
    off = np.abs(FITTED.predict(FITTED.x).mean - FITTED.y)
    assert np.median(off) < 0.03
    assert off.max() < 0.12


def test_points_between_are_predicted_better_than_by_the_formula():
    new = RNG.uniform(5.5, 11.5, size=(200, 3))
    corrected = np.abs(FITTED.predict(new).mean - truth(new))
    without = np.abs(truth(new) - np.median(FITTED.y))
    assert np.median(corrected) < 0.4 * np.median(without)


def test_leave_one_out_errors_are_those_of_fits_without_the_point():
    small = correction(num_points=12)
    out = small.leave_one_out()
    for i in range(12):
        others = np.arange(12) != i
        rest = EfficiencyCorrection(
            axes=AXES, x=small.x[others], y=small.y[others], noise=small.noise[others],
            mean=small.mean, length=small.length, sd=small.sd,
        )  # fmt: skip
        near = rest.sd**2 * (rest.inverse @ (rest.y - rest.mean))
        assert near.shape == (11,)
        expected = rest.mean + rest._covariance(small.x[i : i + 1]) @ rest.weights
        assert out.mean[i] == pytest.approx(float(expected[0]), abs=1e-6)


def test_the_spread_grows_away_from_the_points_and_says_how_often_it_holds():
    new = RNG.uniform(5.5, 11.5, size=(400, 3))
    found = FITTED.predict(new)
    inside = np.abs(found.mean - truth(new)) < 2 * np.hypot(found.sd, 0.02)
    assert inside.mean() > 0.85
    far = FITTED.predict(np.array([[40.0, 40.0, 40.0]]))
    assert far.sd[0] == pytest.approx(FITTED.sd, rel=1e-3)
    assert found.sd.max() <= FITTED.sd


@given(ANY_SIZE, ANY_SIZE, ANY_SIZE)
def test_no_shape_leaves_the_range_of_what_was_measured(m, n, k):
    assert np.exp(FITTED.y.min()) * 0.999 <= FITTED.factor(m, n, k) <= np.exp(FITTED.y.max()) * 1.001


def test_far_away_only_the_mean_is_left():
    assert FITTED.factor(2.0**60, 2.0**60, 2.0**60) == pytest.approx(np.exp(FITTED.mean))


def test_arrays_give_what_numbers_give():
    sizes = 2.0 ** RNG.uniform(0, 14, size=(50, 1))
    grid = FITTED.factor(sizes, 2.0 ** np.arange(120), 512)  # 6000 shapes: above the limit
    assert grid.shape == (50, 120)
    for i, j in [(0, 0), (49, 119), (17, 40)]:
        assert grid[i, j] == pytest.approx(FITTED.factor(float(sizes[i, 0]), 2.0**j, 512))


def test_a_constant_device_has_a_constant_correction():
    flat = fit_correction(X, np.full(len(X), 0.3), np.full(len(X), 0.01), axes=AXES)
    assert flat is not None
    assert flat.factor(100, 1000, 10) == pytest.approx(np.exp(0.3))


def test_too_few_points_give_no_correction():
    few = FEWEST_POINTS - 1
    assert fit_correction(X[:few], truth(X[:few]), np.full(few, 0.1), axes=AXES) is None


def test_a_document_reads_back():
    again = from_document(json.loads(json.dumps(to_document(FITTED))))
    new = RNG.uniform(5, 12, size=(20, 3))
    assert again.predict(new).mean == pytest.approx(FITTED.predict(new).mean, abs=1e-4)
    assert again.axes == AXES


@pytest.mark.parametrize(
    "change",
    [
        {"length": 0}, {"sd": -1}, {"mean": float("nan")}, {"axes": ["m"]},
        {"points": [{"x": [1, 2, 3], "y": 0, "noise": 0}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_document_that_makes_no_sense_is_refused(change):
    with pytest.raises(ValueError):  # noqa: PT011 - device_calibration names the file
        from_document(to_document(FITTED) | change)
