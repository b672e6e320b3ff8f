"""Error metrics of predictions. NumPy only.

    e = p / m - 1        signed error of a prediction p of a measured m; > 0: too optimistic
    error                median and 90th percentile of |e|;  bias: median of e
    coverage             share of rows with low <= m <= high; the target of an 80 % interval is 0.8
    interval score       mean width of the intervals of log m, and a penalty for what lies outside
    τ_b, ρ               Kendall (1945) and Spearman (1904) rank correlation inside a group of plans
    regret               1 - m(plan predicted fastest) / m(plan measured fastest)

A group of plans: rows that differ only in the plan (model, accelerator, devices, global batch,
sequence length, precision, task, source and software), with at least three different plans. Repeats of one
plan count once, with their median.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.accuracy.rows import PublishedRun
from meshwright.specs.memory_budget import LEAST_PROBABILITY, LIKELY

Floats = NDArray[np.float64]

MIN_PLANS = 3
"""Least number of different plans in a ranked group."""
TAIL_QUANTILE = 0.9
INTERVAL_SHARE = 0.8
"""Share of measurements that an interval is meant to hold."""
SAME_RATE = 1e-9
"""Relative difference below which two predicted rates count as equal."""


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Estimates of the cost model for a sequence of runs, one element per run.

    Rates in tokens/s per device with the ends of their 80 % interval; memory in bytes per device of the
    fullest pipeline stage; `fit_probability` that this is within the device's. NaN where a run could not be costed.
    """

    tokens_per_s_per_device: Floats
    low: Floats
    high: Floats
    memory_allocated_bytes: Floats
    memory_reserved_bytes: Floats
    fit_probability: Floats

    def __post_init__(self) -> None:
        sizes = {len(getattr(self, f.name)) for f in fields(self)}
        if len(sizes) > 1:
            raise ValueError(f"arrays of different lengths: {sorted(sizes)}")

    @classmethod
    def none(cls) -> Predictions:
        """Predictions of an empty sequence."""
        return cls(**{f.name: np.empty(0) for f in fields(cls)})

    def __len__(self) -> int:
        return len(self.tokens_per_s_per_device)

    @property
    def fits(self) -> NDArray[np.bool_]:
        """True where the estimate of memory is within the device's."""
        return self.fit_probability >= LIKELY

    @property
    def refused(self) -> NDArray[np.bool_]:
        """True where the verdict is that a run does not fit."""
        return self.fit_probability < LEAST_PROBABILITY

    def take(self, index: NDArray[np.intp]) -> Predictions:
        """The runs at `index`."""
        return Predictions(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Errors over one group of rows. Ratios, not percent; NaN where no row has the values."""

    num_rows: int  # rows of the group, predicted or not
    num_predicted: int
    median_abs_error: float
    p90_abs_error: float
    bias: float
    interval_coverage: float
    interval_score: float
    constant_interval_score: float
    num_memory: int
    memory_median_abs_error: float
    num_plan_groups: int
    top1_regret_mean: float
    top1_regret_max: float
    kendall_tau_mean: float
    spearman_mean: float

    def as_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def signed_error(predicted: Floats, measured: Floats) -> Floats:
    """p / m - 1, element by element."""
    return predicted / measured - 1


def measure(runs: Sequence[PublishedRun], predictions: Predictions, *, num_rows: int) -> Metrics:
    """All metrics of `runs`, which have conditions; `num_rows` also counts rows without."""
    measured = measured_rates(runs)
    rated = np.isfinite(measured) & np.isfinite(predictions.tokens_per_s_per_device)
    p = predictions.take(np.flatnonzero(rated))
    error = signed_error(p.tokens_per_s_per_device, measured[rated])
    inside = (p.low <= measured[rated]) & (measured[rated] <= p.high)
    memory = memory_errors(runs, predictions)
    headline_memory = memory.get("allocated", np.concatenate([*memory.values(), np.empty(0)]))
    ranked = rank_plans(runs, predictions)
    return Metrics(
        num_rows=num_rows,
        num_predicted=int(rated.sum()),
        median_abs_error=_median(np.abs(error)),
        p90_abs_error=float(np.quantile(np.abs(error), TAIL_QUANTILE)) if len(error) else float("nan"),
        bias=_median(error),
        interval_coverage=float(inside.mean()) if len(inside) else float("nan"),
        interval_score=_mean(interval_scores(np.log(measured[rated]), np.log(p.low), np.log(p.high)).tolist()),
        constant_interval_score=constant_interval_score(np.log(p.tokens_per_s_per_device / measured[rated])),
        num_memory=len(headline_memory),
        memory_median_abs_error=_median(np.abs(headline_memory)),
        num_plan_groups=len(ranked),
        top1_regret_mean=_mean([r.regret for r in ranked]),
        top1_regret_max=max((r.regret for r in ranked), default=float("nan")),
        kendall_tau_mean=_mean([r.kendall_tau for r in ranked]),
        spearman_mean=_mean([r.spearman for r in ranked]),
    )


def measured_rates(runs: Sequence[PublishedRun]) -> Floats:
    """Measured tokens/s per device, NaN where the row gives none."""
    return np.array([run.tokens_per_s_per_device or np.nan for run in runs], dtype=float)


# --- intervals ---


def interval_scores(measured: Floats, low: Floats, high: Floats) -> Floats:
    """Width of each interval, and what lies outside of it times 2 / (1 - 0.8). Smaller is better.

    Gneiting and Raftery 2007, "Strictly proper scoring rules, prediction, and estimation", section 6.2.
    """
    outside = np.maximum(low - measured, 0.0) + np.maximum(measured - high, 0.0)
    return high - low + 2 / (1 - INTERVAL_SHARE) * outside


def constant_interval_score(log_error: Floats) -> float:
    """Mean score of intervals of one width around every prediction, the best such width: that which holds 80 %."""
    if not len(log_error):
        return float("nan")
    half_width = float(np.quantile(np.abs(log_error), INTERVAL_SHARE))
    ends = np.full(len(log_error), half_width)
    return float(interval_scores(log_error, -ends, ends).mean())


# --- memory ---


def memory_errors(runs: Sequence[PublishedRun], predictions: Predictions) -> dict[str, Floats]:
    """Signed memory errors by the definition of memory in the source.

    Sources that state neither allocated nor reserved memory are a group of their own, compared with allocated memory.
    """
    measured = np.array([run.memory_bytes or np.nan for run in runs], dtype=float)
    definition = np.array([run.memory_definition for run in runs])
    errors = {}
    for name in ("allocated", "reserved", "unknown"):
        predicted = predictions.memory_reserved_bytes if name == "reserved" else predictions.memory_allocated_bytes
        rows = (definition == name) & np.isfinite(measured) & np.isfinite(predicted)
        if rows.any():
            errors[name] = signed_error(predicted[rows], measured[rows])
    return errors


# --- ranking ---


@dataclass(frozen=True, kw_only=True)
class RankedGroup:
    """Ranking quality of one group of plans. Correlations are NaN where either side is constant."""

    key: tuple[Any, ...]
    num_plans: int
    regret: float
    kendall_tau: float
    spearman: float


def rank_plans(runs: Sequence[PublishedRun], predictions: Predictions) -> list[RankedGroup]:
    """One entry per group of plans (see the module) among `runs`."""
    rates: dict[tuple[Any, ...], dict[Any, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    measured = measured_rates(runs)
    for run, p, m in zip(runs, predictions.tokens_per_s_per_device, measured, strict=True):
        if run.conditions is not None and np.isfinite(p) and np.isfinite(m):
            rates[plan_group(run)][_choice(run)].append((float(p), float(m)))
    groups = []
    for key, plans in rates.items():
        if len(plans) >= MIN_PLANS:
            pairs = np.array([np.median(repeats, axis=0) for repeats in plans.values()])
            groups.append(_ranked(key, pairs[:, 0], pairs[:, 1]))
    return groups


def plan_group(run: PublishedRun) -> tuple[Any, ...]:
    """Key of a run's group: everything that decides its rate except the plan."""
    c = run.conditions
    assert c is not None
    return (
        run.source_key, run.task, c.model.name, c.model.num_layers, c.model.attention.num_heads,
        c.accelerator.name, c.num_devices, c.global_batch, c.seq_len, c.precision,
        c.stack.framework, c.stack.vintage,
    )  # fmt: skip


def _choice(run: PublishedRun) -> tuple[Any, ...]:
    """Key of a run inside its group: the plan, and the kernels that a row names."""
    assert run.conditions is not None
    return (run.conditions.plan, run.conditions.stack.features, run.conditions.fused_norm)


def _ranked(key: tuple[Any, ...], predicted: Floats, measured: Floats) -> RankedGroup:
    return RankedGroup(
        key=key,
        num_plans=len(predicted),
        regret=top1_regret(predicted, measured),
        kendall_tau=kendall_tau(predicted, measured),
        spearman=spearman(predicted, measured),
    )


def top1_regret(predicted: Floats, measured: Floats) -> float:
    """Share of the best measured rate that is lost by running the plan predicted fastest.

    Plans predicted equally fast count with the mean of their measured rates.
    """
    chosen = predicted >= predicted.max() * (1 - SAME_RATE)
    return float(1 - measured[chosen].mean() / measured.max())


def kendall_tau(x: Floats, y: Floats) -> float:
    """Kendall's τ_b of two samples; NaN when either is constant. O(n²).

    >>> kendall_tau(np.array([1.0, 2, 3]), np.array([1.0, 3, 2]))
    0.3333333333333333
    """
    i, j = np.triu_indices(len(x), k=1)
    dx, dy = np.sign(x[i] - x[j]), np.sign(y[i] - y[j])
    untied = np.sqrt(np.count_nonzero(dx) * np.count_nonzero(dy))
    return float((dx * dy).sum() / untied) if untied else float("nan")


def spearman(x: Floats, y: Floats) -> float:
    """Spearman's ρ: the correlation of ranks, where ties have their mean rank; NaN when either is constant."""
    a, b = _ranks(x), _ranks(y)
    a, b = a - a.mean(), b - b.mean()
    norm = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / norm) if norm else float("nan")


def _ranks(x: Floats) -> Floats:
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else float("nan")


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if np.isfinite(v)]
    return float(np.mean(finite)) if finite else float("nan")
