"""`meshwright examples`: the run files and data of the tutorials, copied where a user can change them."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.catalog.lookup import copy_examples
from meshwright.cli.options import PathType
from meshwright.cli.output import emit, print_line
from meshwright.cli.verbs import verb


@verb("examples")
@click.argument("folder", metavar="FOLDER", type=PathType())
def command(*, folder: Path) -> None:
    """Copy the example runs, their data and the notebook into a folder.

    The tutorials use them as `examples/runs/NAME.yaml`. No file is overwritten: one that is there and is another ends
    the command before anything is written.
    """
    document = {"folder": str(folder), "files": [str(path) for path in copy_examples(folder)]}
    emit(document, lambda found: print_line("\n".join(found["files"])))
