"""Ratios of paired values: interval by bootstrap, geometric mean, leave-one-out, wins and losses.

    ratio       r_i = side / baseline where higher is better, baseline / side where lower is: above 1 is better
    interval    of log r_i. Fewer than 30 samples: Student's t of each side, combined as Behrens and Fisher do; a
                bootstrap of so few is too narrow. More: percentile bootstrap, both sides are resampled (Efron &
                Tibshirani 1993, section 13.3). Steps of one training follow each other: medians of up to five parts of
                them count (batch means; Law 2015, section 9.5.3). Fewer than three runs of a side: no verdict
    mean        exp(mean log r_i) over the workloads of one metric; its interval resamples three or more workloads,
                and one workload has the interval of its ratio
    whole time  time of the baseline for one unit of each workload over the other side's time

Random numbers come from a fixed state, so that a report can be made again to the last digit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from meshwright.answers.comparison.sides import Better, Side, SideValue, Statistic

RANDOM_STATE = 20_25
RESAMPLES = 2_000
CONFIDENCE = 0.95
MAX_DRAWN = 4_000_000
"""Most numbers of one bootstrap; more samples mean fewer resamples."""
FEWEST_RESAMPLES = 200
FEWEST_SAMPLES, FEWEST_OF_BOOTSTRAP = 3, 30
"""Fewer samples say nothing of their spread, and there is no interval; fewer of the second have Student's t."""
MOST_PARTS, FEWEST_STEPS_OF_PART = 5, 3
STEP = "step"
RUNS = ("run", "repeat", "record")
"""Kinds of samples (`SideValue.sampled`) whose spread is the one between runs."""
MAX_MATCHED = 10_000
"""Pairs of workloads with different names that are looked at."""
NEAR_RATIO = 0.01
"""Without an interval, values as near as this are undecided."""


class Verdict(StrEnum):
    """Outcome of one workload."""

    WIN = "win"
    LOSS = "loss"
    TIE = "undecided"  # the interval holds 1


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One workload of two sides. Above 1 the side is better than the baseline."""

    workload: str
    baseline: SideValue
    other: SideValue
    value: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> Verdict:
        """Win or loss where the interval excludes 1; without an interval where the values are not within 1 %.

        Undecided where a side has fewer than three runs.
        """
        if self.has_too_few_runs:
            return Verdict.TIE
        low, high = self.low or self.value / (1 + NEAR_RATIO), self.high or self.value * (1 + NEAR_RATIO)
        return Verdict.WIN if low > 1 else Verdict.LOSS if high < 1 else Verdict.TIE

    @property
    def has_interval(self) -> bool:
        return self.low is not None

    @property
    def has_too_few_runs(self) -> bool:
        return _has_too_few_runs(self.baseline) or _has_too_few_runs(self.other)


@dataclass(frozen=True, kw_only=True)
class WithoutOne:
    """Geometric mean without one workload."""

    workload: str
    value: float


@dataclass(frozen=True, kw_only=True)
class MeanRatio:
    """All workloads of one metric that two sides share."""

    metric: str
    unit: str
    baseline: str
    other: str
    ratios: tuple[Ratio, ...]
    value: float
    low: float | None
    high: float | None
    lowest: WithoutOne | None  # leave-one-out
    highest: WithoutOne | None
    whole_time: float
    only_baseline: tuple[str, ...]  # workloads that the other side lacks
    only_other: tuple[str, ...]

    @property
    def n(self) -> int:
        """Number of paired workloads."""
        return len(self.ratios)

    def count(self, verdict: Verdict) -> int:
        """Number of workloads with this outcome."""
        return sum(r.verdict is verdict for r in self.ratios)


def mean_ratios(baseline: Side, other: Side) -> list[MeanRatio]:
    """One mean for each metric that both sides have, in the order of the baseline."""
    found = []
    for metric in dict.fromkeys(v.metric for v in baseline.values):
        ours, theirs = ({v.workload: v for v in s.values if v.metric == metric} for s in (baseline, other))
        pairs = paired(list(ours), list(theirs))
        if not pairs:
            continue
        ratios = tuple(_ratio(ours[a], theirs[b]) for a, b in pairs.items())
        only = tuple(n for n in ours if n not in pairs), tuple(n for n in theirs if n not in pairs.values())
        found.append(_mean(ratios, names=(baseline.name, other.name), only=only))
    return found


def paired(ours: Sequence[str], theirs: Sequence[str]) -> dict[str, str]:
    """Workloads of two sides that are the same, or of which one states less: "model, task" meets "model, task, length".

    >>> paired(["a, pretrain, 512 tokens", "b"], ["a, pretrain", "c"])
    {'a, pretrain, 512 tokens': 'a, pretrain'}
    """
    found = {name: name for name in ours if name in set(theirs)}
    left, right = [n for n in ours if n not in found], [n for n in theirs if n not in found]
    if len(left) * len(right) > MAX_MATCHED:
        return found
    for name in left:
        fits = [n for n in right if n.startswith(f"{name}, ") or name.startswith(f"{n}, ")]
        if len(fits) == 1 and fits[0] not in found.values():
            found[name] = fits[0]
    return found


def geometric_mean(values: Sequence[float]) -> float:
    """
    >>> round(geometric_mean([1.0, 4.0]), 12)
    2.0
    """
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _ratio(baseline: SideValue, other: SideValue) -> Ratio:
    log_ratio = _oriented(math.log(other.value / baseline.value), baseline)
    low, high = _interval(baseline, other)
    workload = max(baseline.workload, other.workload, key=len)
    return Ratio(workload=workload, baseline=baseline, other=other, value=math.exp(log_ratio), low=low, high=high)


def _oriented(log_ratio: float, value: SideValue) -> float:
    return log_ratio if value.metric.better is Better.HIGHER else -log_ratio


def _interval(baseline: SideValue, other: SideValue) -> tuple[float | None, float | None]:
    """95 % of the logarithm of the ratio; an 80 % interval of a prediction counts with its own width."""
    if _has_too_few_runs(baseline) or _has_too_few_runs(other):
        return None, None
    drawn = [_log_draws(value, stream) for stream, value in enumerate((baseline, other))]
    if all(d is None for d in drawn):
        return None, None
    first, second = (d if d is not None else np.zeros(1) for d in drawn)
    if first.size > 1 and second.size > 1:
        size = min(first.size, second.size)
        first, second = first[:size], second[:size]
    logs = math.log(other.value / baseline.value) + second - first
    if baseline.metric.better is Better.LOWER:
        logs = -logs
    low, high = np.quantile(logs, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return math.exp(low), math.exp(high)


def _has_too_few_runs(value: SideValue) -> bool:
    return value.sampled in RUNS and 0 < len(value.samples) < FEWEST_SAMPLES


def _log_draws(value: SideValue, stream: int) -> NDArray[np.float64] | None:
    """Resampled values over the value itself, as logarithms; None where nothing is known about the spread."""
    random = np.random.default_rng([RANDOM_STATE, stream])
    samples = np.array([s for s in value.samples if math.isfinite(s) and s > 0])
    if value.sampled == STEP and len(samples) >= FEWEST_SAMPLES * FEWEST_STEPS_OF_PART:
        parts = np.array_split(samples, min(MOST_PARTS, len(samples) // FEWEST_STEPS_OF_PART))
        error = np.std([math.log(np.median(part)) for part in parts], ddof=1) / math.sqrt(len(parts))
        return random.standard_t(len(parts) - 1, RESAMPLES) * error
    if FEWEST_SAMPLES <= len(samples) < FEWEST_OF_BOOTSTRAP and value.statistic is not Statistic.MAXIMUM:
        error = np.log(samples).std(ddof=1) / math.sqrt(len(samples))
        if value.statistic is Statistic.MEDIAN:
            error *= math.sqrt(math.pi / 2)  # of a normal's median over its mean's
        return random.standard_t(len(samples) - 1, RESAMPLES) * error
    if len(samples) >= FEWEST_OF_BOOTSTRAP and value.statistic is not Statistic.MAXIMUM:
        count = max(FEWEST_RESAMPLES, min(RESAMPLES, MAX_DRAWN // len(samples)))
        drawn = random.choice(samples, size=(count, len(samples)))
        return np.log(_statistic(drawn, value.statistic) / _statistic(samples[None], value.statistic))
    if value.low is not None and value.high is not None and 0 < value.low < value.high:
        # A normal of the logarithm with the prediction's 80 % interval: 1.2816 standard deviations on each side.
        sides = np.log([value.low / value.value, value.high / value.value]) / 1.2816
        normal = random.standard_normal(RESAMPLES)
        return np.where(normal < 0, -sides[0], sides[1]) * normal
    return None


def _statistic(drawn: NDArray[np.float64], statistic: Statistic) -> NDArray[np.float64]:
    if statistic is Statistic.OLYMPIC_MEAN and drawn.shape[1] > 2:
        return np.sort(drawn, axis=1)[:, 1:-1].mean(axis=1)
    return np.median(drawn, axis=1) if statistic is Statistic.MEDIAN else drawn.mean(axis=1)


def _mean(
    ratios: Sequence[Ratio], *, names: tuple[str, str], only: tuple[tuple[str, ...], tuple[str, ...]]
) -> MeanRatio:
    values = [r.value for r in ratios]
    low, high = (ratios[0].low, ratios[0].high) if len(ratios) == 1 else _mean_interval(values)
    without_one = [
        WithoutOne(workload=r.workload, value=geometric_mean(values[:i] + values[i + 1 :]))
        for i, r in enumerate(ratios)
        if len(ratios) > 1
    ]
    metric = ratios[0].baseline.metric
    return MeanRatio(
        metric=metric.name, unit=metric.unit, baseline=names[0], other=names[1], ratios=tuple(ratios),
        value=geometric_mean(values), low=low, high=high,
        lowest=min(without_one, key=lambda o: o.value, default=None),
        highest=max(without_one, key=lambda o: o.value, default=None),
        whole_time=_whole_time(ratios), only_baseline=only[0], only_other=only[1],
    )  # fmt: skip


def _mean_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    if len(values) < FEWEST_SAMPLES:
        return None, None
    logs = np.log(values)
    random = np.random.default_rng([RANDOM_STATE, 2])
    count = max(FEWEST_RESAMPLES, min(RESAMPLES, MAX_DRAWN // len(values)))
    means = random.choice(logs, size=(count, len(logs))).mean(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return math.exp(low), math.exp(high)


def _whole_time(ratios: Sequence[Ratio]) -> float:
    """Sum of times for one unit of each workload; a rate counts as the time of one token."""

    def time(value: SideValue) -> float:
        return 1 / value.value if value.metric.better is Better.HIGHER else value.value

    return sum(time(r.baseline) for r in ratios) / sum(time(r.other) for r in ratios)
