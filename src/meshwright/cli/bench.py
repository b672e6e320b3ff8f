"""`meshwright bench`: a group; each of its commands measures one kind of thing and keeps the records."""

from __future__ import annotations

import click

from meshwright.cli.main import LazyGroup, Verb

KINDS: dict[str, Verb] = {
    "device": Verb(
        target="meshwright.cli.bench_device:command",
        section="What to measure",
        help="Matrix products, attention, memory, optimizer, collectives.",
    ),
}


@click.group(
    "bench",
    cls=LazyGroup,
    verbs=KINDS,
    invoke_without_command=True,
    epilog="\b\nExamples:\n  meshwright bench device --budget 60s",
)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Measure, and keep the records."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
