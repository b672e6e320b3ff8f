"""`meshwright tune`: a group; each of its commands tunes one thing and changes nothing unless told to."""

from __future__ import annotations

import click

from meshwright.cli.main import LazyGroup, Verb

TOPICS: dict[str, Verb] = {
    "system": Verb(
        target="meshwright.cli.tune_system:command",
        section="What to tune",
        help="Settings of the kernel: clocks, sleep states, memory, network.",
    ),
}


@click.group(
    "tune",
    cls=LazyGroup,
    verbs=TOPICS,
    invoke_without_command=True,
    epilog="\b\nExamples:\n  meshwright tune system",
)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Make this node ready for training. Nothing changes without --apply."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
