"""`meshwright report`: options and help."""

from __future__ import annotations

from meshwright.cli.options import figure_options, html_option, json_option, markdown_option
from meshwright.cli.verbs import verb


@verb(
    "report",
    question="meshwright.api.report:report_records",
    body="meshwright.cli.report:run",
    examples=[
        "meshwright report runs/a runs/b --html report.html",
        "meshwright report runs --html report.html --price 2.5 --utilization 0.8",
        "meshwright report run.yaml runs/a --markdown report.md --png figures",
        "meshwright report runs --capital 40000 --life 5 --usd-per-kwh 0.1 --json",
        "meshwright report sources --html sources.html",
    ],
)
@html_option
@markdown_option
@figure_options
@json_option
def command() -> None:
    """Report on records, estimates and published figures as one page.

    RECORDS are folders of records (all below them count), run files, claim:ID, mlperf:NAME or points:KEY=TEXT, as in
    `compare`. The page opens offline: summary, throughput, MFU, loss, memory, time by kind of kernel, pipeline,
    scaling, predicted against measured, serving, cost, endnotes.
    Each figure has its data and the command that makes it.

    `sources` is the report on the source documents: every printed figure beside what is predicted, what published logs
    give and what was measured. A folder of that name is ./sources.
    """
