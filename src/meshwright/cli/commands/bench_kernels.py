"""`meshwright bench kernels`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.options import budget_option, count_option, folder_option, json_option
from meshwright.cli.verbs import verb


@verb(
    "kernels",
    body="meshwright.cli.bench_kernels:run",
    examples=[
        "meshwright bench kernels --ops swiglu,attention --tokens 256 --budget 20s",
        "meshwright bench kernels --models llama3.1-8b,deepseek-v3 --tokens 8192 --out bench/kernels",
    ],
)
@click.option("--ops", metavar="OP,OP,...", help="Operations to time.  [default: all that the device computes]")
@click.option(
    "--models", default="llama3.1-8b", show_default=True, metavar="MODEL,MODEL,...",
    help="Catalogue models whose shapes are timed.",
)  # fmt: skip
@count_option("--tokens", help="Tokens of the one sequence.  [default: 8192; 256 on a CPU]")
@click.option(
    "--formats", metavar="F,F", help="Number formats, of bf16 and fp32.  [default: bf16; fp32 on a CPU]"
)  # fmt: skip
@click.option(
    "--compile/--no-compile", "compiles", default=None, help="Time torch.compile too.  [default: on a GPU]"
)  # fmt: skip
@budget_option(default="120s", help="Time to measure, split over all routes of all calls: 90s, 3m, 1h.")
@folder_option(
    "--out", "folder", default=Path("bench-kernels"),
    help="Folder of kernels.json, tuned.json, records.csv and records.json.",
)  # fmt: skip
@json_option
def command() -> None:
    """Time all routes of the training kernels on the shapes of models.

    Each route of an operation runs on the same call, forward and backward: PyTorch eager (`reference`),
    `torch.compile`, our Triton kernels, and libraries where they are installed. Printed are time, share of the
    roofline, peak memory, and error against float64. A route that cannot serve a call says why.

    The folder has all rows (kernels.json), the fastest route of each call for a run's `kernels.tuned` (tuned.json),
    and what those take as records for `meshwright calibrate` (records.csv).
    """
