"""`meshwright tune`: a group of commands; each tunes one thing, and changes nothing without --apply or --write."""

from __future__ import annotations

import click

from meshwright.cli.options import (
    budget_option,
    count_option,
    file_option,
    html_option,
    json_option,
    numbers,
    root_option,
    run_argument,
    seconds_option,
    write_option,
)
from meshwright.cli.question import key_options
from meshwright.cli.verbs import verb, verb_group


@verb(
    "system",
    body="meshwright.cli.tune_system:run",
    examples=[
        "meshwright tune system",
        "meshwright tune system --why --only cpu-governor,numa-balancing",
        "sudo meshwright tune system --apply --skip address-randomization",
        "meshwright tune system --restore",
        "meshwright tune system --root /host --json",
    ],
)
@click.option("--apply", "is_apply", is_flag=True, help="Change the settings; their old values are saved first.")
@click.option("--restore", "is_restore", is_flag=True, help="Restore the saved values.")
@click.option("--only", metavar="NAMES", help="These settings only, separated by commas.")
@click.option("--skip", metavar="NAMES", help="All settings but these.")
@click.option("--why", is_flag=True, help="Explain every setting: its benefit, its risk and its source.")
@file_option(
    "--state",
    help="File of the saved values.  [default: meshwright/tune-system.json in the XDG state folder]",
)  # fmt: skip
@root_option
@json_option
def system() -> None:
    """Show, change or restore kernel settings that affect training.

    Without --apply it is a dry run that prints what would change. --apply saves the value of every setting and then
    changes all of them or none: if one cannot be changed, the others are restored and the exit code is 1. --restore
    restores the saved values. Settings that this process cannot read or write are skipped, with the reason. Changes
    need root, and last until the node restarts.
    """


MAX_WORKERS = 256  # `data.workers` of the run file


@verb(
    "dataloader",
    body="meshwright.cli.tune_dataloader:run",
    examples=[
        "meshwright tune dataloader examples/runs/tiny-llama-cpu.yaml",
        "meshwright tune dataloader run.yaml --workers 0,1,2,4,8,16 --budget 3m --apply",
        "meshwright tune dataloader run.yaml --step-time 1.8 --write tuned.yaml --json",
    ],
)
@run_argument()
@key_options("overrides")
@click.option(
    "--workers", "counts", callback=numbers(low=0, high=MAX_WORKERS, example="0,1,2,4", word="auto"),
    default="auto", show_default=True, metavar="N,N,...",
    help="Numbers of threads to try, 0 to 256. 0 reads in the training thread; auto: up to the cores of a process.",
)  # fmt: skip
@seconds_option(
    "--step-time", "step_s", above=True,
    help="Measured time of a training step.  [default: the planner's estimate]",
)  # fmt: skip
@budget_option(default="60s", help="Time to measure, as in 90s, 3m or 1h; every number is measured at least 3 times.")
@write_option(help="Write a copy of the run file with the numbers found.")
@click.option("--apply", "is_apply", is_flag=True, help="Write the numbers found into RUN.yaml.")
@json_option
def dataloader() -> None:
    """Find the number of data loading threads for training and validation.

    Reads the run's own data, with its tokenizer and sequence length, with each number of threads: at full speed, and
    with a consumer that takes as long as a training step. Training gets the smallest number with which no step waits.
    Validation is short, and gets the smallest number with which a whole pass, start included, is no slower.

    Changes nothing without --write or --apply. They set data.workers and train.evaluate.workers in a run file.
    """


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
@key_options("overrides")
@file_option(
    "--out", "out",
    help="Tuning file to write.  [default with --write or --apply: the run file's name with .gemm.json]",
)  # fmt: skip
@write_option(help="Write a copy of the run file that names the tuning file.")
@click.option("--apply", "is_apply", is_flag=True, help="Name the tuning file in RUN.yaml.")
@budget_option(default="60s", help="Time to measure, one part to search and one to confirm: 90s, 3m, 1h.")
@json_option
def gemm() -> None:
    """Find the fastest GEMM kernels, library and threads for a run.

    Measures every GEMM of the run's model and plan as it runs now, tries the alternatives, and measures again, before
    and after in turns. The alternatives are, on a CPU, the number of threads and a route for each GEMM; on NVIDIA
    GPUs, the library; on AMD GPUs, every kernel of rocBLAS and hipBLASLt through PyTorch's TunableOp. Only what is
    significantly faster is kept. Results change by rounding only: number formats and the precision of fp32 GEMMs
    stay.

    --out writes a tuning file for this device and this version of PyTorch. A run names it as gemm_tuning; --apply and
    --write do so. If nothing is faster, nothing is written.
    """


@verb(
    "learning-rate",
    body="meshwright.cli.tune_learning_rate:run",
    examples=[
        "meshwright tune learning-rate examples/runs/tiny-llama-cpu.yaml",
        "meshwright tune learning-rate run.yaml --steps 200 --from 1e-6 --to 0.1 --html rates.html",
        "meshwright tune learning-rate run.yaml --set optimizer.name=muon --write tuned.yaml --json",
    ],
)
@run_argument()
@key_options("overrides")
@click.option("--from", "low", type=float, default=1e-7, show_default=True, metavar="RATE", help="First rate.")
@click.option("--to", "high", type=float, default=1.0, show_default=True, metavar="RATE", help="Last rate.")
@count_option(
    "--steps", "num_steps", low=10, high=100_000, default=100,
    help="Steps from the first rate to the last.",
)  # fmt: skip
@html_option
@write_option(help="Write a copy of the run file with the suggested rate.")
@click.option("--apply", "is_apply", is_flag=True, help="Write the suggested rate into RUN.yaml.")
@json_option
def learning_rate() -> None:
    """Find a learning rate for a run by a range test.

    Trains the run's own model on its own data, with its batch, plan and optimizer, while the rate rises exponentially
    from step to step, until the loss diverges. The suggestion is the rate of the steepest descent of the smoothed loss,
    or a tenth of the rate of divergence where that is smaller (Smith 2017; fastai's lr_find). --html draws the curve.

    Saves nothing of the training. Changes nothing without --write or --apply. They set optimizer.learning_rate.
    """


command = verb_group(
    "tune",
    about="""Tune this node, or a run on it. Nothing changes without --apply or --write.

Each command measures or checks first, prints what it would change, and changes it only if asked to.""",
    verbs={"What to tune": [system, dataloader, gemm, learning_rate]},
    examples=["meshwright tune system", "meshwright tune dataloader run.yaml --apply"],
)
