"""`meshwright mlperf score`: options and help."""

from __future__ import annotations

from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb


@verb(
    "score",
    question="meshwright.api.mlperf:mlperf_score",
    body="meshwright.cli.mlperf_score:run",
    examples=[
        "meshwright mlperf score results/MI355X/llama2_70b_lora --round 5.1",
        "meshwright mlperf score results/MI355X/llama2_70b_lora --round 5.1 --json",
        "meshwright mlperf score results/MI355X/llama2_70b_lora --round 5.1 --runs 4",
        "meshwright mlperf score training_results_v5.1/AMD",
    ],
)
@json_option
def command() -> None:
    """Score sets of runs: olympic mean, reference-convergence test, normalization.

    A set is a folder of result_*.txt at or below DIR. A score is the mean of the minutes from run_start to run_stop
    without the fastest and the slowest run, times the factor of the reference-convergence test. With fewer runs than a
    score needs, the command prints how likely the whole set passes that test; with more, it takes the window of
    consecutive runs with the median score.

    Exits with 1 if a set is no result. A computed score is not verified by the MLCommons Association.
    """
