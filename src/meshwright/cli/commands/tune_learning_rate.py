"""`meshwright tune learning-rate`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import count_option, html_option, json_option, run_argument, set_option, write_option
from meshwright.cli.verbs import verb


@verb(
    "learning-rate",
    body="meshwright.cli.tune_learning_rate:run",
    examples=[
        "meshwright tune learning-rate examples/runs/tiny-llama-cpu.yaml",
        "meshwright tune learning-rate run.yaml --steps 200 --from 1e-6 --to 0.1 --html rates.html",
        "meshwright tune learning-rate run.yaml --set optimizer.name=muon --write tuned.yaml --json",
    ],
)
@run_argument()
@set_option
@click.option("--from", "low", type=float, default=1e-7, show_default=True, metavar="RATE", help="First rate.")
@click.option("--to", "high", type=float, default=1.0, show_default=True, metavar="RATE", help="Last rate.")
@count_option(
    "--steps", "num_steps", low=10, high=100_000, default=100,
    help="Steps from the first rate to the last.",
)  # fmt: skip
@html_option
@write_option(help="Write a copy of the run file with the suggested rate.")
@click.option("--apply", "is_apply", is_flag=True, help="Write the suggested rate into RUN.yaml.")
@json_option
def command() -> None:
    """Find a learning rate for a run by a range test.

    Trains the run's own model on its own data, with its batch, plan and optimizer, while the rate rises exponentially
    from step to step, until the loss diverges. The suggestion is the rate of the steepest descent of the smoothed loss,
    or a tenth of the rate of divergence where that is smaller (Smith 2017; fastai's lr_find). --html draws the curve.

    Saves nothing of the training. Changes nothing without --write or --apply. They set optimizer.learning_rate.
    """
