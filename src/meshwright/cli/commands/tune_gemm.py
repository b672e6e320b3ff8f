"""`meshwright tune gemm`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import budget_option, file_option, json_option, run_argument, set_option, write_option
from meshwright.cli.verbs import verb


@verb(
    "gemm",
    body="meshwright.cli.tune_gemm:run",
    examples=[
        "meshwright tune gemm examples/runs/tiny-llama-cpu.yaml",
        "meshwright tune gemm run.yaml --out tuned.json --budget 5m",
        "meshwright tune gemm run.yaml --apply --json",
    ],
)
@run_argument()
@set_option
@file_option(
    "--out", "out",
    help="Tuning file to write.  [default with --write or --apply: the run file's name with .gemm.json]",
)  # fmt: skip
@write_option(help="Write a copy of the run file that names the tuning file.")
@click.option("--apply", "is_apply", is_flag=True, help="Name the tuning file in RUN.yaml.")
@budget_option(default="60s", help="Time to measure, one part to search and one to confirm: 90s, 3m, 1h.")
@json_option
def command() -> None:
    """Find the fastest GEMM kernels, library and threads for a run.

    Measures every GEMM of the run's model and plan as it runs now, tries the alternatives, and measures again, before
    and after in turns. The alternatives are, on a CPU, the number of threads and a route for each GEMM; on NVIDIA
    GPUs, the library; on AMD GPUs, every kernel of rocBLAS and hipBLASLt through PyTorch's TunableOp. Only what is
    significantly faster is kept. Results change by rounding only: number formats and the precision of fp32 GEMMs
    stay.

    --out writes a tuning file for this device and this version of PyTorch. A run names it as gemm_tuning; --apply and
    --write do so. If nothing is faster, nothing is written.
    """
