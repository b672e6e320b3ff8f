"""`meshwright bench train`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.options import count_option, folder_option, html_option, json_option, seconds_option, set_option
from meshwright.cli.question import key_options
from meshwright.cli.verbs import verb


@verb(
    "train",
    body="meshwright.cli.bench_train:run",
    examples=[
        "meshwright bench train run.yaml",
        "meshwright bench train run.yaml --sweep batch.micro=1,2,4 --sweep precision=bf16,fp8",
        "meshwright bench train run.yaml --set parallel.data_shard=1 --sweep parallel.tensor=1,2 --html sweep.html",
        "meshwright bench train small.yaml large.yaml --runs 9 --steps 50 --warmup 10 --out bench/models",
        "meshwright bench train run.yaml --engines native,torchtitan,megatron,maxtext",
        "meshwright bench train run.yaml --resume",
        "meshwright bench train run.yaml --launcher 'torchrun --nnodes 2 --nproc-per-node 8'",
    ],
)
@click.argument("paths", metavar="RUN.yaml...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--sweep", "sweeps", multiple=True, metavar="KEY=V,V,...",
    help="Values of one key of the run file, as in --sweep batch.micro=1,2,4. May be repeated; every combination is "
    "trained.",
)  # fmt: skip
@click.option(
    "--engines", "engines", metavar="E,E,...", help="Compare engines: short for --sweep engine=E,E,...",
)  # fmt: skip
@set_option
@key_options("calibration")
@count_option(
    "--runs", "num_runs", high=1000, default=5,
    help="Trainings of each configuration, each in a new process.",
)  # fmt: skip
@count_option("--steps", "steps", high=10**6, default=20, help="Measured steps of each training.")
@count_option("--warmup", low=0, high=10**6, default=3, help="Warm-up steps before them.")
@click.option(
    "--launcher", metavar="COMMAND",
    help="Command that starts `-m meshwright train`, such as torchrun or srun ... python.  [default: this Python]",
)  # fmt: skip
@seconds_option("--timeout", "timeout_s", above=True, default=3600.0, help="Time after which one training is ended.")
@folder_option(
    "--out", "folder", default=Path("bench-train"),
    help="Folder of trainings.csv, trainings.json and one folder per training.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Keep the trainings in --out, and run only what they lack.")
@html_option
@json_option
def command() -> None:
    """Measure training throughput over a sweep of configurations.

    Trains every combination of run files and swept keys several times, and compares it with its prediction. Only
    steps are run: no checkpoints, validation, trackers or samples. Configurations take turns, so that a drift of the
    machine affects all of them alike.

    Every result is written at once: Ctrl-C keeps what was measured, and --resume continues. A training that runs out
    of memory, is refused or is killed is a row with its reason. Exits with 1 when no configuration could be trained.
    """
