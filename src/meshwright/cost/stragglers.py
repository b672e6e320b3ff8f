"""Stragglers: a barrier waits for its slowest member.

For n independent times with mean mu and standard deviation sigma a barrier opens after mu + sigma m(n), where
m(n) is the expected maximum of n standard normal draws. The familiar sqrt(2 ln n) is its limit, and 15 % too
high at n = 1000; here m(n) is integrated. With Phi the normal distribution function and g any smooth
function, by parts against one draw,

    E[g(Z_max)] = E[g(Z)] + integral of g'(z) (Phi(z) - Phi(z)^n) dz

(the distribution of the maximum is Phi^n: H. A. David and H. N. Nagaraja, Order Statistics, 3rd edition 2003,
section 2.1). The integrand is smooth and vanishes at both ends, so a sum over a uniform grid converges faster
than any power of its step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Array

_TAIL = 10.0  # standard deviations; 1 - Phi(10) is 8e-24
_STEP = 0.02
_LARGEST_LOG2 = 27  # 134 million members; larger groups are taken as that


@dataclass(frozen=True, kw_only=True)
class Barrier:
    """One level of waiting. `size` members meet `repeats` times for each time that the next outer level
    meets."""

    axis: str
    size: Array
    repeats: Array = 1


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Spread of the devices' own speed, standard deviation over mean.

    `transient_ratio`: of one device's work in a step, independent from segment to segment (clocks, host,
    network). `persistent_ratio`: between devices, the same in every step (silicon, cooling).
    """

    transient_ratio: Array = 0.0
    persistent_ratio: Array = 0.0


def maximum_mean(num_members: Array) -> Array:
    """m(n): expected maximum of n standard normal draws, n >= 1 (real n is allowed).

    >>> [round(float(maximum_mean(n)), 3) for n in (1, 2, 8, 1000, 98_304)]
    [0.0, 0.564, 1.424, 3.241, 4.381]
    """
    return np.interp(np.log2(num_members), *_moments()[:2])


def maximum_sd(num_members: Array) -> Array:
    """Standard deviation of the maximum of n standard normal draws: 1 at n = 1, falling slowly.

    >>> round(float(maximum_sd(2)) ** 2, 4)  # 1 - 1/pi
    0.6817
    """
    log2_members, _, sd = _moments()
    return np.interp(np.log2(num_members), log2_members, sd)


def lognormal_slowdown(*, num_members: Array, variation_ratio: Array) -> Array:
    """Expected maximum over mean of n lognormal times with standard deviation over mean `variation_ratio`.

    A lognormal has a longer tail than a normal: use it where a few members are persistently slow. Exact by
    the same integral, with exp(s Z) for Z; s^2 = ln(1 + variation^2).
    """
    n, variation = np.broadcast_arrays(
        np.asarray(num_members, dtype=float), np.asarray(variation_ratio, dtype=float)
    )
    s = np.sqrt(np.log1p(variation**2))[..., None]
    z, log_cdf = _log_cdf()
    growth = s * np.exp(s * z - s**2 / 2)  # of the lognormal with mean 1
    return 1 + _STEP * np.sum(growth * _cdf_drop(n[..., None], log_cdf), axis=-1)


def barrier_delay_s(*, sigma_s: Array, levels: Sequence[Barrier]) -> Array:
    """Expected wait in a step of nested barriers, innermost first.

    `sigma_s` is the standard deviation of one device's own work over the whole step. It is split into
    independent segments between the innermost barriers (sigma / sqrt(segments) each). A level turns a segment
    (mean, sd) into (mean + sd m(n), sd s(n)); its repeats add means and variances; the sum is taken as normal
    at the next level.
    """
    segments = math.prod((level.repeats for level in levels), start=1)
    wait, sd = 0.0, sigma_s / np.sqrt(segments)
    for level in levels:
        wait = level.repeats * (wait + sd * maximum_mean(level.size))
        sd = np.sqrt(level.repeats) * sd * maximum_sd(level.size)
    return wait


def straggler_delay_s(*, step_s: Array, jitter: Jitter, levels: Sequence[Barrier]) -> Array:
    """Expected time that stragglers add to a step of `step_s` (as a device alone would take it).

    The transient part waits at every level; the persistent one costs the slowest of all devices once. Their
    sum is an upper bound, for the slowest sum is not slower than the sum of the slowest.
    """
    members = math.prod((level.size for level in levels), start=1)
    transient_s = barrier_delay_s(sigma_s=step_s * jitter.transient_ratio, levels=levels)
    return transient_s + step_s * jitter.persistent_ratio * maximum_mean(members)


@cache
def _log_cdf() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Grid z and log Phi(z), accurate in both tails."""
    z = np.linspace(-_TAIL, _TAIL, round(2 * _TAIL / _STEP) + 1)
    tail = np.array([0.5 * math.erfc(abs(x) / math.sqrt(2)) for x in z])
    return z, np.where(z < 0, np.log(tail), np.log1p(-tail))


@cache
def _moments() -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """log2 n, mean and standard deviation of the maximum; every n to 64, then 16 points an octave."""
    n = np.union1d(np.arange(1.0, 65.0), 2.0 ** np.arange(6, _LARGEST_LOG2 + 1 / 32, 1 / 16))
    z, log_cdf = _log_cdf()
    drop = _cdf_drop(n[:, None], log_cdf)
    mean = _STEP * np.sum(drop, axis=-1)
    square = 1 + _STEP * np.sum(2 * z * drop, axis=-1)
    return np.log2(n), mean, np.sqrt(square - mean**2)


def _cdf_drop(n: NDArray[np.float64], log_cdf: NDArray[np.float64]) -> NDArray[np.float64]:
    """Phi(z) - Phi(z)^n, without cancellation in the upper tail where both are near 1."""
    return -np.exp(log_cdf) * np.expm1((n - 1) * log_cdf)
