"""`meshwright mlperf run`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.options import count_option, folder_option, json_option, set_option
from meshwright.cli.verbs import verb


@verb(
    "run",
    body="meshwright.cli.mlperf_run:run",
    examples=[
        "meshwright mlperf run proxy_pretrain_xs --out runs/p1",
        "meshwright mlperf run proxy_pretrain_xs --out runs/p2 --set batch.global_sequences=32 --dry-run",
        "meshwright mlperf run llama31_8b --out runs/8b --data /data/c4 --set parallel.tensor=2",
        "meshwright mlperf run llama31_8b --shape --set cluster=h100-8x1 --dry-run",
    ],
)
@click.argument("name", metavar="BENCHMARK_OR_RUN.yaml")
@folder_option(
    "--out", "folder",
    help="Folder of the set: result_0.txt, result_1.txt, ... and their records.  [default: runs/NAME]",
)  # fmt: skip
@count_option("--runs", "num_runs", high=1000, help="Number of runs.  [default: as many as a score takes]")
@click.option(
    "--round", "round_name", metavar="ROUND", help="Round whose rules apply.  [default: the newest]"
)
@click.option(
    "--division", type=click.Choice(["closed", "open"]), default="closed", show_default=True,
    help="closed: settings that the rules fix are refused if they differ.",
)  # fmt: skip
@set_option
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the data set ($MESHWRIGHT_MLPERF_DATA).",
)
@click.option(
    "--weights", type=click.Path(path_type=Path), metavar="DIR",
    help="Folder of the weights to start from ($MESHWRIGHT_MLPERF_WEIGHTS).",
)  # fmt: skip
@click.option(
    "--org", default="unnamed", show_default=True, metavar="NAME", help="Organization, for the logs."
)
@click.option(
    "--platform", metavar="NAME", help="Name of the system, for the logs.  [default: cores and architecture]"
)
@click.option(
    "--system", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="JSON whose fields replace those of the gathered description of the system.",
)  # fmt: skip
@click.option(
    "--seeds", metavar="LIST", help="Seeds, separated by commas, to repeat runs.  [default: from the system]"
)
@count_option(
    "--warm-up", "warm_up_steps", low=0, high=1000,
    help="Steps on random tokens before the clock starts; they are undone.  [default: the benchmark's]",
)  # fmt: skip
@count_option(
    "--concurrent", "num_concurrent", high=1024,
    help="Runs side by side.  [default: 1; of a proxy as many as there are cores]",
)  # fmt: skip
@click.option(
    "--launcher", metavar="COMMAND",
    help="Command that starts the processes of a run, on several hosts too, as in 'torchrun --no-python ...'.",
)  # fmt: skip
@click.option(
    "--shape",
    "is_shape",
    is_flag=True,
    help="Train the benchmark's shapes on random tokens for --steps: a rate, and no result.",
)
@count_option("--steps", "num_steps", high=10_000, default=20, help="Steps of --shape.")
@click.option("--dry-run", is_flag=True, help="Check everything and print the run file; train nothing.")
@json_option
def command() -> None:
    """Run a benchmark: N timed runs to a target loss, with logs in the format of MLPerf Training.

    A run initializes its model and warms up on random tokens; then the clock starts, and only then its data is opened.
    It evaluates at the exact samples of the rules and ends at the first evaluation that meets the target. Seeds are
    drawn from the system once. The same command continues a set that was interrupted; a run in its middle starts again.

    Proxies bring their data. Other benchmarks need --data, and say where to get it. RUN.yaml is a run file whose `name`
    is that of a benchmark. Exit code 1 says that fewer runs reached the target than a score needs.
    """
