"""`meshwright mlperf rcp`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.mlperf_options import benchmark_option, benchmarks_option, round_option
from meshwright.cli.options import file_option, json_option
from meshwright.cli.verbs import verb


@verb(
    "rcp",
    body="meshwright.cli.mlperf_rcp:run",
    examples=[
        "meshwright mlperf rcp runs/batch16 runs/batch32 --creator Reference --platform 1xH200 --out rcps.json",
        "meshwright mlperf rcp runs/batch16 --creator Reference --platform 1xH200 --json",
    ],
)
@click.argument("paths", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@round_option
@benchmark_option
@benchmarks_option
@click.option("--creator", required=True, metavar="TEXT", help="Who made the runs.")
@click.option("--platform", required=True, metavar="TEXT", help="System of the runs.")
@click.option("--when", default="", metavar="TEXT", help="Date or round of the runs.")
@click.option(
    "--precision", default="BF16", show_default=True, metavar="TEXT", help="BF16 or FP32 by the rules."
)
@file_option("--out", "out_path", help="Add the points to this file.")
@click.option("--replace", is_flag=True, help="Replace points of the same batch size in FILE.")
@json_option
def command() -> None:
    """Make reference convergence points from 2 N runs at each batch size.

    DIR is a folder of result_*.txt of one global batch size. All runs must converge and share their hyperparameters.
    The points have the official schema, so `mlperf_logging.rcp_checker --custom_rcps` reads them too.
    """
