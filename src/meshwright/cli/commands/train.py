"""`meshwright train`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import (
    count_option,
    folder_option,
    force_option,
    json_option,
    run_argument,
    seconds_option,
    set_option,
)
from meshwright.cli.question import key_options
from meshwright.cli.verbs import verb


@verb(
    "train",
    body="meshwright.cli.train:run",
    examples=[
        "meshwright train examples/runs/tiny-llama-cpu.yaml",
        "meshwright train examples/runs/tiny-llama-cpu.yaml --set train.steps=20 --json",
        "meshwright train run.yaml --resume",
        "meshwright train run.yaml --branch --set train.seed=1",
        "meshwright train run.yaml --profile",
        "meshwright train run.yaml --dry-run",
    ],
)
@run_argument()
@set_option
@key_options("calibration")
@folder_option(
    "--out", "folder",
    help="Folder of the results.  [default: runs/NAME, or the next free runs/NAME-2, ...]",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Continue this run from its newest checkpoint.")
@click.option(
    "--branch", is_flag=True,
    help="Start a new run, with folders of its own, from the weights of the newest checkpoint.",
)  # fmt: skip
@force_option
@count_option("--max-restarts", low=0, default=0, help="Number of restarts after a process was lost.")
@click.option(
    "--profile", "profile", is_flag=True,
    help="Profile three steps after the first five: write a trace, and the time by kind of kernel.",
)  # fmt: skip
@click.option(
    "--profile-steps", "profile_steps", metavar="FIRST:LAST",
    help="Profile these steps, both included; the first step is 1.",
)  # fmt: skip
@seconds_option(
    "--timeout", "timeout_s", above=True, default=600.0,
    help="Time after which a step counts as hung: all processes write their stacks and end.",
)  # fmt: skip
@click.option(
    "--measure/--no-measure", "measure", default=None,
    help="Measure this machine for the prediction: again and for longer than 2 s, or not at all.  [default: once for "
    "a machine and a model, then reused]",
)  # fmt: skip
@click.option(
    "--only-steps", is_flag=True, help="Write the record only: no sample, adapters or report after the last step.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the plan, its prediction and the folder; train nothing.")
@json_option
def command() -> None:
    """Train a model on the CPU, one accelerator or many.

    Trains with the engine that the run file names, on the accelerators of this machine, or on its CPU where there are
    none. A plan of several processes starts them here; under torchrun each of its processes runs this command. With
    `parallel: auto` the planner chooses the plan.

    Steps, the resolved run, the record and a report go to --out. SIGTERM, SIGUSR1 and Ctrl-C save a checkpoint and
    stop; --resume continues from the newest checkpoint. Its model, data, tokenizer, seed and task must be those of the
    run file; schedule, batch, plan and precision may differ. SIGUSR2 makes the processes write their stacks to
    DIR/stacks.
    """
