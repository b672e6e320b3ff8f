"""`meshwright tune system`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import file_option, json_option, root_option
from meshwright.cli.verbs import verb


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
def command() -> None:
    """Show, change or restore kernel settings that affect training.

    Without --apply it is a dry run that prints what would change. --apply saves the value of every setting and then
    changes all of them or none: if one cannot be changed, the others are restored and the exit code is 1. --restore
    restores the saved values. Settings that this process cannot read or write are skipped, with the reason. Changes
    need root, and last until the node restarts.
    """
