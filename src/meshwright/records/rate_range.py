"""The learning-rate range test: losses under a rising rate, and the rates that follow from them.

The rate rises exponentially from step to step, so that a figure over its logarithm has equal steps. Losses
are smoothed by an exponential mean with decay 0.98, divided by 1 - 0.98^i, and the test ends where the
smoothed loss is above four times its lowest value. fastai does both. Two rates follow from the smoothed
losses:

    steepest              where the loss falls fastest over the logarithm of the rate, before the lowest loss
    tenth of divergence   a tenth of the rate at which the test ended

The smaller of both is suggested. Source: Smith 2017, "Cyclical learning rates for training neural networks", section
3.3 (arXiv 1506.01186); Howard and Gugger 2020, "fastai: a layered API for deep learning" (arXiv 2002.04688), `lr_find`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

DECAY = 0.98
DIVERGED_AT = 4.0
"""Smoothed loss over its lowest value at which the test ends."""
LEAST_FALL = 0.01
"""Share of its first value by which the smoothed loss must fall for a suggestion."""


def rate_of(step: int, *, num_steps: int, low: float, high: float) -> float:
    """The learning rate of `step`.

    >>> [round(rate_of(i, num_steps=3, low=1e-4, high=1e-2), 6) for i in range(3)]
    [0.0001, 0.001, 0.01]
    """
    return low * (high / low) ** (step / (num_steps - 1))


@dataclass(frozen=True, kw_only=True)
class RateRange:
    """Learning rates of a test and the loss of each step."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]  # of the global batch, before the update
    end: float  # the largest rate that was asked for

    @property
    def smoothed(self) -> list[float]:
        """Smoothed losses."""
        mean, found = 0.0, []
        for i, loss in enumerate(self.losses, start=1):
            mean = DECAY * mean + (1 - DECAY) * loss
            found.append(mean / (1 - DECAY**i))
        return found

    @property
    def has_diverged(self) -> bool:
        """True if the last loss is no number or far above the lowest."""
        smoothed = self.smoothed
        if not smoothed:
            return False
        finite = [s for s in smoothed if math.isfinite(s)]
        return not math.isfinite(smoothed[-1]) or smoothed[-1] > DIVERGED_AT * min(finite)

    @property
    def divergence(self) -> float | None:
        """The rate at which the loss diverged; None: it did not."""
        return self.rates[-1] if self.has_diverged else None

    @property
    def steepest(self) -> float | None:
        """The rate of the steepest descent; None: the loss does not fall."""
        smoothed = [s for s in self.smoothed if math.isfinite(s)]
        if not smoothed or min(smoothed) > (1 - LEAST_FALL) * smoothed[0]:
            return None
        lowest = smoothed.index(min(smoothed))
        slopes = [b - a for a, b in pairwise(smoothed[: lowest + 1])]  # steps are equal in the logarithm
        at = min(range(len(slopes)), key=slopes.__getitem__)
        return math.sqrt(self.rates[at] * self.rates[at + 1])

    @property
    def suggested(self) -> float | None:
        """The suggested peak, in two digits; None: the loss does not fall."""
        if self.steepest is None:
            return None
        tenth = math.inf if self.divergence is None else self.divergence / 10
        return float(f"{min(self.steepest, tenth):.1e}")
