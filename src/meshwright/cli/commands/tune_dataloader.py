"""`meshwright tune dataloader`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import (
    budget_option,
    json_option,
    numbers,
    run_argument,
    seconds_option,
    set_option,
    write_option,
)
from meshwright.cli.verbs import verb

MAX_WORKERS = 256  # `data.workers` of the run file


@verb(
    "dataloader",
    body="meshwright.cli.tune_dataloader:run",
    examples=[
        "meshwright tune dataloader examples/runs/tiny-llama-cpu.yaml",
        "meshwright tune dataloader run.yaml --workers 0,1,2,4,8,16 --budget 3m --apply",
        "meshwright tune dataloader run.yaml --step-time 1.8 --write tuned.yaml --json",
    ],
)
@run_argument()
@set_option
@click.option(
    "--workers", "counts", callback=numbers(low=0, high=MAX_WORKERS, example="0,1,2,4", word="auto"),
    default="auto", show_default=True, metavar="N,N,...",
    help="Numbers of threads to try, 0 to 256. 0 reads in the training thread; auto: up to the cores of a process.",
)  # fmt: skip
@seconds_option(
    "--step-time", "step_s", above=True,
    help="Measured time of a training step.  [default: the planner's estimate]",
)  # fmt: skip
@budget_option(default="60s", help="Time to measure, as in 90s, 3m or 1h; every number is measured at least 3 times.")
@write_option(help="Write a copy of the run file with the numbers found.")
@click.option("--apply", "is_apply", is_flag=True, help="Write the numbers found into RUN.yaml.")
@json_option
def command() -> None:
    """Find the number of data loading threads for training and validation.

    Reads the run's own data, with its tokenizer and sequence length, with each number of threads: at full speed, and
    with a consumer that takes as long as a training step. Training gets the smallest number with which no step waits.
    Validation is short, and gets the smallest number with which a whole pass, start included, is no slower.

    Changes nothing without --write or --apply. They set data.workers and train.evaluate.workers in a run file.
    """
