"""`meshwright estimate`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import file_option, html_option, run_argument
from meshwright.cli.question import key_options
from meshwright.cli.verbs import verb


@verb(
    "estimate",
    question="meshwright.api.estimate:estimate_memory",
    without=("model",),  # which only --memory requires
    body="meshwright.cli.estimate:run",
)
@run_argument(required=False)
@click.option(
    "--memory", "is_memory", is_flag=True,
    help="Print the memory of training --model, without a run file or a cluster.",
)  # fmt: skip
@key_options("model", "cluster", "global_sequences", "engine")
@file_option("--csv", "csv_path", metavar="FILE.csv", help="Of --memory: write the rows to this file.")
@key_options("overrides", "accelerator", "network", "device_memory", "calibration")
@file_option(
    "--trace", "trace_path", metavar="FILE.json",
    help="Write the timeline of the step for Perfetto (ui.perfetto.dev).",
)  # fmt: skip
@html_option
def command() -> None:
    """Estimate step time, memory, timeline and cost of one plan.

    Prints the step time by component, the memory per device by part, and time, energy and cost of the whole training,
    with 80 % intervals. The plan is the one that RUN.yaml pins; with `parallel: auto` it is the planner's best.
    Without a file, --model, --cluster, --gbs and --seq describe the run; with one, they replace its keys.

    With --memory, prints the memory of training one model instead, for each combination of --precision, --optimizer,
    --lora-rank, --sharding, --micro-batch and --seq. It needs no run file and no cluster. Of these options a run takes
    --precision and --seq, with one value.
    """
