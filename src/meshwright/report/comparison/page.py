"""The page of a comparison: means, ratios, what differs, warnings, the split gap, endnotes."""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from statistics import median
from typing import Any

from meshwright.answers.comparison.ratios import MeanRatio, Verdict
from meshwright.answers.comparison.study import METHOD, PARTS, Gap, SideComparison, endnotes, verdict_word
from meshwright.report.charts import (
    BLUE,
    GRAY,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    WIDTH,
    across,
    alt,
    axis_end,
    bounded_scale,
    color_by,
    lines_of,
    rule_at,
    stacked,
)
from meshwright.report.comparison.tables import (
    differing_table,
    gap_tables,
    hardware_table,
    means_table,
    ratios_table,
    title,
)
from meshwright.report.figures import svg
from meshwright.report.html import (
    PageSection,
    document,
    explained_figure,
    fragment,
    numbered_notes,
    page_table,
    paragraph,
    text_table,
    tiles,
)
from meshwright.report.training_figures import ratio_ticks
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
    parts = [page_table(means_table(found)), paragraph(METHOD + ".")]
    listed = [PageSection(title="Means", parts=parts, is_wide=True)]
    if found.cautions:
        texts = [paragraph(text[:1].upper() + text[1:] + ".", css_class="caution") for text in found.cautions]
        listed.append(PageSection(title="Read with care", parts=texts))
    listed.append(PageSection(title="What differs", parts=[page_table(differing_table(found))]))
    for mean in found.means:
        name = f"{mean.metric}, {mean.other} against {mean.baseline}"
        drawn = explained_figure(
            svg(ratios_chart(mean), title=name), title=name, command=command, legend=ratios_legend(mean),
            data=page_table(ratios_table(mean, most=ALL_ROWS)),
        )  # fmt: skip
        listed.append(PageSection(title=f"{mean.metric[:1].upper()}{mean.metric[1:]}: {mean.other}", parts=[drawn]))
    for gap, shown in zip(found.gaps, gap_tables(found), strict=True):
        drawn = explained_figure(
            svg(gap_chart(gap), title=shown.title), title=shown.title, command=command, legend=gap_legend(),
            data=page_table(shown),
        )  # fmt: skip
        listed.append(PageSection(title=f"Where the time goes: {gap.other}", parts=[drawn, paragraph(shown.caption)]))
    if found.hardware:
        listed.append(PageSection(title="Hardware, beside its datasheets", parts=[page_table(hardware_table(found))]))
    listed.append(PageSection(title="Endnotes", parts=[numbered_notes(endnotes(found.sides))], is_wide=True))
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


# --- figures ---


VERDICT_COLORS = {Verdict.WIN: GREEN, Verdict.LOSS: RED, Verdict.TIE: GRAY}
PART_COLORS = {"kernel_s": BLUE, "communication_s": ORANGE, "bubble_s": PURPLE, "host_s": RED}
MAX_BARS = 40
"""Workloads in one figure: the first ones; the table has all."""
NEAR = 2.0
"""Ratios this near to the median one are read on one axis; none of them is an outlier."""


def ratios_chart(mean: MeanRatio) -> Any:
    """One line a workload: ratio, interval and value; parity and the geometric mean as rules."""
    low, high = _ratio_ends(mean)
    ends = [low / 1.12, high * 1.2]
    scale = bounded_scale(ends)  # an outlier stands at the end of the axis
    rows = [
        {
            "workload": r.workload, "ratio": r.value, "low": r.low or r.value, "high": r.high or r.value,
            "verdict": r.verdict.value, "text": _ratio_text(r.value, low, high), "cut": not low <= r.value <= high,
        }
        for r in mean.ratios[:MAX_BARS]
    ]  # fmt: skip
    base, title = lines_of(rows, "workload", labelLimit=260), f"{mean.metric}: {mean.other} over {mean.baseline}"
    ticks = {"values": ratio_ticks(*ends), "format": "~r", "grid": True}
    x = across("ratio", scale=scale, title=f"{title}, above 1 is better", **ticks)
    color = color_by("verdict", {v.value: c for v, c in VERDICT_COLORS.items()})
    shape = alt.condition("datum.cut", alt.value("diamond"), alt.value("circle"))
    spread = base.mark_rule(strokeWidth=2, opacity=0.6)
    points = base.mark_point(filled=True, size=70, opacity=1).encode(x=x, color=color, shape=shape)
    texts = base.mark_text(dy=-9, color=INK).encode(x=across("ratio", scale=scale), text="text:N")
    layers = [
        *([rule_at(mean.value, scale=scale, color=BLUE, strokeDash=[5, 4])] if mean.n > 1 else []),
        rule_at(1.0, scale=scale, color=INK),
        spread.encode(x=across("low", scale=scale), x2="high:Q", color=color), points, texts,
    ]  # fmt: skip
    return alt.layer(*layers).properties(width=WIDTH, height={"step": 30})


def _ratio_ends(mean: MeanRatio) -> tuple[float, float]:
    """Ends of the axis: all ratios and intervals but outliers, which are far from the median ratio."""
    ratios = mean.ratios[:MAX_BARS]
    middle = median(r.value for r in ratios)
    longest = axis_end([max(log(NEAR), abs(log(r.value / middle))) for r in ratios])
    held = [r for r in ratios if abs(log(r.value / middle)) <= longest]
    ends = [e for r in held for e in (r.value, r.low or r.value, r.high or r.value)]
    return min(*ends, mean.value, 1.0), max(*ends, mean.value, 1.0)


def _ratio_text(value: float, low: float, high: float) -> str:
    text = f"{value:.2f}" if 0.1 <= value < 1000 else f"{value:.2g}" if value < 1 else f"{value:,.0f}"
    return f"\u00ab {text}" if value < low else f"{text} \u00bb" if value > high else text


def ratios_legend(mean: MeanRatio) -> list[tuple[str, str]]:
    """(name, colour) of what `ratios_chart` shows."""
    found = [(verdict_word(v, mean.metric), color) for v, color in VERDICT_COLORS.items() if mean.count(v)]
    low, high = _ratio_ends(mean)
    if any(not low <= r.value <= high for r in mean.ratios[:MAX_BARS]):
        found.append(("diamond: outside the axis, its value stands beside it", GRAY))
    return found + ([("geometric mean", BLUE)] if mean.n > 1 else [])


def gap_chart(gap: Gap) -> Any:
    """Two stacked bars: microseconds of a device per token by cause."""
    rows: list[dict[str, Any]] = []
    least = 0.08 * max(gap.before.total_s, gap.after.total_s) * 1e6  # a shorter bar has no room for its number
    for name, parts in ((gap.baseline, gap.before), (gap.other, gap.after)):
        rows += stacked({label: getattr(parts, part) * 1e6 for part, label in PARTS.items()}, side=name)
    for row in rows:
        size = row["end"] - row["start"]
        row |= {"middle": row["start"] + size / 2, "text": f"{size:,.1f}" if size > least else ""}
    base, color = lines_of(rows, "side"), color_by("part", dict(gap_legend()))
    x = across("start", title="microseconds of one device per token", tickCount=7)
    bars = base.mark_bar(height={"band": 0.7}).encode(x=x, x2="end:Q", color=color)
    texts = base.mark_text(color="white").encode(x="middle:Q", text="text:N")
    return alt.layer(bars, texts).properties(width=WIDTH, height={"step": 34})


def gap_legend() -> list[tuple[str, str]]:
    """(name, colour) of the parts."""
    return [(PARTS[part], color) for part, color in PART_COLORS.items()]
