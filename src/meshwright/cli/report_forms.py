"""Forms of `compare` and `report`: a page, Markdown, and figures as files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.cli.output import note, write_html
from meshwright.cli.report_options import typed
from meshwright.targets import load


def write_forms(found: Any, *, page: str, markdown: str, figures: str, options: Mapping[str, Any]) -> bool:
    """Write the forms that `options` name, and say so; True if there is one.

    `page`, `markdown` and `figures` are the functions that draw them, each as "module:function".
    """
    if path := options["html_path"]:
        write_html(page, found, path=path, command=typed())
        note(f"wrote {path}")
    if path := options["markdown_path"]:
        load("meshwright.report.html:write_page")(load(markdown)(found), path=path)
        note(f"wrote {path}")
    for form in ("png", "svg"):
        if folder := options[f"{form}_folder"]:
            write = load("meshwright.report.figure_files:write_figures")
            for path in write(load(figures)(found), folder=folder, form=form):
                note(f"wrote {path}")
    return any(options[name] for name in ("html_path", "markdown_path", "png_folder", "svg_folder"))
