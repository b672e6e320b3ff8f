"""`meshwright accuracy`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import file_option, html_option, json_option
from meshwright.cli.verbs import verb

GROUPS = ("source", "accelerator", "architecture", "size", "precision", "framework", "task", "quality")


@verb(
    "accuracy",
    question="meshwright.api.accuracy:accuracy",
    body="meshwright.cli.accuracy:run",
    examples=[
        "meshwright accuracy",
        "meshwright accuracy --by accelerator --rows",
        "meshwright accuracy --leave-one-source-out",
        "meshwright accuracy --runs mine.csv --json",
        "meshwright accuracy --calibration h100.json --leave-one-source-out --by accelerator",
    ],
)
@click.option(
    "--by", type=click.Choice(GROUPS), default="source", show_default=True, help="Group the errors by this column.",
)  # fmt: skip
@click.option("--rows", "show_rows", is_flag=True, help="Also print every run.")
@file_option(
    "--csv",
    "csv_path",
    metavar="FILE.csv",
    help="Write one row per run: prediction, measurement, error, or the reason for none.",
)
@html_option
@json_option
def command() -> None:
    """Predict published measured runs and report the errors.

    Predicts every published training run that states enough conditions, and compares the prediction with the
    published measurement. Rates are tokens/s per device. Runs that cannot be predicted are counted with the reason.

    The shipped calibration was fitted on the shipped runs. --leave-one-source-out gives the error on runs that the
    calibration has not seen.
    """
