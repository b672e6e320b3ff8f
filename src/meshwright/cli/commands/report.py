"""`meshwright report`: one page about records, or about the source documents."""

from __future__ import annotations

from typing import Any

from meshwright.api.question import ask
from meshwright.api.report import report_records, report_sources
from meshwright.cli.options import figure_options, html_option, markdown_option
from meshwright.cli.output import emit_json, print_text_tables, progress, wants_json, write_forms
from meshwright.cli.verbs import verb
from meshwright.errors import InputError
from meshwright.targets import load

SOURCES = "sources"
"""Argument that stands for the report on the source documents."""


@verb("report", question="meshwright.api.report:report_records")
@html_option
@markdown_option
@figure_options
def command(*, asked: dict[str, Any], **options: Any) -> None:
    """Report on records, estimates and published figures as one page.

    RECORDS are folders of records (all below them count), run files, claim:ID, mlperf:NAME or points:KEY=TEXT, as in
    `compare`. The page opens offline: summary, throughput, MFU, loss, memory, time by kind of kernel, pipeline,
    scaling, predicted against measured, serving, cost, endnotes.
    Each figure has its data and the command that makes it.

    `sources` is the report on the source documents: every printed figure beside the prediction, the
    value in published logs and the measurement. A folder of that name is ./sources.
    """
    if asked["items"] == (SOURCES,):
        if any(value is not None for name, value in asked.items() if name != "items"):
            raise InputError("the report on the source documents has its own prices", hint="omit options of prices")
        with progress("predicting the claims"):
            found = report_sources()
        home = "meshwright.report.sources.page"
    else:
        found = ask(report_records, asked)
        home = "meshwright.report.overview.page"
    is_written = write_forms(found, markdown=f"{home}:markdown", figures=f"{home}:figures_of", options=options)
    if wants_json():
        emit_json(found.to_dict())
    elif not is_written:
        print_text_tables(load(f"{home}:terminal_tables")(found))
