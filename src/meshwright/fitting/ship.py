"""Write the calibration that ships: `python -m meshwright.fitting.ship`.

The calibration is fitted to every row of the shipped measured runs that informs it. Its intervals are for sources that
nobody has seen: they are wide enough that 80 % of the predictions that were made before their source was read
(`fitting.blind`) would have been inside. Leave-one-source-out errors are smaller, as readings, presets and mechanisms
were made with the rows at hand; they count for files that have no such prediction.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.accuracy.failed import states_memory
from meshwright.accuracy.rows import PublishedRun, read_runs
from meshwright.accuracy.shipped import blind_predictions, measured_runs_path
from meshwright.accuracy.tables import memory_of, tables_of
from meshwright.calibration.parameters import STEP_CALIBRATION, Calibration, to_document
from meshwright.cost.uncertainty import Z80
from meshwright.files import write_atomically
from meshwright.fitting.leave_one_source_out import UnseenErrors, errors_by, held_out
from meshwright.fitting.published_runs import MEDIAN_OF_NORMAL, Fitted, fit, informs

COVERAGE = 0.8
"""Share of rows that the intervals hold."""


def calibrate(runs: Sequence[PublishedRun], *, made: str) -> Calibration:
    """The calibration of `runs`, with the widths of its intervals. Each run has conditions and a rate."""
    fitted = fit(runs, made=made)
    return replace(with_intervals(fitted.calibration, unseen_errors(runs, fitted)), memory_sd=memory_sd(runs))


def memory_sd(runs: Sequence[PublishedRun]) -> float:
    """Standard deviation of log memory over its estimate, of a normal with the median error of the median source.

    Only runs count whose source states memory, recomputation and offloading; 0 if there is none. The estimate is
    robust, because some sources count memory in their own way and are off by factors.
    """
    stated = [run for run in runs if run.memory_bytes and states_memory(run)]
    if not stated:
        return 0.0
    errors: dict[str, list[float]] = defaultdict(list)
    tables = tables_of([run.conditions for run in stated if run.conditions is not None])
    memory = memory_of([run.conditions for run in stated if run.conditions is not None], tables)
    allocated, reserved = np.asarray(memory.allocated_bytes), np.asarray(memory.reserved_bytes)
    for i, run in enumerate(stated):
        predicted = float((reserved if run.memory_definition == "reserved" else allocated)[i])
        errors[run.source_key].append(abs(float(np.log(predicted / (run.memory_bytes or 1)))))
    return float(np.median([np.median(own) for own in errors.values()])) / MEDIAN_OF_NORMAL


def unseen_errors(runs: Sequence[PublishedRun], fitted: Fitted) -> UnseenErrors:
    """Errors of the predictions that were made before a source was read; leave-one-source-out if there is none.

    Sweeps over poor plans do not count.
    """
    said = blind_predictions()
    blind = [run for run in runs if run.id in said]
    if not blind:
        return held_out([run for run in runs if not run.is_sweep], fitted)
    measured = np.array([run.tokens_per_s_per_device for run in blind], dtype=float)
    predicted = np.array([said[run.id].predicted for run in blind])
    return replace(errors_by(fitted.calibration, blind), error=np.log(predicted / measured))


def with_intervals(calibration: Calibration, errors: UnseenErrors) -> Calibration:
    """`calibration` with 80 % intervals that hold 80 % of `errors`, by kind of model and each source with one weight.

    Errors of one source are alike, so its number of rows says nothing of the next source. Model discrepancy as a
    variance of its own: Kennedy and O'Hagan 2001, "Bayesian calibration of computer models". A kind without rows
    has the largest of the others.
    """
    kinds = sorted(set(errors.kind.tolist()))
    return replace(calibration, stranger_sd={kind: stranger_sd(errors.take(errors.kind == kind)) for kind in kinds})


def stranger_sd(errors: UnseenErrors) -> float:
    """The least standard deviation besides `errors.sd` with which 80 % intervals hold 80 % of the errors."""
    _, index, counts = np.unique(errors.source, return_inverse=True, return_counts=True)
    # by which variance besides its own an error is inside, if only just
    needed = np.maximum((errors.error / Z80) ** 2 - errors.sd**2, 0.0)
    return float(np.sqrt(weighted_quantile(needed, 1 / counts[index], COVERAGE)))


def weighted_quantile(values: NDArray[np.float64], weights: NDArray[np.float64], share: float) -> float:
    """The least of `values` below or at which lies the `share` of `weights`.

    >>> weighted_quantile(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0]), 0.75)
    2.0
    """
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, share * reached[-1] * (1 - 1e-12))])


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=measured_runs_path(), help="CSV of measured runs")
    parser.add_argument("--out", type=Path, default=STEP_CALIBRATION, help="JSON to write")
    arguments = parser.parse_args()
    runs = [r for r in read_runs(arguments.runs) if r.reason is None]
    sources = [r.source_key for r in runs if informs(r)]
    _say(f"fitting {len(sources)} rows of {len(set(sources))} sources")
    made = f"{date.today().isoformat()} from {len(sources)} rows of {arguments.runs.name}"
    document = to_document(calibrate(runs, made=made))
    document["rows"] = {source: sources.count(source) for source in sorted(set(sources))}
    write_atomically(arguments.out, json.dumps(document, indent=1, sort_keys=True) + "\n")
    _say(f"wrote {arguments.out}")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
