"""`meshwright bench train`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.options import calibration_option, html_option, json_option, set_option
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
@calibration_option
@click.option(
    "--runs", "num_runs", type=click.IntRange(1, 1000), default=5, show_default=True, metavar="N",
    help="Trainings of each configuration, each in a new process.",
)  # fmt: skip
@click.option(
    "--steps", "steps", type=click.IntRange(1, 10**6), default=20, show_default=True, metavar="N",
    help="Measured steps of each training.",
)  # fmt: skip
@click.option(
    "--warmup", type=click.IntRange(0, 10**6), default=3, show_default=True, metavar="N",
    help="Warm-up steps before them.",
)  # fmt: skip
@click.option(
    "--launcher", metavar="COMMAND",
    help="Command that starts `-m meshwright train`, such as torchrun or srun ... python.  [default: this Python]",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=3600.0, show_default=True,
    metavar="SECONDS", help="Time after which one training is ended.",
)  # fmt: skip
@click.option(
    "--out", "folder", type=click.Path(file_okay=False, path_type=Path), default=Path("bench-train"),
    show_default=True, metavar="DIR", help="Folder of trainings.csv, trainings.json and one folder per training.",
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
