"""Efficiency correction of a kernel: measured over modelled seconds as a function of its shape.

    y(x) = log(measured seconds / modelled seconds)          x = log2 of the shape
    y(x) = mean + f(x) + noise,   f a Gaussian process, Matérn 3/2, one length for all axes

Far from all measured shapes f returns to 0, and the prediction is the cost model's roofline times exp(mean). It never
leaves the range of the measured y. Length and standard deviation of f are those that best predict each point from the
others (leave-one-out). Sources: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, sections 2.2
and 5.4.2; interpolation in the space of utilisation rather than of time: Nvidia, AIConfigurator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0)  # doublings of the shape
SDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
LEAST_NOISE = 0.02
"""Least standard deviation of a point. Two processes differ more than the repetitions of one."""

FEWEST_POINTS = 4
MAX_POINTS = 256  # the cost is that of inverting their covariance
MAX_KNOWN = 256  # evaluations that are kept
MAX_SHAPES = 4096  # in one evaluation; more are first reduced to the distinct ones


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """y at some shapes, and its standard deviation there (without the noise of a measurement)."""

    mean: Floats
    sd: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class EfficiencyCorrection:
    """One kernel in one number format: n points of d axes."""

    axes: tuple[str, ...]  # names of the sizes; x is their log2
    x: Floats  # n x d
    y: Floats  # n
    noise: Floats  # n, standard deviations
    mean: float
    length: float
    sd: float

    @cached_property
    def inverse(self) -> Floats:
        """Inverse covariance of the points, n x n."""
        return np.asarray(np.linalg.inv(self._covariance(self.x) + np.diag(self.noise**2)), dtype=np.float64)

    @cached_property
    def weights(self) -> Floats:
        return self.inverse @ (self.y - self.mean)

    @cached_property
    def _known(self) -> dict[tuple[Any, ...], Any]:
        """Factors by shapes. A fit asks for the same ones many times, because no parameter changes them."""
        return {}

    def predict(self, x: Floats) -> Predicted:
        """y at shapes q x d, given as log2. It is within the range of the measured y."""
        near = self._covariance(x)
        mean = np.clip(self.mean + near @ self.weights, self.y.min(), self.y.max())
        variance = self.sd**2 - np.einsum("qn,nm,qm->q", near, self.inverse, near)
        return Predicted(mean=mean, sd=np.sqrt(np.maximum(variance, 0.0)))

    def factor(self, *shape: Any) -> Any:
        """exp(y), the factor on modelled seconds. Sizes broadcast; those below 1 count as 1."""
        sizes = np.broadcast_arrays(*(np.maximum(np.asarray(s, dtype=float), 1.0) for s in shape))
        if sizes[0].size > MAX_SHAPES:
            return self._factor(sizes)
        key = (sizes[0].shape, *(s.tobytes() for s in sizes))
        if key not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = self._factor(sizes)
        return self._known[key]

    def _factor(self, sizes: Sequence[Floats]) -> Any:
        x = np.log2(np.stack([s.ravel() for s in sizes], axis=1))
        back = None
        if len(x) > MAX_SHAPES:
            x, back = np.unique(x, axis=0, return_inverse=True)
        y = np.clip(self.mean + self._covariance(x) @ self.weights, self.y.min(), self.y.max())
        found = np.exp(y if back is None else y[back.ravel()]).reshape(sizes[0].shape)
        return found if found.ndim else float(found)

    def leave_one_out(self) -> Predicted:
        """Each measured point predicted from the others, with the noise of its measurement."""
        variance = 1 / np.diag(self.inverse)
        return Predicted(mean=self.y - self.weights * variance, sd=np.sqrt(variance))

    def _covariance(self, x: Floats) -> Floats:
        return self.sd**2 * _matern(_distances(x, self.x) / self.length)


def fit_correction(x: Floats, y: Floats, noise: Floats, *, axes: Sequence[str]) -> EfficiencyCorrection | None:
    """Fit a correction to points (x, y); None when there are too few."""
    if len(y) < FEWEST_POINTS:
        return None
    x, y = x[:MAX_POINTS], y[:MAX_POINTS]
    noise = np.hypot(noise[:MAX_POINTS], LEAST_NOISE)
    mean = float(np.median(y))
    tried = [
        EfficiencyCorrection(axes=tuple(axes), x=x, y=y, noise=noise, mean=mean, length=length, sd=sd)
        for length in LENGTHS
        for sd in SDS
    ]
    return max(tried, key=_log_density)


def _log_density(correction: EfficiencyCorrection) -> float:
    """Sum of the log densities of the points, each predicted from the others."""
    out = correction.leave_one_out()
    return float(np.sum(-np.log(out.sd) - 0.5 * ((correction.y - out.mean) / out.sd) ** 2))


def _distances(a: Floats, b: Floats) -> Floats:
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    return np.sqrt(np.maximum(squares, 0.0))


def _matern(distance: Floats) -> Floats:
    scaled = np.sqrt(3.0) * distance
    return (1 + scaled) * np.exp(-scaled)


def to_document(correction: EfficiencyCorrection) -> dict[str, Any]:
    """JSON document, with numbers rounded to the precision of the measurements."""
    return {
        "axes": list(correction.axes),
        "mean": round(correction.mean, 6),
        "length": correction.length,
        "sd": correction.sd,
        "points": [
            {"x": [round(float(v), 6) for v in x], "y": round(float(y), 6), "noise": round(float(s), 6)}
            for x, y, s in zip(correction.x, correction.y, correction.noise, strict=True)
        ],
    }


def from_document(document: Mapping[str, Any]) -> EfficiencyCorrection:
    """Read a document of `to_document`. Raises KeyError, TypeError or ValueError for any other."""
    points = document["points"]
    correction = EfficiencyCorrection(
        axes=tuple(document["axes"]),
        x=np.array([p["x"] for p in points], dtype=float),
        y=np.array([p["y"] for p in points], dtype=float),
        noise=np.array([p["noise"] for p in points], dtype=float),
        mean=float(document["mean"]),
        length=float(document["length"]),
        sd=float(document["sd"]),
    )
    numbers = (correction.x, correction.y, correction.noise, np.array([correction.mean]))
    if correction.x.shape != (len(points), len(correction.axes)) or not all(np.isfinite(a).all() for a in numbers):
        raise ValueError("an efficiency correction has points that are not finite, or of another number of axes")
    if not (correction.length > 0 and correction.sd > 0 and (correction.noise > 0).all()):
        raise ValueError("length, sd and noise of an efficiency correction must be above 0")
    return correction
