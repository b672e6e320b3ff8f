"""`meshwright export`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import ENGINE, folder_option, json_option, run_argument
from meshwright.cli.question import key_options
from meshwright.cli.verbs import verb


@verb(
    "export",
    body="meshwright.cli.export:run",
    examples=[
        "meshwright export examples/runs/llama3.1-8b-pretrain.yaml --engine torchtitan --out titan",
        "meshwright export run.yaml --engine native --out here --set train.steps=100",
    ],
)
@run_argument()
@click.option(
    "--engine", "engine_name", type=ENGINE, help="Engine to write for.  [default: the run file's]",
)  # fmt: skip
@folder_option("--out", "folder", required=True, help="New or empty folder for the files.")
@key_options("overrides", "calibration")
@json_option
def command() -> None:
    """Write a run as the configuration of another engine.

    The engine need not be installed. What it cannot do of the run is refused, with the reason. With `parallel: auto`
    the planner's best plan for the run's cluster is written. The files are complete: the printed command starts them.
    """
