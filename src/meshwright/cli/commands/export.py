"""`meshwright export`: options and help."""

from __future__ import annotations

from meshwright.cli.options import json_option
from meshwright.cli.question import key_options
from meshwright.cli.verbs import verb


@verb(
    "export",
    question="meshwright.api.configurations:export",
    body="meshwright.cli.export:run",
    examples=[
        "meshwright export examples/runs/llama3.1-8b-pretrain.yaml --engine torchtitan --out titan",
        "meshwright export run.yaml --engine native --out here --set train.steps=100",
    ],
)
@key_options("calibration")
@json_option
def command() -> None:
    """Write a run as the configuration of another engine.

    The engine need not be installed. What it cannot do of the run is refused, with the reason. With `parallel: auto`
    the planner's best plan for the run's cluster is written. The files are complete: the printed command starts them.
    """
