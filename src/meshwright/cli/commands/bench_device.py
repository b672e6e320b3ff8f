"""`meshwright bench device`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.options import (
    budget_option,
    count_option,
    folder_option,
    json_option,
    numbers,
    run_argument,
    set_option,
)
from meshwright.cli.verbs import verb

MAX_PROCESSES = 64


@verb(
    "device",
    body="meshwright.cli.bench_device:run",
    examples=[
        "meshwright bench device",
        "meshwright bench device examples/runs/tiny-llama-cpu.yaml --budget 30s",
        "meshwright bench device --model llama3.1-8b --families gemm,attention --out bench/gpu --resume",
    ],
)
@run_argument(required=False)
@set_option
@click.option(
    "--model", metavar="MODEL",
    help="Measure the shapes of this catalogue model first, instead of those of a run file.",
)  # fmt: skip
@count_option(
    "--seq", "sequence_length", metavar="TOKENS", default=2048,
    help="Sequence length of --model in tokens.",
)  # fmt: skip
@click.option(
    "--families", metavar="F,F,...",
    help="What to measure, of gemm, attention, memory, elementwise, optimizer, launch, transfer, training and "
    "collectives.  [default: all]",
)  # fmt: skip
@budget_option(default="170s", help="Time to measure, split over the families: 90s, 3m, 1h.")
@folder_option(
    "--out", "folder", default=Path("bench"),
    help="Folder of the results, records.csv and records.json.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Keep the records in --out, and measure only what they lack.")
@click.option(
    "--processes", "num_processes", callback=numbers(low=1, high=MAX_PROCESSES, example="2,4"), metavar="N,N,...",
    help="Numbers of local processes for collectives and training.  [default: 2, 4, ... up to the number of GPUs; "
    "2,4 on a CPU]",
)  # fmt: skip
@json_option
def command() -> None:
    """Measure GEMMs, attention, memory, training steps and collectives of this machine.

    Measures the shapes of a model and its plan first, in the number formats of the run, then a grid of shapes. Each
    measurement is repeated until its median is known to 3 %, or until its part of the time budget is used. Every
    result is written at once: Ctrl-C keeps what was measured, and --resume continues.

    `meshwright calibrate DIR` turns the records into a calibration for the planner.
    """
