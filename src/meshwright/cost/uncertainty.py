"""Uncertainty of a step time: the spread of calibrated parameters carried through to log seconds.

    sd^2 = stranger_sd^2 + residual_sd^2 + Σ_parameters (d log T / d parameter)^2 sd_parameter^2

An 80 % interval is T exp(± 1.2816 sd). `calibration.parameters` gives the parameters and their standard
deviations, in transformed units. `residual_sd` is the error that the fit leaves unexplained. `stranger_sd` is what
predictions for a source that came after the code err by besides (`fitting.blind`): with it, 80 % intervals hold 80 % of
such runs. Both are of a kind of model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Array
from meshwright.calibration.parameters import Calibration, Factors
from meshwright.cost.tables import ModelTable

Z80 = 1.2815515655446004
DERIVATIVE_STEP = 0.02
POWER_LIMIT = "power_limit"
"""The variance that the clock under a stated power limit gives, as if the whole step followed it."""
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


def kinds_of(model: ModelTable) -> NDArray[np.str_]:
    """Kind of each model, by which its intervals have a width: "dense", "moe" or "novel".

    A novel one has layers that few published runs have: state space, linear or sparse attention, several streams.
    """
    others = (model.state_space_share, model.linear_share, model.index_heads, np.asarray(model.streams) - 1)
    is_novel = np.any(np.broadcast_arrays(*(np.asarray(part) > 0 for part in others)), axis=0)
    return np.where(is_novel, "novel", np.where(np.asarray(model.num_moe_layers) > 0, "moe", "dense"))


def log_variances(
    slopes: Mapping[str, NDArray[np.float64]],
    calibration: Calibration,
    factors: Sequence[Factors],
    *,
    kinds: NDArray[np.str_],
    clock_width: Array = 0.0,
) -> dict[str, NDArray[np.float64]]:
    """Variance of log step time by where it comes from: each parameter, and "unexplained". `kinds`: of `kinds_of`.

    clock_width: half of the 80 % interval of the log clock under a power limit, 0 without one.
    """
    sds = [calibration.sds(f) for f in factors]
    strange = _by_kind(calibration.stranger_sd, kinds, default={"dense": 0.0, "moe": 0.0})
    parts = {"unexplained": _by_kind(calibration.residual_sd, kinds, default={"dense": 0.10, "moe": 0.15}) ** 2}
    parts["unexplained"] += strange**2
    if np.any(clock_width):
        parts[POWER_LIMIT] = np.atleast_1d(np.square(clock_width / Z80))
    for name, slope in slopes.items():
        sd = np.array([s["gemm_ratio" if name == BF16_GEMM else name] for s in sds])
        parts[name] = (slope * sd) ** 2
    return parts


def _by_kind(sd: Mapping[str, float], kinds: NDArray[np.str_], *, default: Mapping[str, float]) -> NDArray[np.float64]:
    """Standard deviation of each row; of a kind that has none, which is one of few rows, the largest."""
    known = {**default, **sd}
    return np.array([known.get(kind, max(known.values())) for kind in np.atleast_1d(kinds).tolist()])


def spread(variances: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """The factor between a value and either end of its 80 % interval."""
    return np.exp(Z80 * np.sqrt(sum(variances.values())))
