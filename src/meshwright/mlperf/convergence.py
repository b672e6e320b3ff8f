"""Reference convergence points, and the test that a set of runs converges no faster than they allow.

    mean     olympic mean of the reference's counts: without the smallest and the largest
    std      population standard deviation of all counts
    min_ok   mean - t(0.95, n1 + n2 - 2) * std * sqrt(1/n1 + 1/n2), n1 = counts - 2, n2 = N - 2

A set passes with an olympic mean >= min_ok. Faster than the mean, its score is multiplied by mean / olympic mean.
A batch size between two points takes their linear interpolation with n1 = 2 N; below the smallest point the smallest
one applies; above the largest nothing does. Points are pruned first: points with a batch size below the
fastest convergence, then each point above the line between its neighbours.

Source: `rcp_checker.py` of mlperf-logging 4.1.68. Counts are training samples. The steps, their order and
their rounding follow the official checker, so that verdicts at the boundary agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from meshwright.errors import InputError
from meshwright.json_values import load_json
from meshwright.mlperf.benchmarks import Benchmark
from meshwright.mlperf.formulas import is_number

ALPHA = 0.05
_TOLERANCE = 1e-4  # of the official checker's bisection, samples
FAILED = 1e9
"""Samples that stand for a run that did not converge."""

COUNT_KEYS = ("samples to converge", "Epochs to converge")
"""Keys of the counts in the official schema; both hold samples for these benchmarks."""


@dataclass(frozen=True, kw_only=True)
class ReferencePoint:
    """Convergence of the reference at one global batch size, in samples."""

    global_batch_size: int
    counts: tuple[float, ...]  # of each run, ascending; empty when interpolated
    mean: float
    std: float
    min_ok: float
    interpolated: bool = False


@dataclass(frozen=True, kw_only=True)
class ConvergenceTest:
    """Verdict over one set of runs."""

    passes: bool
    message: str
    submission_mean: float | None = None  # olympic mean of the samples to convergence
    point: ReferencePoint | None = None  # that the set was compared with
    min_ok: float | None = None
    scaling: float = 1.0  # factor of the score


def olympic_mean(values: Sequence[float]) -> float:
    """Mean without the smallest and the largest; needs three values.

    >>> olympic_mean([3.0, 1.0, 2.0])
    2.0
    """
    return float(np.mean(sorted(values)[1:-1]))


def reference_points(benchmark: Benchmark) -> tuple[ReferencePoint, ...]:
    """All points of a benchmark by batch size; raises InputError if it has none or the file is damaged."""
    if benchmark.rcp is None:
        raise InputError(
            f"{benchmark.name} has no reference convergence points in round {benchmark.round}",
            hint="make them from 2 N runs of the reference with `meshwright mlperf rcp`",
        )
    return read_points(benchmark.rcp, runs=benchmark.runs)


def read_points(path: Path, *, runs: int) -> tuple[ReferencePoint, ...]:
    """Points of a file in the official schema. `runs` is N of the benchmark."""
    try:
        document = load_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: reference convergence points cannot be read: {error}") from error
    return points_of(document, path=path, runs=runs)


def points_of(document: Any, *, path: Path, runs: int) -> tuple[ReferencePoint, ...]:
    """Points of a document in the official schema; `path` names it in errors."""
    if not isinstance(document, dict) or not document:
        raise InputError(f"{path}: reference convergence points are an object with one entry for each batch size")
    points = [_point(path, name, row, runs) for name, row in document.items()]
    return tuple(sorted(points, key=lambda p: p.global_batch_size))


def pruned(points: Sequence[ReferencePoint], *, runs: int) -> tuple[ReferencePoint, ...]:
    """Points that the official checker compares with."""
    fastest = min(points, key=lambda p: p.mean)
    kept = [p for p in points if p.global_batch_size >= fastest.global_batch_size]
    i = 1
    while i < len(kept) - 1:
        between = interpolated(kept[i - 1], kept[i + 1], kept[i].global_batch_size, runs=runs)
        if kept[i].mean > between.mean:
            del kept[i]
        else:
            i += 1
    return tuple(kept)


def interpolated(low: ReferencePoint, high: ReferencePoint, batch: int, *, runs: int) -> ReferencePoint:
    """Point between two others, linear in the batch size."""
    at = [low.global_batch_size, high.global_batch_size]
    mean = float(np.interp(batch, at, [low.mean, high.mean]))
    std = float(np.interp(batch, at, [low.std, high.std]))
    least = least_mean(mean, std, num_reference=2 * runs, num_submission=runs - 2)
    return ReferencePoint(global_batch_size=batch, counts=(), mean=mean, std=std, min_ok=least, interpolated=True)


def least_mean(mean: float, std: float, *, num_reference: int, num_submission: int) -> float:
    """Smallest olympic mean that the one-sided t-test accepts, bisected as the official checker does."""
    if std == 0:
        return mean
    degrees = num_reference + num_submission - 2
    boundary = mean - stdtrit(degrees, 1 - ALPHA) * std * math.sqrt(1 / num_reference + 1 / num_submission)
    low, high = 0.0, mean
    middle = (low + high) / 2
    while high - low > _TOLERANCE:
        if middle > boundary:
            high = middle
        else:
            low = middle
        middle = (low + high) / 2
    return middle


def point_for(points: Sequence[ReferencePoint], batch: int, *, runs: int) -> tuple[ReferencePoint | None, str]:
    """The point that a batch size is compared with, and its kind: found, interpolated, smallest or missing."""
    kept = pruned(points, runs=runs)
    exact = next((p for p in kept if p.global_batch_size == batch), None)
    if exact is not None:
        return exact, "found"
    below = [p for p in kept if p.global_batch_size < batch]
    above = [p for p in kept if p.global_batch_size > batch]
    if below and above:
        return interpolated(below[-1], above[0], batch, runs=runs), "interpolated"
    return (above[0], "smallest") if above else (None, "missing")


def least_accepted(benchmark: Benchmark, point: ReferencePoint) -> float:
    """Smallest accepted olympic mean, with the samples that the benchmark allows below the test (405B: one
    evaluation)."""
    speedup = point.mean / (point.min_ok - benchmark.allowed_early_samples)
    return point.mean / speedup


def convergence_test(
    benchmark: Benchmark, samples: Sequence[float | None], *, global_batch_size: int
) -> ConvergenceTest:
    """Compare the samples to convergence of each run (None: it did not converge) with the reference."""
    counts = [FAILED if s is None else s for s in samples]
    failed = sum(s is None for s in samples)
    if failed > 1:
        return ConvergenceTest(passes=False, message=f"{failed} of {len(counts)} runs did not converge; one may fail")
    if len(counts) < 3:
        return ConvergenceTest(passes=False, message=f"{len(counts)} runs have no olympic mean; three are the least")
    point, kind = point_for(reference_points(benchmark), global_batch_size, runs=benchmark.runs)
    if point is None:
        message = (
            f"no reference convergence point at or above a global batch size of {global_batch_size}: "
            f"submit {2 * benchmark.runs} runs of the reference"
        )
        return ConvergenceTest(passes=False, message=message)
    mean = olympic_mean(counts)
    least = least_accepted(benchmark, point)
    passes = mean >= least
    where = {
        "found": f"reference at batch size {point.global_batch_size}",
        "interpolated": f"reference interpolated to batch size {global_batch_size}",
        "smallest": f"smallest reference, batch size {point.global_batch_size}",
    }[kind]
    verdict = "within" if passes else "faster than allowed by"
    limits = f"mean {point.mean:,.1f}, least {least:,.1f}"
    return ConvergenceTest(
        passes=passes,
        message=f"olympic mean of {mean:,.1f} samples is {verdict} the {where}: {limits}",
        submission_mean=mean,
        point=point,
        min_ok=least,
        scaling=max(1.0, point.mean / mean) if passes else 1.0,
    )


def _point(path: Path, name: str, row: Any, runs: int) -> ReferencePoint:
    counts = next((row[k] for k in COUNT_KEYS if k in row), None) if isinstance(row, dict) else None
    batch = row.get("BS") if isinstance(row, dict) else None
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise InputError(f"{path}: {name}: BS is the global batch size", got=batch)
    if not isinstance(counts, list) or len(counts) < 3 or not all(is_number(c) and c > 0 for c in counts):
        raise InputError(f"{path}: {name}: {' or '.join(COUNT_KEYS)} lists three or more positive counts", got=counts)
    mean, std = olympic_mean(counts), float(np.std(counts))
    least = least_mean(mean, std, num_reference=len(counts) - 2, num_submission=max(runs - 2, 1))
    return ReferencePoint(global_batch_size=batch, counts=tuple(sorted(counts)), mean=mean, std=std, min_ok=least)
