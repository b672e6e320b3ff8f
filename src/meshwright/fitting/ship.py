"""Write the calibration that ships: `python -m meshwright.fitting.ship`.

The calibration is fitted to every predictable row of the shipped measured runs. Its standard deviations are then scaled
so that the 80 % intervals of a leave-one-source-out prediction hold 80 % of the rows outside sweeps: intervals are for
sources that the calibration has not seen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np

from meshwright.accuracy.rows import PublishedRun, read_runs
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.calibration.parameters import STEP_CALIBRATION, Calibration, to_document
from meshwright.cost.uncertainty import Z80
from meshwright.files import write_atomically
from meshwright.fitting.leave_one_source_out import leave_one_source_out_errors
from meshwright.fitting.published_runs import fit

COVERAGE = 0.8
"""Share of rows that the intervals hold."""


def calibrate(runs: Sequence[PublishedRun], *, made: str) -> Calibration:
    """The calibration of `runs`, its intervals scaled by leave-one-source-out. Each run has conditions and a rate."""
    fitted = fit(runs, made=made)
    error, sd = leave_one_source_out_errors(runs, fitted)
    steady = np.array([not r.is_sweep for r in runs])
    _say(
        f"leave-one-source-out: median absolute error outside sweeps {np.median(np.abs(np.expm1(error[steady]))):.3f}"
    )
    return fitted.calibration.scaled(float(np.quantile(np.abs(error[steady]) / (Z80 * sd[steady]), COVERAGE)))


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=measured_runs_path(), help="CSV of measured runs")
    parser.add_argument("--out", type=Path, default=STEP_CALIBRATION, help="JSON to write")
    arguments = parser.parse_args()
    runs = [r for r in read_runs(arguments.runs) if r.reason is None]
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
