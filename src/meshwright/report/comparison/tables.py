"""Tables of a comparison, for the terminal, Markdown and the page."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.answers.comparison.ratios import MeanRatio, Ratio, WithoutOne
from meshwright.answers.comparison.sides import SideValue
from meshwright.answers.comparison.study import SideComparison, endnotes, gap_rows, verdict_word, verdicts
from meshwright.answers.quantities import percent
from meshwright.answers.text_table import TextTable
from meshwright.units import format_bytes, format_seconds

MAX_ROWS = 40
"""Ratios of one metric on the terminal; `--json` and the page have all."""


def tables_of(found: SideComparison, *, most: int = MAX_ROWS) -> list[TextTable]:
    """Means, ratios by workload, what differs, hardware, gaps."""
    tables = [means_table(found)]
    tables += [ratios_table(mean, most=most) for mean in found.means]
    tables.append(differing_table(found))
    tables += [hardware_table(found)] if found.hardware else []
    tables += list(gap_tables(found))
    return [t for t in tables if t.rows]


def means_table(found: SideComparison) -> TextTable:
    """Geometric means with n, interval, leave-one-out, wins and losses."""
    rows = [
        (
            m.other, m.metric, f"{m.value:.3f}", m.n, _interval(m.low, m.high),
            _without_one(m.lowest), _without_one(m.highest),
            verdicts(m), f"{m.whole_time:.3f}",
        )
        for m in found.means
    ]  # fmt: skip
    return TextTable(
        title=f"Against {found.sides[0].name}: above 1 is better",
        headings=(
            "side", "metric", "geometric mean", "n", "95 % interval", "lowest without one", "highest without one",
            "wins and losses", "whole time",
        ),
        rows=rows, text_columns=("metric", "wins and losses"),
    )  # fmt: skip


def ratios_table(mean: MeanRatio, *, most: int) -> TextTable:
    """Ratio of each workload with both values."""
    shown = mean.ratios[:most]
    rows = [
        (r.workload, *_both(r), f"{r.value:.3f}", _interval(r.low, r.high), verdict_word(r.verdict, mean.metric))
        for r in shown
    ]
    hidden = len(mean.ratios) - len(shown)
    return TextTable(
        title=f"{mean.metric}, {mean.other} against {mean.baseline}",
        headings=("workload", mean.baseline, mean.other, "ratio", "95 % interval", "outcome"),
        rows=rows, caption=f"{hidden} more workloads are not shown" if hidden else "", text_columns=("outcome",),
    )  # fmt: skip


def differing_table(found: SideComparison) -> TextTable:
    """Conditions side by side, those that differ first."""
    ordered = sorted(found.differing, key=lambda d: not d.differs)
    rows = [(d.condition, "differs" if d.differs else "same", *(v or "not stated" for v in d.values)) for d in ordered]
    names = tuple(s.name for s in found.sides)
    return TextTable(title="What differs", headings=("condition", "", *names), rows=rows, text_columns=("", *names))


def hardware_table(found: SideComparison) -> TextTable:
    """Datasheet ratios beside the geometric mean."""

    def x(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    return TextTable.of(
        "Hardware, beside its datasheets",
        found.hardware,
        {
            "accelerators": lambda h: f"{h.newer} over {h.older}",
            "": lambda h: f"generation of {h.line}" if h.line else "",
            "metric": lambda h: h.metric,
            "compared here": lambda h: x(h.measured),
            "peak bf16": lambda h: x(h.bf16),
            "peak fp8": lambda h: x(h.fp8),
            "memory bandwidth": lambda h: x(h.memory_bandwidth),
            "memory": lambda h: x(h.memory_capacity),
            "scale-up links": lambda h: x(h.scale_up_bandwidth),
            "design power": lambda h: x(h.design_power),
        },
        text_columns=("", "metric"),
        caption="; ".join(dict.fromkeys(f"{h.line}: {h.line_source}" for h in found.hardware if h.line)),
    )


def gap_tables(found: SideComparison) -> Iterator[TextTable]:
    """The split of each gap."""
    for gap in found.gaps:
        notes = "; ".join(dict.fromkeys(n for n in (gap.before.note, gap.after.note) if n))
        notes = notes[:1].upper() + notes[1:]
        yield TextTable(
            title=f"Microseconds of a device per token: {gap.workload}",
            headings=("part", gap.baseline, gap.other, "difference", "of the gap"),
            rows=gap_rows(gap), caption=notes,
        )  # fmt: skip


def markdown(found: SideComparison) -> str:
    """The comparison as a Markdown document."""
    lines = [f"# {title(found)}", ""]
    for table in tables_of(found, most=10**9):
        lines += [f"## {table.title}", "", *markdown_table(table), ""]
    lines += ["## Read with care", "", *(f"- {text}" for text in found.cautions), ""] if found.cautions else []
    lines += ["## Notes", "", *(f"{i}. {text}" for i, text in enumerate(endnotes(found.sides), start=1)), ""]
    return "\n".join(lines)


def title(found: SideComparison) -> str:
    """Name of the page: the sides."""
    baseline, *others = (s.name for s in found.sides)
    return f"{', '.join(others)} against {baseline}"


def markdown_table(table: TextTable) -> list[str]:
    """Lines of a Markdown table."""

    def cells(row: object) -> str:
        return "| " + " | ".join("" if c is None else str(c).replace("|", "\\|") for c in row) + " |"  # pyright: ignore[reportGeneralTypeIssues]

    rule = [":--" if i == 0 or heading in table.text_columns else "--:" for i, heading in enumerate(table.headings)]
    lines = [cells(table.headings), cells(rule), *(cells(row) for row in table.rows)]
    return [*lines, "", table.caption] if table.caption else lines


def value_text(value: SideValue) -> str:
    """A value with its unit, and n where it has samples.

    >>> from meshwright.answers.comparison.sides import THROUGHPUT, Evidence
    >>> value_text(SideValue(workload="w", metric=THROUGHPUT, value=31190.0, evidence=Evidence.PUBLISHED))
    '31,190'
    """
    unit, number = value.metric.unit, value.value
    if unit == "bytes/device":
        return format_bytes(number)
    if unit == "s":
        return format_seconds(number)
    if unit == "ratio" and number <= 1:
        return percent(number)
    if number >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


def _both(ratio: Ratio) -> tuple[str, str]:
    return value_text(ratio.baseline), value_text(ratio.other)


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _without_one(found: WithoutOne | None) -> str:
    return "" if found is None else f"{found.value:.3f}"
