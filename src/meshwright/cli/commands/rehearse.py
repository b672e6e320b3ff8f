"""`meshwright rehearse`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import json_option, run_argument, set_option
from meshwright.cli.verbs import verb

MAX_PROCESSES = 8  # a toy tensor has at least 8 rows: each process holds a shard of every tensor


@verb(
    "rehearse",
    body="meshwright.cli.rehearse:run",
    examples=[
        "meshwright rehearse run.yaml",
        "meshwright rehearse run.yaml --processes 8 --json",
        "meshwright rehearse run.yaml --set parallel.tensor=4",
    ],
)
@run_argument()
@set_option
@click.option(
    "--processes", "num_processes", type=click.IntRange(2, MAX_PROCESSES), default=4, show_default=True,
    metavar="N", help="Maximum number of local processes.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=120.0, show_default=True, metavar="SECONDS",
    help="Time after which an unfinished rehearsal counts as a deadlock.",
)  # fmt: skip
@json_option
def command() -> None:
    """Check a plan on local CPU processes against a single process.

    Runs the parallel structure of the run's plan on local CPU processes, with a smaller degree on each mesh axis and
    a model of toy width, and compares losses, gradients and weights with those of one process. Finds wrong numerics
    and deadlocks before a GPU is rented. Exits with 1 when the numbers differ, when the processes deadlock, or when
    the native engine cannot run the plan.
    """
