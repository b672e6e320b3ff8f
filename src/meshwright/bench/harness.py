"""Seconds of a callable, as its median with an interval, and how that was found.

    1. Two calls are not kept: the first picks kernels and touches pages, the second says how long one takes. Where
       the first takes all the time there is, it says so itself.
    2. Calls too short for the clock are repeated within one sample.
    3. Samples are taken until the 95 % interval of the median is narrow, or the time is spent.

The interval needs no assumption about the distribution (order statistics: Conover 1999, section 3.2): with n samples
the median lies between the k-th smallest and the k-th largest with probability 1 - 2 P(B < k), B binomial (n, 1/2).
Five samples are too few for 95 %; then low and high are the smallest and the largest.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.errors import MeshwrightError

CONFIDENCE = 0.95
TARGET_RATIO = 0.03
"""Half the width of the interval over the median at which a measurement is done."""

BUDGET_S = 2.0
LEAST_SAMPLE_S = 1e-3
MOST_CALLS = 10_000  # in one sample
MOST_SAMPLES = 400
FAR_OUT = 3.0
"""Interquartile ranges beyond the quartiles at which a sample is an outlier (Tukey 1977, section 2D: far out)."""


class AbsurdClockError(MeshwrightError):
    """The clock went backwards, stood still, or gave no number."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A sample far from the others. The first sample is 1."""

    sample: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """`seconds` of one call, by sample, in the order in which they were taken."""

    seconds: tuple[float, ...]
    calls: int  # in each sample
    target_ratio: float

    @property
    def n(self) -> int:
        return len(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the median lies with a confidence of 95 %; the whole range when n is below 6."""
        ordered = sorted(self.seconds)
        k = max(1, _rank(self.n))
        return ordered[k - 1], ordered[-k]

    @property
    def quartiles(self) -> tuple[float, float]:
        if self.n == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def is_narrow(self) -> bool:
        """Whether the interval is one of 95 % and as narrow as was asked for."""
        low, high = self.interval
        return _rank(self.n) > 0 and (high - low) / 2 <= self.target_ratio * self.median

    @property
    def outliers(self) -> tuple[Outlier, ...]:
        low, high = self.quartiles
        reach = FAR_OUT * (high - low)
        return tuple(
            Outlier(sample=i, seconds=s)
            for i, s in enumerate(self.seconds, start=1)
            if s < low - reach or s > high + reach
        )


def _rank(n: int) -> int:
    """The largest k whose order statistics hold the median with 95 %; 0 where none does."""
    below, k = 0.5**n, 0  # P(B < k + 1)
    while below <= (1 - CONFIDENCE) / 2:
        k += 1
        below += math.comb(n, k) * 0.5**n
    return k


def _nothing() -> None: ...


def _same(seconds: float) -> float:
    return seconds


def measure(
    run: Callable[[], object],
    *,
    before: Callable[[], object] | None = None,
    synchronize: Callable[[], object] = _nothing,
    agree: Callable[[float], float] = _same,
    clock: Callable[[], float] = time.perf_counter,
    target_ratio: float = TARGET_RATIO,
    budget_s: float = BUDGET_S,
) -> Measurement:
    """Time `run` until its median is known to `target_ratio`, or `budget_s` is spent.

    `before` runs ahead of every call and is not timed. `synchronize` waits for the device. `agree` maps the seconds
    of this process to those that all processes of a collective go by (their largest), so that all stop together.
    Raises AbsurdClockError when a duration is not above zero, and whatever `run` raises.
    """

    def sample_s(calls: int) -> float:
        if before is not None:
            before()
        synchronize()
        start_s = clock()
        for _ in range(calls):
            run()
        synchronize()
        return agree(_duration(start_s, clock()))

    spent_s = sample_s(1)
    call_s = spent_s
    if spent_s < budget_s:
        call_s = sample_s(1)
        spent_s += call_s
    calls = 1 if before is not None else _calls_a_sample(call_s)
    samples: list[float] = []
    while True:
        total_s = sample_s(calls)
        if total_s <= 0:
            raise AbsurdClockError(f"the clock stood still during {calls} calls: nothing can be measured")
        samples.append(total_s / calls)
        spent_s += total_s
        found = Measurement(seconds=tuple(samples), calls=calls, target_ratio=target_ratio)
        if found.is_narrow or spent_s >= budget_s or found.n >= MOST_SAMPLES:
            return found


def _calls_a_sample(call_s: float) -> int:
    return min(MOST_CALLS, max(1, round(LEAST_SAMPLE_S / max(call_s, LEAST_SAMPLE_S / MOST_CALLS))))


def _duration(start_s: float, end_s: float) -> float:
    seconds = end_s - start_s
    if not (math.isfinite(seconds) and seconds >= 0):
        raise AbsurdClockError(f"the clock went from {start_s!r} to {end_s!r} s: nothing can be measured")
    return seconds
