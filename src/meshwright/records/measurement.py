"""Samples of one measurement: the median with its 95 % interval, quartiles and outliers.

The interval needs no assumption about the distribution (order statistics: Conover 1999, section 3.2). The
median of n samples lies between the k-th smallest and the k-th largest with probability 1 - 2 P(B < k), B
binomial (n, 1/2). Five samples are too few for 95 %; low and high are then the smallest and the largest
sample.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

CONFIDENCE = 0.95
FAR_OUT = 3.0
"""Interquartile ranges beyond the quartiles from which a sample is an outlier (Tukey 1977, section 2D: far out)."""


@dataclass(frozen=True, kw_only=True)
class SampleOutlier:
    """A sample far from the others. Samples are numbered from 1."""

    sample: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """`seconds` of one call by sample, in order of measurement."""

    seconds: tuple[float, ...]
    calls: int = 1  # in each sample
    target_ratio: float = 1.0

    @property
    def n(self) -> int:
        return len(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the median; the whole range when n is below 6."""
        ordered = sorted(self.seconds)
        k = max(1, _rank(self.n))
        return ordered[k - 1], ordered[-k]

    def as_document(self) -> dict[str, float]:
        """Median, its interval and the number of samples, as JSON documents have them."""
        low, high = self.interval
        return {"median": self.median, "low": low, "high": high, "n": self.n}

    @property
    def quartiles(self) -> tuple[float, float]:
        if self.n == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def is_narrow(self) -> bool:
        """True if the interval has 95 % confidence and is as narrow as `target_ratio` demands."""
        low, high = self.interval
        return _rank(self.n) > 0 and (high - low) / 2 <= self.target_ratio * self.median

    @property
    def outliers(self) -> tuple[SampleOutlier, ...]:
        low, high = self.quartiles
        reach = FAR_OUT * (high - low)
        return tuple(
            SampleOutlier(sample=i, seconds=s)
            for i, s in enumerate(self.seconds, start=1)
            if s < low - reach or s > high + reach
        )


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """A value with its interval."""

    value: float
    low: float
    high: float


def value_range(values: Iterable[float | None]) -> ValueRange | None:
    """Median with its interval, as of a `Measurement`; None where there is no value."""
    found = tuple(v for v in values if v is not None)
    if not found:
        return None
    low, high = Measurement(seconds=found).interval
    return ValueRange(value=statistics.median(found), low=low, high=high)


def _rank(n: int) -> int:
    """The largest k whose order statistics hold the median with 95 %; 0 where none does."""
    below, k = 0.5**n, 0  # P(B < k + 1)
    while below <= (1 - CONFIDENCE) / 2:
        k += 1
        below += math.comb(n, k) * 0.5**n
    return k
