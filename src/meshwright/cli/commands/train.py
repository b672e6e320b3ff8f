"""`meshwright train`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import file_option
from meshwright.cli.question import key_options
from meshwright.cli.verbs import verb


@verb("train", question="meshwright.api.train:train", without=("quiet",), body="meshwright.cli.train:run")
@key_options("calibration")
@click.option(
    "--profile", "profile", is_flag=True,
    help="Profile three steps after the first five: write a trace, and the time by kind of kernel.",
)  # fmt: skip
@click.option(
    "--profile-steps", "profile_steps", metavar="FIRST:LAST",
    help="Profile these steps, both included; the first step is 1.",
)  # fmt: skip
@click.option(
    "--only-steps", is_flag=True, help="Write the record only: no sample, adapters or report after the last step.",
)  # fmt: skip
@click.option(
    "--dry-run", is_flag=True,
    help="Print the plan, its prediction and the folder; with --html the data too, whose tokens stay in the cache.",
)  # fmt: skip
@file_option("--html", "html_path", help="With --dry-run: write the data as a self-contained HTML page.")
def command() -> None:
    """Train a model on the CPU, one accelerator or many.

    Trains with the engine that the run file names, on the accelerators of this machine, or on its CPU where there are
    none. A plan of several processes starts them here; under torchrun each of its processes runs this command. With
    `parallel: auto` the planner chooses the plan.

    Steps, the resolved run, the record and a report go to --out. SIGTERM, SIGUSR1 and Ctrl-C save a checkpoint and
    stop; --resume continues from the newest checkpoint, and --resume-or-begin does where there is one. The run file
    must have its model, data, tokenizer, seed and task; schedule, batch, plan and precision may differ. SIGUSR2
    makes the processes write their stacks to DIR/stacks.
    """
