"""Robust maximum a posteriori fit of the calibration to published runs, by Gauss-Newton.

    minimise  Σ_rows rho((log predicted - log measured) / s_row)  +  Σ_offsets (offset / prior sd)^2

rho is Cauchy's loss c^2 log(1 + (r/c)^2), which gives little weight to rows that no physics explains (a sweep in which
every tenth run stalls for a second per micro-batch). s_row is the noise of the row by its quality, plus the error of
the model itself (Kennedy and O'Hagan 2001, "Bayesian calibration of computer models", section 4). Rows of one source
have common errors, so a source never counts as more than `EFFECTIVE_ROWS`. The Jacobian needs one evaluation of the
cost model per parameter, not per offset: the derivative of a row by an offset is its derivative by the parameter that
the offset moves. `python -m meshwright.fitting.ship` writes the shipped result.

Every fit starts at the prior, or where the source that is left out has not been seen either, and ends when a step gains
less than a tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.accuracy.predict import log_step_of
from meshwright.accuracy.rows import PublishedRun
from meshwright.accuracy.tables import RunTables, tables_of
from meshwright.calibration.parameters import ALL, Calibration, Factors, Offset, prior
from meshwright.cost.uncertainty import BF16_GEMM, Etas, derivatives
from meshwright.specs.model import BaseFormat
from meshwright.specs.model_parts import uncalibrated

NOISE = {"A": 0.05, "B": 0.10}
"""Standard deviation of log rate by quality letter: the data's own noise floor is about 6 % between releases."""
MODEL_ERROR = 0.08
"""Standard deviation of log step time that is the model's own. Profiling simulators of training steps err by 5 to 15 %
in the mean (vTrain, arXiv 2312.12391: 8.4 % on one node, 14.7 % on many). Without this term the parameters
would absorb the model's own error."""
EFFECTIVE_ROWS = 25
"""A source with more rows than this counts as this many, because its rows have common errors."""
MAX_ROWS = 100
"""Rows read of a source at most, evenly spaced: three times the rows would weigh no more."""
START_GROUPS = 6
"""Groups of sources. The fit without one source starts at the fit without its whole group, which saw none of it."""
CAUCHY = 2.0
WIDE_CAUCHY = 3.0
"""Scale of the loss in the first phase: at a distant start, good rows are then no outliers."""
MAX_ITERATIONS = 200
TOLERANCE = 1e-3
"""The fit ends with a step that lowers the objective by less. The objective is -2 log(posterior density): this is a
thirtieth of a posterior standard deviation of one parameter, so further steps change nothing."""
MEDIAN_OF_NORMAL = 0.6745
"""Median absolute deviation of a normal distribution, in standard deviations."""


@dataclass(frozen=True, kw_only=True)
class FitProblem:
    """Rows to fit, and the map from offsets to the parameters of the rows that they move."""

    tables: RunTables
    log_measured: NDArray[np.float64]  # log seconds per step
    noise: NDArray[np.float64]  # standard deviation of log measured - log predicted
    share: NDArray[np.float64]  # weight of a row: below 1 in sources with many rows
    source: NDArray[np.str_]
    is_moe: NDArray[np.bool_]
    is_sweep: NDArray[np.bool_]
    keys: list[tuple[str, str, str]]  # (parameter, level, key) of every offset
    prior_sd: NDArray[np.float64]
    columns: dict[str, NDArray[np.intp]]  # parameter that is fitted -> (rows, levels) indices of offsets
    bf16_columns: NDArray[np.intp]  # of gemm_ratio of 16-bit GEMMs
    prior_etas: Etas
    prior_bf16_eta: NDArray[np.float64]


def make_problem(runs: Sequence[PublishedRun], calibration: Calibration) -> FitProblem:
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

    by_parameter = {name: columns(name, tables.factors) for name, p in calibration.parameters.items() if p.sd}
    bf16 = columns("gemm_ratio", tables.bf16_factors)
    tokens = tables.batch.global_batch * tables.batch.seq_len / tables.plan.num_devices
    rates = np.array([r.tokens_per_s_per_device for r in runs], dtype=float)
    sources = [r.source_key for r in runs]
    counts = {s: sources.count(s) for s in set(sources)}
    return FitProblem(
        tables=tables,
        log_measured=np.log(tokens / rates),
        noise=np.hypot([NOISE.get(r.quality_letter, NOISE["B"]) for r in runs], MODEL_ERROR),
        share=np.array([min(1.0, EFFECTIVE_ROWS / counts[s]) for s in sources]),
        source=np.array([r.source_key for r in runs]),
        is_moe=np.asarray(tables.model.num_moe_layers) > 0,
        is_sweep=np.array([r.is_sweep for r in runs]),
        keys=list(index),
        prior_sd=np.array(sds),
        columns=by_parameter,
        bf16_columns=bf16,
        prior_etas=calibration.etas(tables.factors),
        prior_bf16_eta=calibration.etas(tables.bf16_factors)["gemm_ratio"],
    )


def etas_at(problem: FitProblem, calibration: Calibration, beta: NDArray[np.float64]) -> tuple[Etas, Etas]:
    """Transformed parameters of every row, and of 16-bit GEMMs, with offsets `beta`."""
    moved = {name: problem.prior_etas[name] + beta[columns].sum(axis=1) for name, columns in problem.columns.items()}
    return {**problem.prior_etas, **moved}, {
        "gemm_ratio": problem.prior_bf16_eta + beta[problem.bf16_columns].sum(axis=1)
    }


def jacobian_of(problem: FitProblem, slopes: dict[str, NDArray[np.float64]], num_offsets: int) -> NDArray[np.float64]:
    """Derivatives of every row by every offset, from those by parameters (`slopes`)."""
    rows = np.arange(len(problem.log_measured))
    J = np.zeros((len(rows), num_offsets))
    pairs = [(problem.columns[name], slopes[name]) for name in problem.columns]
    for columns, slope in [*pairs, (problem.bf16_columns, slopes[BF16_GEMM])]:
        for level in range(columns.shape[1]):
            np.add.at(J, (rows, columns[:, level]), slope)
    return J


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Offsets and their conditional posterior standard deviations."""

    beta: NDArray[np.float64]
    sd: NDArray[np.float64]
    num_rows: NDArray[np.intp]
    residual: NDArray[np.float64]


def solve(problem: FitProblem, calibration: Calibration, *, use: NDArray[np.bool_]) -> Solution:
    """The posterior mode of the rows where `use` is true, from the prior, first with the wider loss."""
    wide = _descend(problem, calibration, use=use, start=np.zeros(len(problem.keys)), cauchy=WIDE_CAUCHY, tolerance=1.0)
    return _descend(problem, calibration, use=use, start=wide.beta, cauchy=CAUCHY, tolerance=TOLERANCE)


def _descend(
    problem: FitProblem,
    calibration: Calibration,
    *,
    use: NDArray[np.bool_],
    start: NDArray[np.float64],
    cauchy: float,
    tolerance: float,
) -> Solution:
    """Minimize by Gauss-Newton with Levenberg's damping until a step gains less than `tolerance`."""
    precision = 1 / problem.prior_sd**2
    log_step = log_step_of(problem.tables, calibration)

    def at(beta: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
        residual = log_step(*etas_at(problem, calibration, beta)) - problem.log_measured
        return residual, _score(residual, problem, use, cauchy) + float((beta**2 * precision).sum())

    def jacobian(beta: NDArray[np.float64]) -> NDArray[np.float64]:
        etas = etas_at(problem, calibration, beta)
        return jacobian_of(problem, derivatives(log_step, *etas, names=problem.columns), len(beta))

    def normal(J: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        weights = weights_of(residual, problem, use, cauchy)
        return (J.T * weights) @ J + np.diag(precision), J.T @ (weights * residual) + precision * beta

    beta = start
    residual, score = at(beta)
    J, fresh, damping = jacobian(beta), True, 2.5e-4
    for _ in range(MAX_ITERATIONS):
        H, gradient = normal(J)
        candidate = beta - np.linalg.solve(H + damping * np.diag(np.diag(H)), gradient)
        new_residual, new_score = at(candidate)
        if not np.isfinite(new_score) or new_score > score * (1 + 1e-9):
            if fresh:
                damping *= 8
            else:
                J, fresh = jacobian(beta), True
            continue
        gain = score - new_score
        beta, residual, score, damping = candidate, new_residual, new_score, max(damping / 4, 1e-4)
        if fresh and gain < tolerance:
            break
        # A Jacobian serves two steps: it changes slowly, and costs thirty evaluations of the model.
        fresh = not fresh or gain < tolerance
        J = jacobian(beta) if fresh else J
    else:
        raise RuntimeError(f"the fit has not converged after {MAX_ITERATIONS} steps")
    curvature = (J**2 * weights_of(residual, problem, use, cauchy)[:, None]).sum(axis=0) + precision
    touched = ((np.abs(J) > 1e-4) & use[:, None]).sum(axis=0)
    return Solution(beta=beta, sd=1 / np.sqrt(curvature), num_rows=touched, residual=residual)


def weights_of(
    residual: NDArray[np.float64], problem: FitProblem, use: NDArray[np.bool_], cauchy: float
) -> NDArray[np.float64]:
    """Weights of the rows in a step: Cauchy's, by noise, without rows that are not in `use`."""
    scaled = residual / (cauchy * problem.noise)
    return use * problem.share / (1 + scaled**2) / problem.noise**2


def _score(residual: NDArray[np.float64], problem: FitProblem, use: NDArray[np.bool_], cauchy: float) -> float:
    scaled = residual / (cauchy * problem.noise)
    return float((use * problem.share * cauchy**2 * np.log1p(scaled**2)).sum())


def as_calibration(problem: FitProblem, solution: Solution, *, use: NDArray[np.bool_], made: str) -> Calibration:
    """The solution as offsets of the prior. Offsets without rows are not in it."""
    offsets = {
        key: Offset(value=float(solution.beta[i]), sd=float(solution.sd[i]), num_rows=int(solution.num_rows[i]))
        for i, key in enumerate(problem.keys)
        if solution.num_rows[i] > 0
    }

    def residual_sd(kind: NDArray[np.bool_]) -> float:
        chosen = use & kind & ~problem.is_sweep
        return float(np.median(np.abs(solution.residual[chosen if chosen.any() else use]))) / MEDIAN_OF_NORMAL

    sds = {"dense": residual_sd(~problem.is_moe), "moe": residual_sd(problem.is_moe)}
    return replace(prior(), offsets=offsets, residual_sd=sds, made=made)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A calibration with the problem that it solves."""

    problem: FitProblem
    solution: Solution
    sources: tuple[str, ...]  # of every row of the problem
    calibration: Calibration
    starts: dict[int, Solution] = field(default_factory=dict, compare=False)
    """Fits without a group of sources, by group; made when they are first needed."""


def fit(runs: Sequence[PublishedRun], *, made: str) -> Fitted:
    """The calibration of all `runs`, each with conditions and a rate."""
    runs = thinned([run for run in runs if informs(run)])
    problem = make_problem(runs, prior())
    everything = np.ones(len(runs), dtype=bool)
    solution = solve(problem, prior(), use=everything)
    return Fitted(
        problem=problem,
        solution=solution,
        sources=tuple(r.source_key for r in runs),
        calibration=as_calibration(problem, solution, use=everything, made=made),
    )


def informs(run: PublishedRun) -> bool:
    """Return True if the calibration may learn from `run`: the whole of its model is costed from known kernels.

    A fit would put the other models' missing effects on parameters that all models share. A quantised base is one of
    them: each program makes its matrices whole by kernels of its own. So are rows of quality C, whose conditions are
    in doubt or not those that the model has (GPUs that send through their hosts' memory, say).
    """
    c = run.conditions
    return (
        c is not None
        and run.quality_letter != "C"
        and not uncalibrated(c.model)
        and (c.lora is None or c.lora.base_format is BaseFormat.FULL)
    )


def thinned(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """At most `MAX_ROWS` evenly spaced rows of each source, in order."""
    members: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        members.setdefault(run.source_key, []).append(i)
    kept = set()
    for rows in members.values():
        spaced = np.linspace(0, len(rows) - 1, min(len(rows), MAX_ROWS)).round().astype(int)
        kept |= {rows[i] for i in spaced}
    return [run for i, run in enumerate(runs) if i in kept]


def without(fitted: Fitted, source: str) -> Calibration:
    """The calibration of all rows but the rows of `source`."""
    names = sorted(set(fitted.sources))
    if source not in names:
        return fitted.calibration
    start = _start_without(fitted, names.index(source) % START_GROUPS)
    use = np.array([s != source for s in fitted.sources])
    solution = _descend(fitted.problem, prior(), use=use, start=start.beta, cauchy=CAUCHY, tolerance=TOLERANCE)
    return as_calibration(fitted.problem, solution, use=use, made=f"without {source}")


def _start_without(fitted: Fitted, group: int) -> Solution:
    if group not in fitted.starts:
        unseen = sorted(set(fitted.sources))[group::START_GROUPS]
        use = np.array([s not in unseen for s in fitted.sources])
        fitted.starts[group] = solve(fitted.problem, prior(), use=use)
    return fitted.starts[group]
