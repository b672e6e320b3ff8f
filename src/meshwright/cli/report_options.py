"""Options of `compare` and `report`: the forms in which a report is written."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from meshwright.cli.options import Function, file_option

markdown_option = file_option("--markdown", "markdown_path", help="Write the tables and notes as Markdown.")


def figure_options(function: Function) -> Function:
    """--png DIR and --svg DIR, passed on as `png_folder` and `svg_folder`."""
    for form in ("svg", "png"):
        function = click.option(
            f"--{form}",
            f"{form}_folder",
            type=click.Path(file_okay=False, path_type=Path),
            metavar="DIR",
            help=f"Write each figure as one {form.upper()} file.",
        )(function)
    return function


def typed() -> str:
    """The command line that is running, as it is typed."""
    return shlex.join(["meshwright", *sys.argv[1:]])
