"""`meshwright accuracy`: options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshwright.cli.options import html_option, json_option
from meshwright.cli.verbs import verb

GROUPS = ("source", "accelerator", "architecture", "size", "precision", "framework", "task", "quality")


def _file(name: str, destination: str, text: str) -> Any:
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option(name, destination, type=kind, metavar="FILE.csv", help=text)


@verb(
    "accuracy",
    body="meshwright.cli.accuracy:run",
    examples=[
        "meshwright accuracy",
        "meshwright accuracy --by accelerator --rows",
        "meshwright accuracy --leave-one-source-out",
        "meshwright accuracy --runs mine.csv --json",
        "meshwright accuracy --calibration h100.json --leave-one-source-out --by accelerator",
    ],
)
@_file(
    "--runs",
    "runs_path",
    "Your measured runs, with the columns of the shipped runs.  [default: the shipped runs]",
)
@_file(
    "--failed", "failed_path",
    "Configurations that failed to run, such as out of memory.  [default: the shipped ones, unless --runs is given]",
)  # fmt: skip
@click.option(
    "--by", type=click.Choice(GROUPS), default="source", show_default=True, help="Group the errors by this column.",
)  # fmt: skip
@click.option(
    "--leave-one-source-out", "leave_out", is_flag=True,
    help="Predict each source with a calibration that was refitted without it. Takes some minutes.",
)  # fmt: skip
@click.option(
    "--calibration", "calibrations", multiple=True, metavar="FILE",
    help="Kernel tables of one accelerator, from `meshwright calibrate --from-tables`. May be repeated.",
)  # fmt: skip
@click.option("--rows", "show_rows", is_flag=True, help="Also print every run.")
@_file("--csv", "csv_path", "Write one row per run: prediction, measurement, error, or the reason for none.")
@html_option
@json_option
def command() -> None:
    """Predict published measured runs and report the errors.

    Predicts every published training run that states enough conditions, and compares the prediction with the
    published measurement. Rates are tokens/s per device. Runs that cannot be predicted are counted with the reason.

    The shipped calibration was fitted on the shipped runs. --leave-one-source-out gives the error on runs that the
    calibration has not seen.
    """
