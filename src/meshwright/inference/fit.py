"""Fit the constants to the shipped points: `python -m meshwright.inference.fit` writes data/constants.json.

Maximum a posteriori: Gaussian priors of the unknowns, and residuals of the logarithm with soft tails, so that a wrong
row does not decide a constant. Rows of one source are not independent: a source of n rows counts as sqrt(n / 10) x 10
of them. The spread between and within sources, and the scales of the intervals, come from leave-one-source-out
predictions, never from the rows that were fitted.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.arrays import FloatArray
from meshwright.files import write_atomically
from meshwright.inference.constants import ServingCalibration
from meshwright.inference.formats import DATA
from meshwright.inference.points import PublishedPoint, read_points, shipped_points_path
from meshwright.inference.predict import FIRST_TOKEN, NORMAL_80, derivatives, interval_group, log_predictor

ROW_SD = 0.12
"""Standard deviation of a row's logarithm that the fit assumes: repeats and revisions of one page differ by 3 to 10 %,
and conditions that rows leave out (batch limits, request counts) by as much."""

ROWS_OF_A_SOURCE = 10
"""Rows of a source that count in full."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A point with the prediction of constants that have not seen its source."""

    point: PublishedPoint
    log_error: float
    log_sd: float  # of the constants


def fit(points: Sequence[PublishedPoint], start: ServingCalibration | None = None) -> ServingCalibration:
    """Fit the constants to points with conditions, from those of `start` on; no points: the priors."""
    from scipy.optimize import least_squares  # takes 0.3 s, which only a fit needs

    conditions = [p.conditions for p in points if p.conditions is not None]
    if not conditions:
        return _prior()
    columns, log_values = log_predictor(conditions)
    measured = np.log([c.measured for c in conditions])
    weight = np.sqrt(_weights([p.source for p in points]))
    sd = np.array([u.sd for u in columns])

    def residuals(x: FloatArray) -> FloatArray:
        error = (log_values(x) - measured) / ROW_SD
        soft = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))
        return np.concatenate([weight * soft, x / sd])

    begin = np.zeros(len(columns)) if start is None else start.prior_and_values(columns)[0]
    found = least_squares(residuals, begin, method="trf")
    precision = found.jac.T @ found.jac
    return ServingCalibration(
        keys=tuple(u.key for u in columns),
        values=found.x,
        covariance=np.linalg.inv(precision),
        row_sd=ROW_SD,
        source_sd=0.0,
        interval_scale=1.0,
        num_rows=len(conditions),
        sources=dict(Counter(p.source for p in points)),
    )


def _prior() -> ServingCalibration:
    empty = np.empty(0)
    return ServingCalibration(
        keys=(), values=empty, covariance=np.empty((0, 0)), row_sd=ROW_SD, source_sd=0.0, interval_scale=1.0, num_rows=0
    )


def _weights(sources: Sequence[str]) -> FloatArray:
    """Weight of each row: all rows of a source together count as sqrt(10 n), at most n."""
    count = Counter(sources)
    return np.array([min(1.0, (ROWS_OF_A_SOURCE / count[s]) ** 0.5) for s in sources])


def leave_one_source_out(
    points: Sequence[PublishedPoint], seen: Sequence[PublishedPoint] | None = None
) -> list[HeldOut]:
    """Predict each source by constants fitted to the other sources of `seen` (default: the points themselves)."""
    seen = points if seen is None else seen
    whole, found = fit(seen), []
    for source in sorted({p.source for p in points}):
        rest = [p for p in seen if p.source != source]
        part = [p for p in points if p.source == source]
        calibration = fit(rest, whole)
        conditions = [p.conditions for p in part if p.conditions is not None]
        columns, log_values = log_predictor(conditions)
        x, covariance = calibration.prior_and_values(columns)
        jacobian = derivatives(log_values, x)
        variance = np.einsum("ij,jk,ik->i", jacobian, covariance, jacobian)
        errors = log_values(x) - np.log([c.measured for c in conditions])
        found += [
            HeldOut(point=p, log_error=float(e), log_sd=float(np.sqrt(v)))
            for p, e, v in zip(part, errors, variance, strict=True)
        ]
    return found


def with_spread(calibration: ServingCalibration, held_out: Sequence[HeldOut]) -> ServingCalibration:
    """The calibration with the spread of held-out sources."""
    by_source: dict[str, list[float]] = {}
    for row in held_out:
        if _group(row) != FIRST_TOKEN:  # which holds more than the steps do
            by_source.setdefault(row.point.source, []).append(row.log_error)
    row_sd = float(np.sqrt(np.mean([np.var(errors) for errors in by_source.values()])))
    source_sd = float(np.sqrt(np.mean([np.mean(errors) ** 2 for errors in by_source.values()])))
    spread = replace(calibration, row_sd=row_sd, source_sd=source_sd)
    z: dict[str, list[float]] = {}
    for r in held_out:
        z.setdefault(_group(r), []).append(abs(r.log_error) / np.sqrt(r.log_sd**2 + row_sd**2 + source_sd**2))
    scales = {group: float(np.quantile(own, 0.8) / NORMAL_80) for group, own in sorted(z.items())}
    of_steps = [value for group, own in z.items() if group != FIRST_TOKEN for value in own]
    usual = float(np.quantile(of_steps, 0.8) / NORMAL_80) if of_steps else max(scales.values(), default=1.0)
    return replace(spread, interval_scale=usual, group_scales=scales)


def _group(row: HeldOut) -> str:
    assert row.point.conditions is not None  # only predicted points are held out
    return interval_group(row.point.conditions)


def spread_as(calibration: ServingCalibration, other: ServingCalibration) -> ServingCalibration:
    """The calibration with the spread of another: a refit has held-out sources of its own, which were not computed."""
    return replace(
        calibration,
        row_sd=other.row_sd,
        source_sd=other.source_sd,
        interval_scale=other.interval_scale,
        group_scales=other.group_scales,
    )


def document_of(calibration: ServingCalibration, held_out: Sequence[HeldOut]) -> dict[str, Any]:
    """JSON document of a calibration."""
    sd = np.sqrt(np.diag(calibration.covariance))
    correlation = calibration.covariance / np.outer(sd, sd)
    errors = np.abs(np.expm1([r.log_error for r in held_out] or [np.nan]))
    return {
        "made": "python -m meshwright.inference.fit, on data/points.csv",
        "num_rows": calibration.num_rows,
        "sources": dict(sorted(calibration.sources.items())),
        "held_out_sources": {
            "median_abs_error": _round(np.median(errors)), "p90_abs_error": _round(np.quantile(errors, 0.9)),
        },
        "row_sd": _round(calibration.row_sd),
        "source_sd": _round(calibration.source_sd),
        "interval_scale": _round(calibration.interval_scale),
        "group_scales": {group: _round(scale) for group, scale in calibration.group_scales.items()},
        "unknowns": {
            key: {"value": _round(v), "sd": _round(s)}
            for key, v, s in zip(calibration.keys, calibration.values, sd, strict=True)
        },
        "correlation": [round(float(c), 3) for c in correlation[np.tril_indices(len(sd))]],
    }  # fmt: skip


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def main() -> None:
    """Fit, and write the data file."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    points = [p for p in read_points(shipped_points_path()) if p.conditions is not None]
    held_out, path = leave_one_source_out(points), DATA / "constants.json"
    calibration = with_spread(fit(points), held_out)
    write_atomically(path, json.dumps(document_of(calibration, held_out), indent=1) + "\n")
    print(f"{path}: {calibration.num_rows} rows, {len(calibration.sources)} sources")


if __name__ == "__main__":
    main()
