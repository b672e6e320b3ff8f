"""`meshwright catalog`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb


@verb(
    "catalog",
    body="meshwright.cli.catalog:run",
    examples=[
        "meshwright catalog models",
        "meshwright catalog models moe-2t",
        "meshwright catalog accelerators mi355x --json",
        "meshwright catalog clusters gb200-4x18",
        "meshwright catalog claims scale_06 --predict",
        "meshwright catalog runs llama3-8b",
        "meshwright catalog template accelerator",
        "meshwright catalog check my.toml",
    ],
)
@click.argument(
    "kind",
    metavar="KIND",
    type=click.Choice(["models", "accelerators", "clusters", "claims", "runs", "template", "check"]),
)
@click.argument("name", required=False)
@click.option("--predict", is_flag=True, help="claims, runs: also predict them; half a minute for all.")
@json_option
def command() -> None:
    """Look up models, accelerators, clusters, claims and run files, with sources.

    \b
    models        shapes and parameter counts
    accelerators  peak rates, memory and links, per device
    clusters      fabrics, and any cluster by its name: ACCELERATOR-DEVICESxNODES
    claims        published performance claims
    runs          run files that ship; every command takes their names in place of a RUN.yaml
    template      `template accelerator`: a file to describe your own accelerator in, with comments
    check         `check FILE.toml`: all errors of such a file, or what plans take from it and what they assume

    Without NAME: a table of all. With NAME: all values of one entry, their sources, and where sources disagree.
    """
