"""Verdicts of `meshwright compare` on simulated sweeps: false ones of equal sides, and true ones by the difference.

    python benchmarks/compare_verdicts.py

Runs of both sides are lognormal with one standard deviation of 2 %. It prints the table of docs/guides/compare.md.
"""

from __future__ import annotations

import statistics

import numpy as np

from meshwright.answers.comparison.ratios import Verdict, mean_ratios
from meshwright.answers.comparison.sides import THROUGHPUT, Evidence, Side, SideValue, Statistic

NUM_RUNS, SHIFTS, NUM_TRIALS, DEVIATION = range(2, 11), (1, 2, 3, 5), 2_000, 0.02
CENTRAL = {Statistic.MEAN: statistics.mean, Statistic.MEDIAN: statistics.median}


def verdict_share(*, num_runs: int, shift: float, statistic: Statistic, num_trials: int, state: int = 1) -> float:
    """Share of comparisons with a verdict: sides of `num_runs` runs whose means differ by `shift` deviations."""
    random = np.random.default_rng([state, num_runs, int(10 * shift)])
    decided = 0
    for _ in range(num_trials):
        sides = []
        for mean in (0.0, shift * DEVIATION):
            runs = tuple(np.exp(random.normal(mean, DEVIATION, num_runs)))
            value = SideValue(
                workload="w", metric=THROUGHPUT, value=CENTRAL[statistic](runs), evidence=Evidence.MEASURED,
                samples=runs, statistic=statistic, sampled="run",
            )  # fmt: skip
            sides.append(Side(name="side", kind="simulated", facts={}, values=(value,)))
        decided += mean_ratios(*sides)[0].ratios[0].verdict is not Verdict.TIE
    return decided / num_trials


def table(num_trials: int = NUM_TRIALS) -> str:
    """Return the table in Markdown."""
    columns = [(0.0, Statistic.MEAN), *((float(shift), Statistic.MEDIAN) for shift in (0, *SHIFTS))]
    heads = ["equal, means", "equal, medians", *(f"{shift} sd" for shift in SHIFTS)]
    lines = ["| runs a side | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for num_runs in NUM_RUNS:
        shares = [
            verdict_share(num_runs=num_runs, shift=shift, statistic=statistic, num_trials=num_trials)
            for shift, statistic in columns
        ]
        lines.append(f"| {num_runs} | " + " | ".join(f"{share:.1%}" for share in shares) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
