"""`meshwright inference accuracy`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import json_option
from meshwright.cli.question import options_from
from meshwright.cli.verbs import verb

GROUPS = ("source", "accelerator", "engine", "model", "precision", "metric", "evidence")


@verb(
    "accuracy",
    question="meshwright.api.inference:inference_accuracy",
    body="meshwright.cli.inference_accuracy:run",
    examples=[
        "meshwright inference accuracy --leave-one-source-out",
        "meshwright inference accuracy --by engine --rows",
        "meshwright inference accuracy --points mine.csv --json",
        "meshwright inference accuracy --records bench-serve-2 --calibration llamacpp.json --rows",
    ],
)
@options_from("meshwright.api.inference:inference_calibrate", without=("records", "cluster"))
@click.option(
    "--by", type=click.Choice(GROUPS), default="source", show_default=True, help="Group the errors by this column.",
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
