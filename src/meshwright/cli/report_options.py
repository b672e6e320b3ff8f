"""Options of `compare` and `report`: the forms in which a report is written."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from meshwright.cli.options import Function, file_option
from meshwright.cli.output import note, write, write_html
from meshwright.targets import load

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


def write_page(page: str, found: Any, *, path: Path | None, **about: Any) -> None:
    """Draw the page of this command line by "module:function", write it if it is asked for, and say so."""
    write(path, lambda target: write_html(page, found, path=target, command=typed(), **about))


def write_forms(found: Any, *, page: str, markdown: str, figures: str, options: Mapping[str, Any]) -> bool:
    """Write the forms that `options` name, and say so; True if there is one.

    `page`, `markdown` and `figures` are the functions that draw them, each as "module:function".
    """
    write_page(page, found, path=options["html_path"])
    write(
        options["markdown_path"],
        lambda path: load("meshwright.report.html:write_page")(load(markdown)(found), path=path),
    )
    for form in ("png", "svg"):
        if folder := options[f"{form}_folder"]:
            draw = load("meshwright.report.figures:write_figures")
            for path in draw(load(figures)(found), folder=folder, form=form):
                note(f"wrote {path}")
    return any(options[name] for name in ("html_path", "markdown_path", "png_folder", "svg_folder"))
