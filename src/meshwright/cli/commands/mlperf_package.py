"""`meshwright mlperf package`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.mlperf_options import benchmarks_option, round_option
from meshwright.cli.options import file_option, folder_option, json_option
from meshwright.cli.verbs import verb


@verb(
    "package",
    body="meshwright.cli.mlperf_package:run",
    examples=[
        "meshwright mlperf package runs/llama31_8b --org Org --system h200x8.json --code src --out submission",
    ],
)
@click.argument("paths", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--org", required=True, metavar="NAME", help="Submitter; the folder's name.")
@file_option("--system", required=True, help="System description (JSON); its name is the system's.")
@click.option(
    "--code", required=True, type=click.Path(path_type=Path), metavar="DIR",
    help="Code, instructions and configurations of the runs.",
)  # fmt: skip
@folder_option("--out", "out", required=True, help="Folder that the submission stands in.")
@round_option
@benchmarks_option
@json_option
def command() -> None:
    """Build a submission folder and run the official package checker on a copy.

    DIR is a folder of result_*.txt, one for each benchmark. Of more runs than a score needs, those of the median window
    go in. The same inputs give the same tree; an interrupted command leaves the old one.

    Exits with 1 if a set is no result or the package checker finds errors.
    """
