"""Statistics of prediction errors and of the spread of measured points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEAST_SD, MOST_SD = 0.02, 1.0
"""Bounds of a parameter's standard deviation, of its logarithm."""
MAD_TO_SD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
TAIL_QUANTILE = 0.9


@dataclass(frozen=True, kw_only=True)
class Errors:
    """|predicted / measured - 1| of points that the correction did not see, and of the cost model without it."""

    num_points: int
    median: float
    p90: float
    formula_median: float
    formula_p90: float


def errors_of(corrected: Any, formula: Any) -> Errors:
    """Errors from logarithms of predicted over measured seconds."""
    with_correction, without = (np.abs(np.expm1(logs)) for logs in (corrected, formula))
    return Errors(
        num_points=len(corrected),
        median=float(np.median(with_correction)),
        p90=float(np.quantile(with_correction, TAIL_QUANTILE)),
        formula_median=float(np.median(without)),
        formula_p90=float(np.quantile(without, TAIL_QUANTILE)),
    )


def sd_of(logs: Sequence[Any]) -> float:
    """Robust standard deviation of all `logs` together, between LEAST_SD and MOST_SD."""
    values = np.concatenate(list(logs))
    return clipped_sd(float(np.median(np.abs(values - np.median(values)))) * MAD_TO_SD)


def clipped_sd(sd: float) -> float:
    """`sd`, at least LEAST_SD and at most MOST_SD."""
    return min(max(sd, LEAST_SD), MOST_SD)
