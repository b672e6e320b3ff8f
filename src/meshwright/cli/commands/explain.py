"""`meshwright explain`: options and help."""

from __future__ import annotations

from meshwright.cli.options import json_option
from meshwright.cli.question import key_options
from meshwright.cli.verbs import verb


@verb(
    "explain",
    question="meshwright.api.plan:explain",
    body="meshwright.cli.explain:run",
    examples=[
        "meshwright explain examples/runs/llama3.1-70b-pinned.yaml",
        "meshwright explain examples/runs/llama3.1-70b-pinned.yaml --why-not tensor=8",
        "meshwright explain pinned.yaml --against other.yaml --json",
    ],
)
@key_options("overrides", "accelerator", "network", "device_memory", "calibration")
@json_option
def command() -> None:
    """Compare two plans component by component and name what decides.

    Prints the difference of each component in milliseconds per step and of the memory in GiB per device. Without
    --against the run's plan is compared with the planner's best plan for the same run; if the run leaves its plan
    open, the best plan is compared with the second best. --set changes RUN.yaml, not OTHER.yaml;
    --network, --device-memory and --calibration are of both. Exits with 1 when the run's plan cannot run.
    """
