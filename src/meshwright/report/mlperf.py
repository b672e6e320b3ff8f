"""A comparison of MLPerf results: its tables for the terminal and the page, and the page with the scores drawn."""

from __future__ import annotations

from itertools import cycle, repeat

from meshwright.answers.quantities import percent
from meshwright.answers.text_table import TextTable
from meshwright.mlperf.compare import PUBLISHED, ComparedGroup, ResultComparison
from meshwright.report.charts import BLUE, FAINT, WIDTH, across, alt, color_by, lines_of
from meshwright.report.figures import svg
from meshwright.report.html import PageSection, document, explained_figure, numbered_notes, page_table, paragraph
from meshwright.report.overview.figures import SERIES
from meshwright.version import __version__

MOST_LINES = 40
"""Results of a figure with a line each; more of them stand on the line of their group."""


def tables_of(found: ResultComparison) -> list[TextTable]:
    """The results, each group, and ratios between groups."""
    is_mixed = any(r.label != PUBLISHED for g in found.groups for r in g.results)
    results = [
        (
            g.benchmark, g.round, _size(g), r.submitter, r.system, f"{r.score_min:.2f}",
            *(["" if r.label == PUBLISHED else "unverified"] if is_mixed else []),
        )
        for g in found.groups
        for r in g.results
    ]  # fmt: skip
    groups = [
        (
            g.benchmark, g.round, _size(g), len(g.results), f"{g.mean_min:.2f}",
            f"{g.maker.score_min:.2f}" if g.maker else "", f"{g.partner_mean_min:.2f}" if g.partner_mean_min else "",
            "" if g.spread is None else percent(g.spread),
        )
        for g in found.groups
    ]  # fmt: skip
    ratios = [
        (
            r.benchmark, f"{r.num_accelerators:,}" if r.num_accelerators else "not stated", r.faster, r.slower,
            f"{r.ratio:.2f}", r.of,
        )
        for r in found.generations
    ]  # fmt: skip
    first = ("benchmark", "round", "on")
    tables = [
        TextTable(
            title="Results", rows=results,
            headings=(*first, "submitter", "system", "minutes", *(["status"] if is_mixed else [])),
            text_columns=("round", "on", "submitter", "system", "status"),
        ),
        TextTable(
            title="By accelerator, minutes", headings=(*first, "sets", "mean", "maker", "partners", "spread"),
            rows=groups, text_columns=("round", "on"),
        ),
        TextTable(
            title="Ratios", headings=("benchmark", "accelerators", "faster", "slower", "ratio", "of"), rows=ratios,
            text_columns=("faster", "slower", "of"),
        ),
    ]  # fmt: skip
    return [table for table in tables if table.rows]


def _size(group: ComparedGroup) -> str:
    return f"{group.num_accelerators or '?'} {group.accelerator}"


def comparison_page(found: ResultComparison, *, command: str) -> str:
    """The whole page."""
    tables = tables_of(found)
    sections = [PageSection(title=t.title, parts=[page_table(t)]) for t in tables]
    num_results = sum(len(g.results) for g in found.groups)
    if num_results:
        data = paragraph(f"The data is the table {tables[0].title}.")
        picture, legend = scores_svg(found)
        drawn = explained_figure(picture, title="Minutes to the target", data=data, command=command, legend=legend)
        sections.insert(0, PageSection(title="Scores", parts=[drawn], is_wide=True))
    sections.append(PageSection(title="Endnotes", parts=[numbered_notes(found.endnotes)]))
    benchmarks = ", ".join(dict.fromkeys(g.benchmark for g in found.groups))
    lead = paragraph(f"{num_results:,} results: {benchmarks}. Less is better.", css_class="lead")
    return document(
        title="Results of MLPerf Training", lead=lead, sections=sections, footer=f"Meshwright {__version__}."
    )


def scores_svg(found: ResultComparison) -> tuple[str, list[tuple[str, str]]]:
    """Each result as a point, the fastest first, and the legend. Many results stand on the line of their group."""
    benchmarks = {g.benchmark for g in found.groups}
    groups = [(g, f"{_size(g)}, {g.round}" + (f", {g.benchmark}" if len(benchmarks) > 1 else "")) for g in found.groups]
    each = [(on, f"{r.submitter}, {_size(g)}, {r.system}", r.score_min) for g, on in groups for r in g.results]
    is_long = len(each) > MOST_LINES
    rows = [{"name": on if is_long else name, "minutes": score, "on": on} for on, name, score in each]
    rows.sort(key=lambda row: row["minutes"])
    colors = dict(zip(dict.fromkeys(on for _, on in groups), repeat(BLUE) if is_long else cycle(SERIES), strict=False))
    base = lines_of(rows, labelLimit=360).encode(x=across("minutes", title="minutes", tickCount=6))
    points = base.mark_point(filled=True, size=70, opacity=0.7 if is_long else 1).encode(color=color_by("on", colors))
    drawn = points if is_long else base.mark_rule(color=FAINT).encode(x2=alt.datum(0)) + points
    picture = svg(drawn.properties(width=WIDTH - 120, height={"step": 22}), title="Minutes to the target")
    return picture, [] if is_long else list(colors.items())
