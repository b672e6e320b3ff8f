"""`meshwright report`: one page about records, or about the source documents."""

from __future__ import annotations

from typing import Any

from meshwright.api.question import ask
from meshwright.api.report import report_records, report_sources
from meshwright.cli.output import emit_json, print_text_tables, progress, write_forms
from meshwright.errors import InputError
from meshwright.targets import load

SOURCES = "sources"
"""Argument that stands for the report on the source documents."""


def run(*, asked: dict[str, Any], as_json: bool, **options: Any) -> None:
    """Collect, and write the forms asked for."""
    if asked["items"] == (SOURCES,):
        if any(value is not None for name, value in asked.items() if name != "items"):
            raise InputError("the report on the source documents has its own prices", hint="omit options of prices")
        with progress("predicting the claims"):
            found = report_sources()
        home, page = "meshwright.report.sources.page", "source_page"
    else:
        found = ask(report_records, asked)
        home, page = "meshwright.report.overview.page", "record_page"
    is_written = write_forms(
        found, page=f"{home}:{page}", markdown=f"{home}:markdown", figures=f"{home}:figures_of", options=options
    )
    if as_json:
        emit_json(found.to_dict())
    elif not is_written:
        print_text_tables(load(f"{home}:terminal_tables")(found))
