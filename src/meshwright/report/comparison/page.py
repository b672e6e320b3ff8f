"""The page of a comparison: means, ratios, what differs, warnings, the split gap, endnotes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.answers.comparison.study import METHOD, SideComparison, endnotes
from meshwright.answers.text_table import TextTable
from meshwright.report.comparison.figures import gap_chart, gap_legend, ratios_chart, ratios_legend
from meshwright.report.comparison.tables import (
    differing_table,
    gap_tables,
    hardware_table,
    means_table,
    ratios_table,
    title,
)
from meshwright.report.figures import svg
from meshwright.report.fragment import fragment
from meshwright.report.html import (
    PageSection,
    document,
    explained_figure,
    linked,
    paragraph,
    sortable_table,
    text_table,
    tiles,
)
from meshwright.version import __version__

ALL_ROWS = 10**9


def comparison_page(found: SideComparison, *, command: str = "") -> str:
    """The whole page. `command` is the command line that makes it."""
    return document(
        title=title(found), lead=_lead(found), sections=sections(found, command=command),
        footer=f"Meshwright {__version__}.",
    )  # fmt: skip


def comparison_fragment(found: SideComparison) -> str:
    """The comparison for a notebook: tables without a script."""
    return fragment(title(found), [text_table(t) for t in (means_table(found), differing_table(found))])


def figures_of(found: SideComparison) -> Iterator[tuple[str, Any]]:
    """Name and chart of each figure."""
    for mean in found.means:
        yield f"{mean.metric}, {mean.other} against {mean.baseline}", ratios_chart(mean)
    for gap in found.gaps:
        yield f"Time per token, {gap.other} against {gap.baseline}, {gap.workload}", gap_chart(gap)


def sections(found: SideComparison, *, command: str) -> list[PageSection]:
    """Every section, in the order of the page."""
    parts = [_table(means_table(found)), paragraph(METHOD + ".")]
    listed = [PageSection(title="Means", parts=parts, is_wide=True)]
    if found.cautions:
        texts = [paragraph(text[:1].upper() + text[1:] + ".", css_class="caution") for text in found.cautions]
        listed.append(PageSection(title="Read with care", parts=texts))
    listed.append(PageSection(title="What differs", parts=[_table(differing_table(found))]))
    for mean in found.means:
        name = f"{mean.metric}, {mean.other} against {mean.baseline}"
        drawn = explained_figure(
            svg(ratios_chart(mean), title=name), title=name, command=command, legend=ratios_legend(mean),
            data=_table(ratios_table(mean, most=ALL_ROWS)),
        )  # fmt: skip
        listed.append(PageSection(title=f"{mean.metric[:1].upper()}{mean.metric[1:]}: {mean.other}", parts=[drawn]))
    for gap, shown in zip(found.gaps, gap_tables(found), strict=True):
        drawn = explained_figure(
            svg(gap_chart(gap), title=shown.title), title=shown.title, command=command, legend=gap_legend(),
            data=_table(shown),
        )  # fmt: skip
        listed.append(PageSection(title=f"Where the time goes: {gap.other}", parts=[drawn, paragraph(shown.caption)]))
    if found.hardware:
        listed.append(PageSection(title="Hardware, beside its datasheets", parts=[_table(hardware_table(found))]))
    notes = "".join(f"<li>{linked(text)}</li>" for text in endnotes(found.sides))
    listed.append(PageSection(title="Endnotes", parts=[f'<ol class="notes">{notes}</ol>'], is_wide=True))
    return listed


def _lead(found: SideComparison) -> str:
    kinds = ", ".join(f"{s.name} ({s.kind})" for s in found.sides)
    like = " Like for like: the same model, tokens, batch and FLOP rule." if found.is_like_for_like else ""
    shown = [
        (
            f"{m.value:.2f} x", f"{m.metric}, {m.other}",
            f"n = {m.n}" + (f", {m.low:.2f} to {m.high:.2f}" if m.low and m.high else ""),
        )
        for m in found.means[:8]
    ]  # fmt: skip
    return paragraph(f"Sides: {kinds}.{like}", css_class="lead") + tiles(shown)


def _table(shown: TextTable) -> str:
    below = paragraph(shown.caption) if shown.caption else ""
    return sortable_table(shown.headings, shown.rows, name=shown.title, text_columns=shown.text_columns) + below
