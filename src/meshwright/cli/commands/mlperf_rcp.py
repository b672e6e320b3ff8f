"""`meshwright mlperf rcp`: options and help."""

from __future__ import annotations

from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb


@verb(
    "rcp",
    question="meshwright.api.mlperf:mlperf_rcp",
    body="meshwright.cli.mlperf_rcp:run",
    examples=[
        "meshwright mlperf rcp runs/batch16 runs/batch32 --creator Reference --platform 1xH200 --out rcps.json",
        "meshwright mlperf rcp runs/batch16 --creator Reference --platform 1xH200 --json",
    ],
)
@json_option
def command() -> None:
    """Make reference convergence points from 2 N runs at each batch size.

    DIR is a folder of result_*.txt of one global batch size. All runs must converge and share their hyperparameters.
    The points have the official schema, so `mlperf_logging.rcp_checker --custom_rcps` reads them too.
    """
