"""`meshwright report`: one page about records, or about the source documents."""

from __future__ import annotations

from typing import Any

from meshwright.api.report import report_records, report_sources
from meshwright.cli.inference_options import given_terms
from meshwright.cli.output import emit_json, print_text_tables, progress
from meshwright.cli.report_forms import write_forms
from meshwright.errors import InputError
from meshwright.targets import load

SOURCES = "sources"
"""Argument that stands for the report on the source documents."""


def run(
    *,
    items: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Collect, and write the forms asked for."""
    given = given_terms(options)
    if items == (SOURCES,):
        if given["terms"] or given["ownership"]:
            raise InputError(
                "the report on the source documents has its own prices", hint="omit options of prices"
            )
        with progress("predicting the claims"):
            found = report_sources()
        home, page = "meshwright.report.sources.page", "source_page"
    else:
        found = report_records(*items, **given["terms"], **given["ownership"])
        home, page = "meshwright.report.overview.page", "record_page"
    is_written = write_forms(
        found,
        page=f"{home}:{page}",
        markdown=f"{home}:markdown",
        figures=f"{home}:figures_of",
        options=options,
    )
    if as_json:
        emit_json(found.to_dict())
    elif not is_written:
        print_text_tables(load(f"{home}:terminal_tables")(found))
