"""`meshwright mlperf check`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.mlperf_options import benchmark_option, benchmarks_option, round_option
from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb


@verb(
    "check",
    body="meshwright.cli.mlperf_check:run",
    examples=[
        "meshwright mlperf check results/MI355X/llama2_70b_lora --round 5.1",
        "meshwright mlperf check results/MI355X/llama2_70b_lora/result_0.txt --round 5.1 --json",
        "meshwright mlperf check running/result_3.txt --unfinished --no-official",
        "meshwright mlperf check training_results_v5.1/AMD",
    ],
)
@click.argument("paths", metavar="DIR_OR_FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@round_option
@benchmark_option
@benchmarks_option
@click.option("--unfinished", is_flag=True, help="Logs may still be written: check them as far as they go.")
@click.option(
    "--official/--no-official", default=True, show_default=True,
    help="Also run the official compliance checker of the round's rule set.",
)  # fmt: skip
@json_option
def command() -> None:
    """Check result files by the rules of MLPerf Training, strictly and with the official checker.

    Each finding names file, line and rule, what the log says, why it matters and how to mend it. A folder of
    result_*.txt is also checked as a set: number of runs, seeds, copies, reference convergence, and the system
    description where the folder stands in a submission.

    Exits with 1 if a rule is broken or the official checker rejects a file. Without the package mlperf-logging the
    official checker does not run, and the output says so.
    """
