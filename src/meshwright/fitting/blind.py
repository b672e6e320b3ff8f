"""Predict a new source before anyone reads it: `python -m meshwright.fitting.blind NEW_RUNS.csv --commit REVISION`.

Rows of a source that came after the code say how far off predictions are for strangers. Leave-one-source-out says less,
as readings, presets and mechanisms were made with the rows at hand. So the code as it stands predicts a new file first,
its lines are added to `catalog/data/runs/blind_predictions.csv`, and are never renewed; then the rows may join
`measured_runs.csv`, and `fitting.ship` fits the widths of intervals to them.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from pathlib import Path

from meshwright.accuracy.predict import predict
from meshwright.accuracy.rows import PublishedRun, read_runs
from meshwright.accuracy.shipped import BlindPrediction


def predict_blind(runs: Sequence[PublishedRun], *, commit: str) -> Iterator[BlindPrediction]:
    """Predict each run that has conditions; rates are rounded to a tenth of a token per second."""
    known = [run for run in runs if run.conditions is not None]
    if not known:
        return
    found = predict(known)
    for i, run in enumerate(known):
        rates = (found.tokens_per_s_per_device[i], found.low[i], found.high[i])
        predicted, low, high = (round(float(rate), 1) for rate in rates)
        yield BlindPrediction(
            id=run.id, source_key=run.source_key, commit=commit,
            predicted=predicted, low=low, high=high, fits=bool(found.fits[i]),
        )  # fmt: skip


def main() -> None:
    """Write the predictions to standard output, without a heading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="CSV of measured runs")
    parser.add_argument("--commit", required=True, help="revision of Meshwright that predicts")
    arguments = parser.parse_args()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerows(astuple(p) for p in predict_blind(read_runs(arguments.runs), commit=arguments.commit))


if __name__ == "__main__":
    main()
