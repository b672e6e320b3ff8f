"""Options that the commands of `meshwright mlperf` share."""

from __future__ import annotations

from pathlib import Path

import click

round_option = click.option(
    "--round", "round_name", metavar="ROUND",
    help="Round whose rules apply: 5.0, 5.1, 6.0 or 6.1.  [default: from the folder's name or the date of the runs]",
)  # fmt: skip

benchmark_option = click.option(
    "--benchmark", metavar="NAME", help="Benchmark.  [default: submission_benchmark of the logs]"
)

benchmarks_option = click.option(
    "--benchmarks", "folders", multiple=True, type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR", help="Folder of further benchmark files (*.toml). May be repeated.",
)  # fmt: skip
