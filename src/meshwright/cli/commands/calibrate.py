"""`meshwright calibrate`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import PathType, file_option
from meshwright.cli.verbs import verb


@verb("calibrate", body="meshwright.cli.calibrate:run")
@click.argument("paths", metavar="[RECORDS...]", nargs=-1, type=PathType())
@file_option(
    "--out", "out",
    help="Calibration file to write.  [default: calibration.json in the folder of the records]",
)  # fmt: skip
@click.option(
    "--install", is_flag=True,
    help="Also make it this user's default for `cluster: here`, used without --calibration.",
)  # fmt: skip
@file_option(
    "--for", "run_path", metavar="RUN.yaml",
    help="Also list the measurements that would narrow this run's estimate most.",
)  # fmt: skip
def command() -> None:
    """Turn measurements of a device into a calibration for the planner.

    RECORDS are records.csv files of `meshwright bench device`, or their folders, all of one device. The leave-one-out
    error of each family is printed: every measurement is predicted from all others.
    """
