"""Write the calibration that ships: `python -m meshwright.fitting.ship`.

The calibration is fitted to every predictable row of the shipped measured runs. Its standard deviations are then scaled
so that the 80 % intervals of a leave-one-source-out prediction hold 80 % of the rows outside sweeps: intervals are for
sources that the calibration has not seen. Classes of cases (dense or mixture of experts; many or few sources of their
lineage of stacks on their architecture; models with layers that few runs have) have a factor each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np

from meshwright.accuracy.rows import PublishedRun, read_runs
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.calibration.parameters import STEP_CALIBRATION, Calibration, to_document
from meshwright.cost.uncertainty import Z80
from meshwright.files import write_atomically
from meshwright.fitting.leave_one_source_out import UnseenErrors, held_out
from meshwright.fitting.published_runs import fit, informs

COVERAGE = 0.8
"""Share of rows that the intervals hold."""
POOLED_ROWS = 20
"""Weight of all rows in the factor of one class."""
FLOORS = (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3)
"""Standard deviations that may be added to every case of a kind of model: the facts that a calibration knows
of a case may say little of its error."""
UNSTATED = (0.0, 0.1, 0.2, 0.3, 0.4)
"""Standard deviations that may be added to a mixture of experts none of whose switches is stated."""


def calibrate(runs: Sequence[PublishedRun], *, made: str) -> Calibration:
    """The calibration of `runs`, its intervals scaled by leave-one-source-out. Each run has conditions and a rate."""
    fitted = fit(runs, made=made)
    errors = held_out(runs, fitted)
    steady = np.array([not r.is_sweep for r in runs])
    _say(
        f"leave-one-source-out: median absolute error outside sweeps "
        f"{np.median(np.abs(np.expm1(errors.error[steady]))):.3f}"
    )
    return with_intervals(fitted.calibration, errors.take(np.flatnonzero(steady)))


def with_intervals(calibration: Calibration, errors: UnseenErrors) -> Calibration:
    """`calibration` with 80 % intervals that hold 80 % of `errors`, a factor for each class among them.

    Split conformal prediction within classes (Vovk 2012, "Conditional validity of inductive conformal predictors"),
    the factor of a class shrunk towards the factor of its kind of model as if `POOLED_ROWS` rows of the kind
    were in it. Standard deviations that all cases of a kind share are added first: the pair of `FLOORS` and
    `UNSTATED` with the least interval score.
    """
    by_class: dict[str, float] = {}
    for kind, unstated in (("dense", (0.0,)), ("novel", (0.0,)), ("moe", UNSTATED)):  # the last one's stays
        own = errors.take(np.flatnonzero(np.char.startswith(errors.case_class, kind)))
        if len(own.error):
            calibration = _widened(calibration, own, kind=kind, unstated=unstated)
            found = _scaled(calibration, own)
            by_class |= {name: found.scale * factor for name, factor in found.factors.items()}
    scale = _scaled(calibration, errors).scale  # of classes without a row
    factors = {name: factor / scale for name, factor in by_class.items()}
    return replace(calibration, interval_scale=scale, interval_factors=factors)


def _widened(calibration: Calibration, errors: UnseenErrors, *, kind: str, unstated: Sequence[float]) -> Calibration:
    """`calibration` with the floor of one kind of model, and the `unstated_sd`, that score best on its errors."""
    tried = [
        replace(calibration, interval_floors={**calibration.interval_floors, kind: floor}, unstated_sd=unstated_sd)
        for floor in FLOORS
        for unstated_sd in unstated
    ]
    return min(tried, key=lambda one: _scaled(one, errors).score)


@dataclass(frozen=True, kw_only=True)
class _Intervals:
    """Scale of intervals, its factors by class, and the mean score."""

    scale: float
    factors: dict[str, float]
    score: float


def _scaled(calibration: Calibration, errors: UnseenErrors) -> _Intervals:
    added = calibration.added_variance(errors.is_moe, errors.unstated, is_novel=errors.is_novel)
    half_width = Z80 * np.sqrt(errors.sd**2 + added)
    ratio = np.abs(errors.error) / half_width
    scale = float(np.quantile(ratio, COVERAGE))
    classes = errors.case_class.tolist()
    factors = {}
    for name in sorted(set(classes)):
        own = ratio[errors.case_class == name]
        trust = len(own) / (len(own) + POOLED_ROWS)
        factors[name] = float((np.quantile(own, COVERAGE) / scale) ** trust)
    factor = np.array([factors[name] for name in classes])
    scale *= float(np.quantile(ratio / scale / factor, COVERAGE))
    half_width = half_width * scale * factor
    outside = np.maximum(np.abs(errors.error) - half_width, 0.0)
    score = float(np.mean(2 * half_width + 2 / (1 - COVERAGE) * outside))
    return _Intervals(scale=scale, factors=factors, score=score)


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=measured_runs_path(), help="CSV of measured runs")
    parser.add_argument("--out", type=Path, default=STEP_CALIBRATION, help="JSON to write")
    arguments = parser.parse_args()
    runs = [r for r in read_runs(arguments.runs) if r.reason is None and informs(r)]
    sources = [r.source_key for r in runs]
    _say(f"fitting {len(runs)} rows of {len(set(sources))} sources")
    made = f"{date.today().isoformat()} from {len(runs)} rows of {arguments.runs.name}"
    document = to_document(calibrate(runs, made=made))
    document["rows"] = {source: sources.count(source) for source in sorted(set(sources))}
    write_atomically(arguments.out, json.dumps(document, indent=1, sort_keys=True) + "\n")
    _say(f"wrote {arguments.out}")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
