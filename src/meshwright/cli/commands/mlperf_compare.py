"""`meshwright mlperf compare`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.mlperf_options import benchmarks_option
from meshwright.cli.options import count_option, json_option
from meshwright.cli.verbs import verb


@verb(
    "compare",
    body="meshwright.cli.mlperf_compare:run",
    examples=[
        "meshwright mlperf compare --benchmark llama2_70b_lora --round 5.1 --devices 8 --accelerator MI355X",
        "meshwright mlperf compare --benchmark llama2_70b_lora --devices 8 --baseline MI300X",
        "meshwright mlperf compare my/results --benchmark llama31_8b --round 5.1 --devices 8 --json",
    ],
)
@click.argument("paths", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--round",
    "rounds",
    multiple=True,
    metavar="ROUND",
    help="Published results of this round. May be repeated.",
)
@click.option(
    "--benchmark", "benchmarks", multiple=True, metavar="NAME", help="This benchmark alone. May be repeated."
)
@click.option(
    "--accelerator", "accelerators", multiple=True, metavar="NAME",
    help="Published results on this accelerator, as in MI355X. May be repeated.",
)  # fmt: skip
@count_option("--devices", help="Published results on N accelerators.")
@click.option(
    "--published/--no-published", default=True, show_default=True, help="Take published results too."
)
@click.option(
    "--baseline", metavar="NAME", help="Accelerator of the ratios.  [default: the slowest of each group]"
)
@benchmarks_option
@json_option
def command() -> None:
    """Compare results: makers and partners by accelerator, spread, generation over generation.

    Published results of the rounds 5.0 and 5.1 ship. Folders of result_*.txt at and below DIR are scored and stand in
    the same tables; a score that is not a published one is labelled as not verified by the MLCommons Association.
    Results of benchmarks of one's own are never compared with those of MLPerf.
    """
