"""Memory budget: the part of a device's memory that a plan may reserve.

    usable = ratio x capacity        a plan fits when its reserved memory is at most `usable`

The reserved memory is an estimate, off by a factor whose logarithm has the standard deviation `log_sd`. So a plan that
needs a little more than it may is one that may fit: with the probability that its true memory is at most `usable`.

The search, `estimate`, `explain`, `scale`, `export` and the planning of a training ask this budget with the same
ratio, so that a plan that one of them returns fits in all the others. Only a comparison with runs that are known to
have worked or failed (`meshwright.accuracy`) has no reserve: there a reserve would count as an error of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import log
from statistics import NormalDist
from typing import Any

from meshwright.errors import InputError

PLANNING_RATIO = 0.95
"""Share of a device's memory that a plan may reserve. An assumption: what drivers and other processes take differs by
host, and a plan that is chosen to the last byte fails on the first host that has less."""

WHOLE_DEVICE_RATIO = 1.0
"""No reserve: for runs whose outcome is known."""


LIKELY, LEAST_PROBABILITY = 0.5, 0.1
"""Probabilities from which on a plan fits, and may fit."""


class FitVerdict(StrEnum):
    """Answer to whether a plan fits: its estimate does, its true memory may, or it does not."""

    FITS = "fits"
    MAY_FIT = "may fit"
    DOES_NOT_FIT = "does not fit"


def verdict_of(probability: float) -> FitVerdict:
    """Return the verdict on a plan that fits with `probability`."""
    if probability >= LIKELY:
        return FitVerdict.FITS
    return FitVerdict.MAY_FIT if probability >= LEAST_PROBABILITY else FitVerdict.DOES_NOT_FIT


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Memory of a device and the share of it that a plan may reserve.

    Raises InputError for a ratio that is not above 0 and at most 1.
    """

    capacity_bytes: Any  # a number, or an array with one per row of a table
    ratio: float = PLANNING_RATIO
    log_sd: float = 0.0  # of the logarithm of true over estimated memory; 0: the estimate is taken as true

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise InputError("share of usable memory is out of range", got=self.ratio, allowed="above 0, up to 1")

    @property
    def usable_bytes(self) -> Any:
        """Memory that a plan may reserve, in bytes per device."""
        return self.capacity_bytes * self.ratio

    def fits(self, reserved_bytes: Any) -> Any:
        """True where `reserved_bytes`, a number or an array, is at most `usable_bytes`.

        >>> budget = MemoryBudget(capacity_bytes=100.0)
        >>> [budget.fits(size) for size in (95.0, 96.0)]
        [True, False]
        """
        return reserved_bytes <= self.usable_bytes

    def probability(self, reserved_bytes: float) -> float:
        """Probability that a plan of estimated `reserved_bytes` fits: 0.5 where these are all that it may reserve.

        >>> budget = MemoryBudget(capacity_bytes=100.0, log_sd=0.1)
        >>> [round(budget.probability(size), 2) for size in (80.0, 95.0, 100.0, 120.0)]
        [0.96, 0.5, 0.3, 0.01]
        """
        if not self.log_sd:
            return float(self.fits(reserved_bytes))
        return NormalDist().cdf(log(self.usable_bytes / reserved_bytes) / self.log_sd)

    def verdict(self, reserved_bytes: float) -> FitVerdict:
        """Return the verdict on a plan of estimated `reserved_bytes`.

        >>> budget = MemoryBudget(capacity_bytes=100.0, log_sd=0.1)
        >>> [str(budget.verdict(size)) for size in (95.0, 100.0, 120.0)]
        ['fits', 'may fit', 'does not fit']
        """
        return verdict_of(self.probability(reserved_bytes))
