"""`meshwright explain`: options and help."""

from __future__ import annotations

from meshwright.cli.question import key_options
from meshwright.cli.verbs import verb


@verb("explain", question="meshwright.api.plan:explain", body="meshwright.cli.explain:run")
@key_options("overrides", "accelerator", "network", "device_memory", "calibration")
def command() -> None:
    """Compare two plans component by component and name what decides.

    Prints the difference of each component in milliseconds per step and of the memory in GiB per device. Without
    --against the run's plan is compared with the planner's best plan for the same run; if the run leaves its plan
    open, the best plan is compared with the second best. --set changes RUN.yaml, not OTHER.yaml;
    --network, --device-memory and --calibration are of both. Exits with 1 when the run's plan cannot run.
    """
