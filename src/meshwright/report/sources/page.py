"""The page of the source documents: summary, slips, figures, and every claim with its answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from meshwright.answers.sources.study import AnswerClass, SourceReport, SourceRow
from meshwright.answers.text_table import TextTable
from meshwright.report.comparison.tables import markdown_table
from meshwright.report.html import (
    PageSection,
    document,
    fragment,
    numbered_notes,
    page_table,
    paragraph,
    text_table,
    tiles,
)
from meshwright.report.sources.figures import source_figures
from meshwright.report.sources.tables import TEXTS, claims_table, document_of, slips_table, summary_table
from meshwright.version import __version__

TITLE, LEAD = TEXTS["title"], TEXTS["lead"]
COMMAND = "meshwright report sources --html sources.html"
CLASSES = {AnswerClass(name): text for name, text in TEXTS["classes"].items()}


def source_page(found: SourceReport, *, command: str = "") -> str:
    """The whole page."""
    command = command or COMMAND
    parts = list(_sections(found, command=command))
    return document(
        title=TITLE, lead=_lead(found), sections=parts,
        footer=f"Meshwright {__version__}. {command}",
    )  # fmt: skip


def source_fragment(found: SourceReport) -> str:
    """The claims for a notebook: one table."""
    return fragment(found.summary(), [text_table(claims_table(found.rows, title="Claims"))])


def figures_of(found: SourceReport) -> Iterator[tuple[str, Any]]:
    """Name and chart of each figure."""
    for figure in source_figures(found):
        yield figure.title, figure.chart


def terminal_tables(found: SourceReport) -> list[TextTable]:
    """Tables for the terminal."""
    return [summary_table(found), slips_table(found.slips)]


def markdown(found: SourceReport) -> str:
    """The report without its figures: summary, slips, every claim, data of the figures, notes."""
    lines = [f"# {TITLE}", "", LEAD, "", f"`{COMMAND}` makes this page again.", ""]
    tables = [summary_table(found), slips_table(found.slips)]
    tables += [claims_table(rows, title=name) for name, rows in _by_document(found).items()]
    tables += [figure.data for figure in source_figures(found)]
    for table in tables:
        lines += [f"## {table.title}", "", *markdown_table(table), ""]
    lines += ["## Classes", "", *(f"- {c.value}: {text}" for c, text in CLASSES.items()), ""]
    return "\n".join([*lines, "## Endnotes", "", *(f"{i}. {t}" for i, t in enumerate(endnotes(found), start=1)), ""])


def endnotes(found: SourceReport) -> list[str]:
    """Documents, MLPerf, measurements, and the plans that predictions rest on."""
    notes = [f"Source: {name}" for name in dict.fromkeys(r.claim.document for r in found.rows)]
    notes.append(
        "MLPerf results: github.com/mlcommons/training_results_v5.0 and _v5.1, closed and open divisions; logs do not "
        "hold the precision. "
        "9.96 minutes (s65_06) were not submitted: a result not verified by MLCommons Association. The "
        "MLPerf name and logo are registered and unregistered trademarks of MLCommons Association"
    )
    measured = dict.fromkeys(r.measured for r in found.rows if r.measured is not None)
    notes += [f"Measured here, {m.date}, {m.device}: {m.value}. {m.text} `{m.command}`" for m in measured if m]
    notes += [f"{r.claim.claim_id}: {'; '.join(r.plans[:4])}. `{r.answer.commands[0]}`" for r in found.rows if r.plans]
    return notes


def _sections(found: SourceReport, *, command: str) -> Iterator[PageSection]:
    classes = TextTable(
        title="Classes of answers", headings=("class", "means"), rows=[(c.value, t) for c, t in CLASSES.items()],
        text_columns=("means",),
    )  # fmt: skip
    yield PageSection(title="Summary", parts=[page_table(summary_table(found)), page_table(classes)], is_wide=True)
    yield PageSection(title="Slips in the documents", parts=[page_table(slips_table(found.slips))], is_wide=True)
    figures = source_figures(found)
    for name in dict.fromkeys(f.section for f in figures):
        parts = []
        for figure in (f for f in figures if f.section == name):
            parts.append(figure.html(command=command))
            parts += [paragraph(figure.text)] if figure.text else []
        yield PageSection(title=name, parts=parts)
    for name, rows in _by_document(found).items():
        yield PageSection(title=name, parts=[page_table(claims_table(rows, title=name))], is_wide=True)
    yield PageSection(title="Endnotes", parts=[numbered_notes(endnotes(found))], is_wide=True)


def _by_document(found: SourceReport) -> dict[str, list[SourceRow]]:
    groups: dict[str, list[SourceRow]] = defaultdict(list)
    for row in found.rows:
        groups[document_of(row)].append(row)
    return groups


def _lead(found: SourceReport) -> str:
    rated = [r for r in found.rows if r.agrees is not None]
    counts = {c: sum(r.answer_class is c for r in found.rows) for c in AnswerClass}
    shown = [
        (
            f"{sum(bool(r.agrees) for r in rated)} of {len(rated)}", "claims agree",
            "printed value in the interval or its rounding",
        ),
        (str(len(found.rows)), "claims", "each with an answer or a reason"),
        *((str(n), c.value, "") for c, n in counts.items() if n),
        (str(len(found.slips)), "slips", "wrong or contradictory in the documents"),
    ]  # fmt: skip
    return paragraph(LEAD, css_class="lead") + tiles(shown)
