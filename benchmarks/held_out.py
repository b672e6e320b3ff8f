"""Errors of whole sources left out of the fit, beside those of rows left out at random.

`python benchmarks/held_out.py` prints the table of docs/concepts/accuracy.md.

A new user's cluster and software are a source that the calibration has not seen; a further run on a system that has
published others is a row of one that it has. Fits without a source or a tenth of the rows are linearized
(`meshwright.fitting.ablation`).
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from meshwright.accuracy.rows import read_runs
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.calibration.parameters import prior
from meshwright.fitting.ablation import linearized_errors
from meshwright.fitting.published_runs import FitProblem, make_problem, thinned

FOLDS = 10


def folds(num_rows: int, *, seed: int) -> NDArray[np.str_]:
    """One of ten labels for every row, at random and as often as each other."""
    return (np.random.default_rng(seed).permutation(num_rows) % FOLDS).astype(str)


def line(name: str, errors: list[NDArray[np.float64]], problem: FitProblem) -> str:
    """Median and 90th percentile of absolute errors outside sweeps, means over the given splits."""
    attends = np.asarray(problem.tables.model.attention_share) >= 1  # in every layer: no hybrid
    kinds = (True, attends & ~problem.is_moe, attends & problem.is_moe, ~attends)
    cells = []
    for kind in kinds:
        own = ~problem.is_sweep & kind
        parts = [np.quantile(np.abs(np.expm1(error[own])), (0.5, 0.9)) for error in errors]
        median, p90 = 100 * np.mean(parts, axis=0)
        cells.append(f"{median:.1f} %, {p90:.0f} %")
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=3, help="random splits of the rows (default 3)")
    arguments = parser.parse_args()
    runs = thinned([run for run in read_runs(measured_runs_path()) if run.reason is None])
    problem = make_problem(runs, prior())
    of_sources = [linearized_errors(problem, prior(), problem.source)]
    of_rows = [linearized_errors(problem, prior(), folds(len(runs), seed=seed)) for seed in range(arguments.splits)]
    print("| left out of the fit | all | dense | mixtures of experts | hybrids |\n|---|--:|--:|--:|--:|")
    print(line("the whole source", of_sources, problem))
    print(line("a tenth of all rows, at random", of_rows, problem))


if __name__ == "__main__":
    main()
