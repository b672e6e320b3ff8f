"""Uncertainty of a step time: the spread of calibrated parameters carried through to log seconds.

    sd^2 = scale^2 ( added^2 + residual_sd^2 + Σ_parameters (d log T / d parameter)^2 sd_parameter^2 )

An 80 % interval is T exp(± 1.2816 sd). `calibration.parameters` gives the parameters and their standard
deviations, in transformed units. `residual_sd` is the error that the fit leaves unexplained. `added` is a
floor by kind of model, and what mixtures of experts have besides when switches of their software are not
stated. It and `scale` make intervals hold 80 % of the sources that a calibration had not seen, with the least
interval score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.calibration.parameters import Calibration, Factors
from meshwright.cost.tables import ModelTable

Z80 = 1.2815515655446004
DERIVATIVE_STEP = 0.02
BF16_GEMM = "bf16_gemm_ratio"
"""`gemm_ratio` of 16-bit GEMMs: the same parameter for another number format."""

Etas = Mapping[str, NDArray[np.float64]]
LogStep = Callable[[Etas, Etas], NDArray[np.float64]]
"""Log seconds per step of every row, from transformed parameters and the parameters of 16-bit GEMMs: one
value a row, or m x rows."""


def derivatives(
    log_step: LogStep, etas: Etas, bf16: Etas, *, names: Iterable[str] | None = None
) -> dict[str, NDArray[np.float64]]:
    """d log(step) / d parameter of every row, by moving one parameter at a time. `names`: by default all.

    `log_step` is called once, with m x rows in place of the rows of each parameter that moves.
    """
    moving = list(etas if names is None else names)

    def moved(eta: NDArray[np.float64], at: int) -> NDArray[np.float64]:
        rows = np.repeat(eta[None], len(moving) + 2, axis=0)
        rows[at] += DERIVATIVE_STEP
        return rows

    tried = {**etas, **{name: moved(etas[name], at) for at, name in enumerate(moving, start=1)}}
    logs = log_step(tried, {**bf16, "gemm_ratio": moved(bf16["gemm_ratio"], -1)})
    return dict(zip([*moving, BF16_GEMM], (logs[1:] - logs[0]) / DERIVATIVE_STEP, strict=True))


def has_novel_layers(model: ModelTable) -> NDArray[np.bool_]:
    """True for models with layers that few published runs have: state space, linear or sparse attention."""
    others = (model.state_space_share, model.linear_share, model.index_heads, np.asarray(model.streams) - 1)
    return np.any(np.broadcast_arrays(*(np.asarray(part) > 0 for part in others)), axis=0)


def log_variances(
    slopes: Mapping[str, NDArray[np.float64]],
    calibration: Calibration,
    factors: Sequence[Factors],
    *,
    is_moe: NDArray[np.bool_],
    is_novel: NDArray[np.bool_] | bool = False,
    unstated: float | NDArray[np.float64] = 0.0,
) -> dict[str, NDArray[np.float64]]:
    """Variance of log step time by where it comes from: each parameter, and "unexplained".

    unstated: share of the switches of mixtures of experts that is not stated; 0 for a ratio of two plans of one stack.
    """
    sds = [calibration.sds(f) for f in factors]
    residual = calibration.residual_sd
    unexplained = np.where(is_moe, residual.get("moe", 0.15), residual.get("dense", 0.10))
    parts = {"unexplained": unexplained**2 + calibration.added_variance(is_moe, unstated, is_novel=is_novel)}
    for name, slope in slopes.items():
        sd = np.array([s["gemm_ratio" if name == BF16_GEMM else name] for s in sds])
        parts[name] = (slope * sd) ** 2
    novel = np.broadcast_to(is_novel, np.shape(is_moe))
    classes = [
        calibration.case_class(f, is_moe=bool(m), is_novel=bool(n))
        for f, m, n in zip(factors, is_moe, novel, strict=True)
    ]
    scale = calibration.interval_scale * np.array([calibration.interval_factors.get(c, 1.0) for c in classes])
    # what published sources say of a case narrows no noise of a measurement made elsewhere
    at_least_1, noisy = np.maximum(scale, 1.0), calibration.measured_parameters
    return {name: part * (at_least_1 if name in noisy else scale) ** 2 for name, part in parts.items()}


def spread(variances: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """The factor between a value and either end of its 80 % interval."""
    return np.exp(Z80 * np.sqrt(sum(variances.values())))
