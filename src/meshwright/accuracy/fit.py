"""Fit the calibration to published runs: maximum a posteriori by Gauss-Newton, robust, with leave-one-source-out.

    minimise  Σ_rows rho((log predicted - log measured) / s_row)  +  Σ_offsets (offset / prior sd)^2

rho is Cauchy's loss c^2 log(1 + (r/c)^2), which lets go of rows that no physics explains (a sweep in which every
tenth run stalls for a second per micro-batch), s_row the noise of the row: `NOISE` of a quality-A row, more for transcribed ones, and more the
more rows one source brings, since rows of one source share their errors. The Jacobian needs one costing per
parameter, not per offset: the derivative of a row by an offset is its derivative by the parameter that the offset
moves. Run `python -m meshwright.accuracy.fit` to write catalog/data/calibration/step.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.accuracy.predict import log_step_of, predict_steps
from meshwright.accuracy.rows import PublishedRun
from meshwright.accuracy.tables import RunTables, tables_of
from meshwright.catalog.calibration import ALL, Calibration, Factors, Offset
from meshwright.cost.uncertainty import HALF_GEMM, Z80, Etas, derivatives

NOISE = {"A": 0.05, "B": 0.10, "C": 0.25}
"""Standard deviation of log rate by quality letter: the data's own noise floor is about 6 % between releases."""
EFFECTIVE_ROWS = 60
"""A source with more rows than this counts as the geometric mean of both."""
CAUCHY = 2.0
ITERATIONS = 12
SOURCE_SD = 0.08
"""Standard deviation of what all rows of one source share and no condition explains (its machines, its way of
measuring). Fitted beside the calibration and then dropped: predictions never use it."""
SOURCE = "source"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Rows to fit, and which offset moves which parameter of which row."""

    tables: RunTables
    log_measured: NDArray[np.float64]  # log seconds per step
    noise: NDArray[np.float64]
    keys: list[tuple[str, str, str]]  # (parameter, level, key) of every offset
    prior_sd: NDArray[np.float64]
    columns: dict[str, NDArray[np.intp]]  # parameter -> (rows, levels) indices of offsets
    half_columns: NDArray[np.intp]  # of gemm_ratio when multiplying in 16 bits
    source_column: NDArray[np.intp]  # of what the row's source shares
    prior_etas: Etas
    prior_half_eta: NDArray[np.float64]


def make_problem(runs: Sequence[PublishedRun], calibration: Calibration) -> Problem:
    """Tables and offsets of all runs with conditions and a rate."""
    conditions = [r.conditions for r in runs if r.conditions is not None]
    tables = tables_of(conditions)
    index: dict[tuple[str, str, str], int] = {}
    sds: list[float] = []

    def column(parameter: str, level: str, key: str, sd: float) -> int:
        known = index.setdefault((parameter, level, key), len(index))
        if known == len(sds):
            sds.append(sd)
        return known

    def columns(name: str, factors: Sequence[Factors]) -> NDArray[np.intp]:
        p = calibration.parameters[name]
        return np.array(
            [
                [column(name, ALL, ALL, p.sd)] + [column(name, lv, f[lv], sd) for lv, sd in p.levels.items()]
                for f in factors
            ]
        )

    by_parameter = {name: columns(name, tables.factors) for name in calibration.parameters}
    half = columns("gemm_ratio", tables.half_factors)
    source = np.array([column(SOURCE, SOURCE, r.source_key, SOURCE_SD) for r in runs])
    tokens = tables.batch.global_batch * tables.batch.seq_len / tables.plan.num_devices
    rates = np.array([r.tokens_per_s_per_device for r in runs], dtype=float)
    return Problem(
        tables=tables,
        log_measured=np.log(tokens / rates),
        noise=_noise(runs),
        keys=list(index),
        prior_sd=np.array(sds),
        columns=by_parameter,
        half_columns=half,
        source_column=source,
        prior_etas=calibration.etas(tables.factors),
        prior_half_eta=calibration.etas(tables.half_factors)["gemm_ratio"],
    )


def _noise(runs: Sequence[PublishedRun]) -> NDArray[np.float64]:
    sources = [r.source_key for r in runs]
    counts = {s: sources.count(s) for s in set(sources)}
    return np.array(
        [
            NOISE.get(r.quality_letter, 0.25) * max(1.0, counts[r.source_key] / EFFECTIVE_ROWS) ** 0.5
            for r in runs
        ]
    )


def _etas(problem: Problem, calibration: Calibration, beta: NDArray[np.float64]) -> tuple[Etas, Etas]:
    etas = {name: problem.prior_etas[name] + beta[columns].sum(axis=1) for name, columns in problem.columns.items()}
    return etas, {"gemm_ratio": problem.prior_half_eta + beta[problem.half_columns].sum(axis=1)}


def _jacobian(
    problem: Problem, slopes: dict[str, NDArray[np.float64]], num_offsets: int
) -> NDArray[np.float64]:
    rows = np.arange(len(problem.log_measured))
    J = np.zeros((len(rows), num_offsets))
    pairs = [(problem.columns[name], slopes[name]) for name in problem.columns]
    for columns, slope in [*pairs, (problem.half_columns, slopes[HALF_GEMM])]:
        for level in range(columns.shape[1]):
            np.add.at(J, (rows, columns[:, level]), slope)
    J[rows, problem.source_column] = 1.0
    return J


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Offsets and their conditional posterior standard deviations."""

    beta: NDArray[np.float64]
    sd: NDArray[np.float64]
    num_rows: NDArray[np.intp]
    residual: NDArray[np.float64]


def solve(
    problem: Problem,
    calibration: Calibration,
    *,
    use: NDArray[np.bool_],
    start: NDArray[np.float64] | None = None,
    iterations: int = ITERATIONS,
) -> Solution:
    """Gauss-Newton on the rows where `use` is true."""
    beta = np.zeros(len(problem.keys)) if start is None else start.copy()
    precision = 1 / problem.prior_sd**2
    best, H, J = np.inf, np.diag(precision), None
    step = np.zeros_like(beta)
    damping = 1e-3
    residual = np.zeros(len(use))
    log_step = log_step_of(problem.tables, calibration)
    for _ in range(iterations):
        etas, half = _etas(problem, calibration, beta + step)
        predicted = log_step(etas, half)
        residual_new = predicted + (beta + step)[problem.source_column] - problem.log_measured
        score = _score(residual_new, problem.noise, use) + float(((beta + step) ** 2 * precision).sum())
        if not np.isfinite(score) or score > best * (1 + 1e-9):
            damping *= 8
            step = _newton_step(H, J, beta, precision, residual, problem, use, damping)
            continue
        converged = best - score < 1e-4 * best
        beta, best, residual = beta + step, score, residual_new
        damping = max(damping / 4, 1e-4)
        slopes = derivatives(log_step, etas, half)
        J = _jacobian(problem, slopes, len(beta))
        step = _newton_step(H, J, beta, precision, residual, problem, use, damping)
        if converged:
            break
    assert J is not None
    weights = _weights(residual, problem.noise, use)
    curvature = (J**2 * weights[:, None]).sum(axis=0) + precision
    touched = ((np.abs(J) > 1e-4) & use[:, None]).sum(axis=0)
    return Solution(beta=beta, sd=1 / np.sqrt(curvature), num_rows=touched, residual=residual)


def _weights(
    residual: NDArray[np.float64], noise: NDArray[np.float64], use: NDArray[np.bool_]
) -> NDArray[np.float64]:
    return use / (1 + (residual / (CAUCHY * noise)) ** 2) / noise**2


def _score(residual: NDArray[np.float64], noise: NDArray[np.float64], use: NDArray[np.bool_]) -> float:
    return float((use * CAUCHY**2 * np.log1p((residual / (CAUCHY * noise)) ** 2)).sum())


def _newton_step(
    H: NDArray[np.float64],
    J: NDArray[np.float64] | None,
    beta: NDArray[np.float64],
    precision: NDArray[np.float64],
    residual: NDArray[np.float64],
    problem: Problem,
    use: NDArray[np.bool_],
    damping: float,
) -> NDArray[np.float64]:
    assert J is not None
    weights = _weights(residual, problem.noise, use)
    A = (J.T * weights) @ J + np.diag(precision)
    gradient = J.T @ (weights * residual) + precision * beta
    return -np.linalg.solve(A + damping * np.diag(np.diag(A)), gradient)


def as_calibration(problem: Problem, solution: Solution, base: Calibration, *, made: str) -> Calibration:
    """The solution as offsets; those that no row informs are left to the prior."""
    offsets = {
        key: Offset(
            value=float(solution.beta[i]), sd=float(solution.sd[i]), num_rows=int(solution.num_rows[i])
        )
        for i, key in enumerate(problem.keys)
        if solution.num_rows[i] > 0 and key[0] != SOURCE
    }
    return replace(base, offsets=offsets, made=made)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Every row predicted by a calibration that never saw its source."""

    log_predicted: NDArray[np.float64]
    log_sd: NDArray[np.float64]  # with interval_scale 1


def leave_one_source_out(
    problem: Problem, calibration: Calibration, sources: Sequence[str], *, start: NDArray[np.float64]
) -> LeftOut:
    """Refit without each source in turn, from the full solution, and predict that source."""
    names = np.array(sources)
    predicted, sd = np.zeros(len(names)), np.zeros(len(names))
    for source in sorted(set(sources)):
        out = names == source
        solution = solve(problem, calibration, use=~out, start=start * _informed(problem, ~out), iterations=10)
        refit = as_calibration(problem, solution, calibration, made=f"without {source}")
        held = problem.tables.take(np.flatnonzero(out))
        predicted[out], variances = predict_steps(held, refit)
        sd[out] = np.sqrt(sum(variances.values()))
    return LeftOut(log_predicted=predicted, log_sd=sd)


def _informed(problem: Problem, use: NDArray[np.bool_]) -> NDArray[np.float64]:
    """1 for offsets that a used row has, 0 for those that only the left-out source has."""
    informed = np.zeros(len(problem.keys))
    for columns in [*problem.columns.values(), problem.half_columns, problem.source_column]:
        informed[np.unique(columns[use])] = 1.0
    return informed


def interval_scale(error: NDArray[np.float64], sd: NDArray[np.float64]) -> float:
    """The factor on `sd` with which 80 % intervals hold 80 % of the errors."""
    return float(np.quantile(np.abs(error) / (Z80 * sd), 0.8))
