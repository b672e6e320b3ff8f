"""`meshwright mlperf run`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import count_option, json_option
from meshwright.cli.verbs import verb


@verb(
    "run",
    question="meshwright.api.run_benchmark:mlperf_run",
    body="meshwright.cli.mlperf_run:run",
    examples=[
        "meshwright mlperf run proxy_pretrain_xs --out runs/p1",
        "meshwright mlperf run proxy_pretrain_xs --out runs/p2 --set batch.global_sequences=32 --dry-run",
        "meshwright mlperf run llama31_8b --out runs/8b --data /data/c4 --set parallel.tensor=2",
        "meshwright mlperf run llama31_8b --shape --set cluster=h100-8x1 --dry-run",
    ],
)
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
