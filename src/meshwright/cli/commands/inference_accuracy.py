"""`meshwright inference accuracy`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.inference_options import served_options
from meshwright.cli.options import file_option, folder_option, json_option
from meshwright.cli.verbs import verb

GROUPS = ("source", "accelerator", "engine", "model", "precision", "metric", "evidence")


@verb(
    "accuracy",
    body="meshwright.cli.inference_accuracy:run",
    examples=[
        "meshwright inference accuracy --leave-one-source-out",
        "meshwright inference accuracy --by engine --rows",
        "meshwright inference accuracy --points mine.csv --json",
        "meshwright inference accuracy --records bench-serve-2 --calibration llamacpp.json --rows",
    ],
)
@file_option(
    "--points", "points_path", metavar="FILE.csv",
    help="Your points, with the columns of the shipped ones.  [default: the shipped points]",
)  # fmt: skip
@folder_option(
    "--records", multiple=True,
    help="Your records of `meshwright bench serve` instead of points. May be repeated.",
)  # fmt: skip
@file_option(
    "--calibration", "calibration_path",
    help="Predict records by the constants of one server, from `meshwright inference calibrate`.",
)  # fmt: skip
@served_options(cluster_help="Device of the records.  [default: that of the calibration]")
@click.option(
    "--by", type=click.Choice(GROUPS), default="source", show_default=True, help="Group the errors by this column.",
)  # fmt: skip
@click.option(
    "--leave-one-source-out", "leave_out", is_flag=True,
    help="Predict each source with constants that were refitted without it.",
)  # fmt: skip
@click.option("--rows", "show_rows", is_flag=True, help="Also print every point.")
@json_option
def command() -> None:
    """Predict published inference points and report the errors.

    Rates are tokens/s of all devices; latencies are seconds. Points that say too little are counted with the reason.

    The constants were fitted to the shipped points. --leave-one-source-out gives the error on sources that they have
    not seen. Records of a server of yours are points too: output tokens/s, mean TTFT and mean time per output token of
    every usable load.
    """
