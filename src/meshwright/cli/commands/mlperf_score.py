"""`meshwright mlperf score`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.mlperf_options import benchmark_option, benchmarks_option, round_option
from meshwright.cli.options import count_option, json_option
from meshwright.cli.verbs import verb


@verb(
    "score",
    body="meshwright.cli.mlperf_score:run",
    examples=[
        "meshwright mlperf score results/MI355X/llama2_70b_lora --round 5.1",
        "meshwright mlperf score results/MI355X/llama2_70b_lora --round 5.1 --json",
        "meshwright mlperf score results/MI355X/llama2_70b_lora --round 5.1 --runs 4",
        "meshwright mlperf score training_results_v5.1/AMD",
    ],
)
@click.argument("paths", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@round_option
@benchmark_option
@benchmarks_option
@count_option(
    "--runs", "num_runs", low=0, metavar="K",
    help="Take the first K runs alone, and print how likely a whole set passes.",
)  # fmt: skip
@json_option
def command() -> None:
    """Score sets of runs: olympic mean, reference-convergence test, normalization.

    A set is a folder of result_*.txt at or below DIR. A score is the mean of the minutes from run_start to run_stop
    without the fastest and the slowest run, times the factor of the reference-convergence test. With fewer runs than a
    score needs, the command prints how likely the whole set passes that test; with more, it takes the window of
    consecutive runs with the median score.

    Exits with 1 if a set is no result. A computed score is not verified by the MLCommons Association.
    """
