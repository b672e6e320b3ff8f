"""Probability that a set of N runs passes the reference-convergence test, from the first k of them.

Model. A run reaches the target after L samples and is seen at the next evaluation. L of the reference is normal; its
mean and deviation come from the reference point, whose counts are rounded up to evaluations (Sheppard: mean less half
an interval, variance less interval^2 / 12). L of the submission has the same deviation, as the test assumes, and a mean
that differs by d, normal around 0 with the reference's own deviation. The k runs seen narrow d (likelihood of the
intervals that L fell into); then the remaining runs are drawn. A run fails to converge with a probability drawn from
Beta(0.1 + failed, 19.9 + converged).

A set of N passes if at most one run failed and its olympic mean is at least the smallest accepted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy.special import ndtr

from meshwright.mlperf.benchmarks import Benchmark
from meshwright.mlperf.convergence import FAILED, ReferencePoint, least_accepted, point_for, reference_points

_DRAWS = 4_000
_FAILURES = (0.1, 19.9)  # Beta prior of a run's failure: 0.5 %, worth 20 runs
_SHIFTS = np.linspace(-5.0, 5.0, 401)  # in deviations of the reference


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """Probability that a set of N passes, after k runs of it."""

    num_seen: int
    num_runs: int  # N
    probability: float  # that the set passes the test
    expected_scaling: float | None  # mean factor of the score over the sets that pass
    min_ok: float | None
    problem: str = ""


def prospect(benchmark: Benchmark, samples: Sequence[float | None], *, global_batch_size: int) -> Prospect:
    """Probability that a set passes. `samples` are those to convergence of the runs so far; None: it failed."""
    seen = list(samples[: benchmark.runs])
    point, _ = point_for(reference_points(benchmark), global_batch_size, runs=benchmark.runs)
    failed = sum(s is None for s in seen)
    problem = ""
    if point is None:
        problem = f"no reference convergence point at or above a global batch size of {global_batch_size}"
    elif failed > 1:
        problem = f"{failed} runs did not converge; one may fail"
    if point is None or problem:
        return Prospect(
            num_seen=len(seen), num_runs=benchmark.runs, probability=0.0, expected_scaling=None, min_ok=None,
            problem=problem,
        )  # fmt: skip
    least = least_accepted(benchmark, point)
    sets = _drawn_sets(benchmark, point, seen, global_batch_size)
    means = np.mean(np.sort(sets, axis=1)[:, 1:-1], axis=1)
    passes = (means >= least) & (np.sum(sets == FAILED, axis=1) <= 1)
    scaling = np.maximum(1.0, point.mean / means[passes])
    return Prospect(
        num_seen=len(seen),
        num_runs=benchmark.runs,
        probability=float(np.mean(passes)),
        expected_scaling=float(np.mean(scaling)) if passes.any() else None,
        min_ok=least,
    )


def _drawn_sets(benchmark: Benchmark, point: ReferencePoint, seen: Sequence[float | None], batch: int) -> np.ndarray:
    """`_DRAWS` sets of N counts, the seen runs first."""
    rng = np.random.default_rng(14)
    interval, first = benchmark.interval(batch), benchmark.first_evaluation(batch)
    counts = np.array([s for s in seen if s is not None], dtype=float)
    offset = float(np.median(counts % interval)) if len(counts) else 0.0
    grid = offset - interval if offset > interval / 2 else offset  # how far the logged counts stand from the cadence
    deviation = sqrt(max(point.std**2 - interval**2 / 12, (0.15 * interval) ** 2))
    mean = point.mean - interval / 2
    shifts = mean + _SHIFTS * deviation
    weights = np.exp(-0.5 * _SHIFTS**2)
    for count in counts - grid:
        low = -np.inf if count <= first else (count - interval - shifts) / deviation
        weights = weights * np.maximum(ndtr((count - shifts) / deviation) - ndtr(low), 1e-12)
    drawn = rng.choice(shifts, size=_DRAWS, p=weights / weights.sum())
    missing = benchmark.runs - len(seen)
    reached = rng.normal(drawn[:, None], deviation, size=(_DRAWS, missing))
    logged = np.maximum(np.ceil(reached / interval) * interval, first) + grid
    num_failed = len(seen) - len(counts)
    chance = rng.beta(_FAILURES[0] + num_failed, _FAILURES[1] + len(counts), size=(_DRAWS, 1))
    logged[rng.random((_DRAWS, missing)) < chance] = FAILED
    known = np.tile([FAILED if s is None else s for s in seen], (_DRAWS, 1)).reshape(_DRAWS, len(seen))
    return np.concatenate([known, logged], axis=1)
