"""The page of a report: summary, throughput, MFU, loss, memory, kernels, pipeline, scaling, predictions, cost, notes.

A section needs records with its numbers; the end of the page lists the sections that no record has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.answers.comparison.sides import MEMORY, MFU, OUTPUT_RATE, THROUGHPUT, TPOT
from meshwright.answers.comparison.study import endnotes
from meshwright.answers.overview.collect import RecordReport, ReportEntry
from meshwright.answers.overview.cost import (
    cost_rows,
    hour_prices,
    priced_values,
    sensitivities,
    unpriced,
    usd_per_million,
)
from meshwright.answers.quantities import percent, seconds
from meshwright.answers.stages import stage_rows, step_timeline
from meshwright.answers.text_table import TextTable
from meshwright.files import toml_table
from meshwright.report.comparison.tables import markdown_table, value_text
from meshwright.report.html import (
    PageSection,
    ReportFigure,
    document,
    fragment,
    numbered_notes,
    page_table,
    paragraph,
    text_table,
    tiles,
)
from meshwright.report.overview import figures as draw
from meshwright.report.overview.kernels import ORANGE as KERNEL_LINE
from meshwright.report.overview.kernels import (
    drawn_calls,
    idle_ratios,
    kernels_table,
    passes_legend,
    passes_svg,
    roofline_chart,
    roofline_cuts,
    stages_table,
)
from meshwright.report.overview.tables import (
    cost_table,
    entries_table,
    predicted_ratio,
    sensitivity_table,
    value_cells,
    values_table,
)
from meshwright.report.timeline_blocks import MAX_DRAWN_PER_RANK
from meshwright.version import __version__

MOST_CURVES = 8
TEXTS = toml_table(Path(__file__).with_name("page.toml"))
MOST_NOTES = 200
"""Endnotes on the page; the JSON document has all."""


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A heading with text, tables and figures."""

    title: str
    text: str = ""
    figures: tuple[ReportFigure, ...] = ()
    tables: tuple[TextTable, ...] = ()
    is_wide: bool = field(default=False)


def record_page(
    found: RecordReport, *, command: str = "", heading: str = "", first: Sequence[ReportSection] = ()
) -> str:
    """The whole page, below `heading` and after the sections `first`.

    `command` is the command line that makes it and each of its figures.
    """
    made, needs = _made(found), TEXTS["needs"]
    parts = [_section(s, command=command) for s in (*first, *made.values()) if s is not None]
    missing = [f"{name}: {needs[name]}" for name, s in made.items() if name in needs and s is None]
    text = f"Needed for {'; for '.join(missing)}." if missing else "Nothing: the records fill every section."
    absent = PageSection(title="What no record shows", parts=[paragraph(text)])
    return document(
        title=heading or title(found), lead=_lead(found), sections=[*parts, absent, _notes(found)],
        footer=f"Meshwright {__version__}. {command}",
    )  # fmt: skip


def record_fragment(found: RecordReport) -> str:
    """The entries for a notebook: one table."""
    return fragment(found.summary(), [text_table(entries_table(found))])


def title(found: RecordReport) -> str:
    """Name of the report."""
    names = [e.name for e in found.entries]
    return names[0] if len(names) == 1 else f"Report on {len(names):,} records"


def figures_of(found: RecordReport) -> Iterator[tuple[str, Any]]:
    """Name and chart of each figure that is made of a chart."""
    for section in report_sections(found):
        for figure in section.figures:
            if figure.chart is not None:
                yield figure.title, figure.chart


def markdown(found: RecordReport) -> str:
    """The report's tables, with the data of every figure, and its endnotes."""
    lines = [f"# {title(found)}", "", found.summary(), ""]
    for section in report_sections(found):
        lines += [f"## {section.title}", ""] + ([section.text, ""] if section.text else [])
        for table in (*section.tables, *(f.data for f in section.figures)):
            lines += [f"### {table.title}", "", *markdown_table(table), ""]
    lines += ["## Not read", "", *(f"- {text}" for text in found.unreadable), ""] if found.unreadable else []
    notes = endnotes([e.side for e in found.entries])
    return "\n".join([*lines, "## Endnotes", "", *(f"{i}. {text}" for i, text in enumerate(notes, start=1)), ""])


def report_sections(found: RecordReport) -> Iterator[ReportSection]:
    """Sections that the records have something for, in the order of the page."""
    return (section for section in _made(found).values() if section is not None)


def _made(found: RecordReport) -> dict[str, ReportSection | None]:
    """Every section by its name, each made once; None where no record has its numbers."""
    first = ReportSection(title="Records", tables=(entries_table(found),), is_wide=True)
    return {"records": first, **{name: make(found) for name, make in _SECTIONS.items()}}


# --- sections ---


def _values(metric: Any, heading: str) -> Callable[[RecordReport], ReportSection | None]:
    def make(found: RecordReport) -> ReportSection | None:
        named = draw.highest(found.entries, metric)
        if not named:
            return None
        rows = [(name, *value_cells(v), len(v.samples) or "", v.evidence.value) for name, v in named]
        total = sum(e.value(metric) is not None for e in found.entries)
        data = TextTable(
            title=f"{heading}: data", rows=rows,
            headings=("name", f"{metric.name}, {metric.unit}", "range", "n", "evidence"),
            text_columns=("evidence",),
        )  # fmt: skip
        text = "Bars are medians; lines hold the middle 80 % of the samples, or the 80 % interval of a prediction."
        if total > len(named):
            text += f" The {len(named)} highest of {total:,}."
        return ReportSection(
            title=heading,
            text=text,
            figures=(
                ReportFigure(
                    title=f"{heading} by record",
                    data=data,
                    chart=draw.values_chart(named),
                    legend=draw.cut_legend(draw.value_ends(named)),
                ),
            ),
        )

    return make


def _loss(found: RecordReport) -> ReportSection | None:
    runs = [(e.name, e.run) for e in found.entries if e.run is not None and e.run.steps]
    if not runs:
        return None
    shown = runs[:MOST_CURVES]
    rows = [
        (name, run.statistics["steps"], _number(run.statistics["first_loss"]), _number(run.statistics["last_loss"]),
         _number(run.statistics.get("validation_loss")), run.record["ending"])
        for name, run in runs
    ]  # fmt: skip
    data = TextTable(
        title="Loss: data", headings=("name", "steps", "first loss", "last loss", "validation", "ending"), rows=rows,
        text_columns=("ending",),
    )  # fmt: skip
    text = f"The first {len(shown)} of {len(runs):,} trainings." if len(runs) > len(shown) else ""
    figure = ReportFigure(
        title="Training loss over tokens",
        data=data,
        chart=draw.loss_chart(shown),
        legend=tuple(draw.loss_legend(shown)),
    )
    return ReportSection(title="Loss", text=text, figures=(figure,))


def _memory(found: RecordReport) -> ReportSection | None:
    entries = [e for e in found.entries if e.value(MEMORY) is not None]
    entries.sort(key=lambda e: -e.known(MEMORY))
    if not entries:
        return None
    shown = entries[: draw.MOST_BARS]
    rows = [(e.name, value_text(v)) for e in shown if (v := e.value(MEMORY)) is not None]
    data = TextTable(title="Memory: data", headings=("name", "memory per device"), rows=rows)
    figure = ReportFigure(
        title="Memory of the fullest process", data=data, chart=draw.memory_chart(shown),
        legend=(
            ("measured or estimated", draw.BLUE), ("predicted before the run", draw.PURPLE),
            *draw.cut_legend(draw.memory_ends(shown)),
        ),
    )  # fmt: skip
    return ReportSection(title="Memory", figures=(figure,))


def _kernels(found: RecordReport) -> ReportSection | None:
    runs = [(e.name, e.run) for e in found.entries if e.run is not None and e.run.record.get("profile")][
        : draw.MOST_BARS
    ]
    if not runs:
        return None
    categories = list(draw.KERNEL_COLORS)
    rows = [(name, *(f"{run.record['profile']['shares'].get(c, 0.0):.1%}" for c in categories)) for name, run in runs]
    data = TextTable(title="Time by kind of kernel: data", headings=("name", *categories), rows=rows)
    figure = ReportFigure(
        title="Share of a step by kind of kernel", data=data, chart=draw.kernels_chart(runs),
        legend=tuple(draw.KERNEL_COLORS.items()),
    )  # fmt: skip
    text = "Measured under the profiler, which slows the step. Communication counts where no kernel hides it."
    return ReportSection(title="Where a step's time goes", text=text, figures=(figure,))


def _kernel_calls(found: RecordReport) -> ReportSection | None:
    shown = kernels_table(found)
    if not shown.rows:
        return None
    calls = drawn_calls(found)
    figures = ()
    if calls:
        data = TextTable(
            title="Share of the roofline: data", headings=("call", "route", "share"),
            rows=[(name, c.route, f"{c.roofline_ratio:.3f}") for name, c in calls], text_columns=("route",),
        )  # fmt: skip
        chart = roofline_chart(calls)
        title = "Share of the roofline, lowest first"
        figures = (
            ReportFigure(
                title=title, data=data, chart=chart, legend=(("the roofline", KERNEL_LINE), *roofline_cuts(calls))
            ),
        )
    return ReportSection(
        title="Kernels by shape", text=TEXTS["kernel_rates"], tables=(shown,), figures=figures, is_wide=True
    )


def _pipeline(found: RecordReport) -> ReportSection | None:
    from meshwright.report.timeline import legend, timeline_svg

    figures = _measured_pipelines(found)
    text = TEXTS["measured_passes"].format(most=MAX_DRAWN_PER_RANK) if figures else ""
    for entry in found.entries:
        done = entry.estimate
        timeline = None if done is None or done.plan.pipeline == 1 else step_timeline(done.estimate)
        if done is None or timeline is None:
            continue
        rows = [
            (r.name, f"{r.num_layers:g}", seconds(r.forward_s), seconds(r.backward_s))
            for r in stage_rows(done.request, done.estimate)
        ]
        data = TextTable(
            title=f"Pipeline of {entry.name}: data", headings=("rank", "layers", "forward", "backward"), rows=rows
        )
        figures.append(
            ReportFigure(
                title=f"{entry.name}: {done.plan.pipeline} ranks, {percent(timeline.bubble_ratio)} waiting", data=data,
                picture=timeline_svg(timeline), legend=tuple(legend(timeline)),
            )
        )  # fmt: skip
    if not figures:
        return None
    return ReportSection(title="Pipeline", text=text, figures=tuple(figures), is_wide=True)


def _measured_pipelines(found: RecordReport) -> list[ReportFigure]:
    """Timelines of profiled trainings."""
    figures = []
    for entry in found.entries:
        if not entry.passes:
            continue
        idle = list(idle_ratios(entry.passes).values())
        figures.append(
            ReportFigure(
                title=f"{entry.name}, measured: {len(idle)} ranks, {sum(idle) / len(idle):.1%} not computing",
                data=stages_table(entry.passes, name=entry.name),
                picture=passes_svg(entry.passes, name=entry.name), legend=passes_legend(entry.passes),
            )
        )  # fmt: skip
    return figures[:MOST_CURVES]


def _scaling(found: RecordReport) -> ReportSection | None:
    groups: dict[str, list[ReportEntry]] = defaultdict(list)
    for entry in found.entries:
        value = entry.value(THROUGHPUT)
        if value is not None and value.conditions.get("devices", "").isdecimal():
            same = ", ".join(value.conditions.get(k, "") for k in ("accelerator", "precision", "engine"))
            groups[f"{value.workload}; {same}"].append(entry)
    figures = []
    for name, entries in groups.items():
        best: dict[int, float] = {}
        for entry in entries:
            devices, rate = int(entry.condition("devices")), entry.known(THROUGHPUT)
            best[devices] = max(best.get(devices, 0.0), rate)
        if len(best) < 2:
            continue
        sizes = sorted(best)
        rows = [
            {
                "devices": n,
                "rate": best[n] * n,
                "efficiency": best[n] / best[sizes[0]],
                "text": f"{best[n] / best[sizes[0]]:.0%}",
            }
            for n in sizes
        ]
        data = TextTable(
            title=f"Scaling of {name}: data",
            headings=("devices", "tokens/s", "tokens/s/device", f"efficiency against {sizes[0]}"),
            rows=[
                (r["devices"], f"{r['rate']:,.0f}", f"{r['rate'] / r['devices']:,.0f}", f"{r['efficiency']:.1%}")
                for r in rows
            ],
        )  # fmt: skip
        figures.append(ReportFigure(title=f"Scaling: {name}", data=data, chart=draw.scaling_chart(rows)))
    text = "The best record of each number of devices; the dashed line is perfect scaling from the smallest."
    return ReportSection(title="Scaling", text=text, figures=tuple(figures[:6])) if figures else None


def _predicted(found: RecordReport) -> ReportSection | None:
    rows = []
    for entry in found.entries:
        quantities = entry.run.measured_quantities() if entry.run is not None else []
        quantity = next((q for q in quantities if q.unit == "tokens/s" and q.predicted), None)
        if quantity is not None and quantity.predicted is not None:
            p = quantity.predicted
            rows.append({"name": entry.name, "measured": quantity.measured, "predicted": p.value,
                         "low": p.low, "high": p.high,
                         "inside": p.low <= quantity.measured <= p.high})  # fmt: skip
    if not rows:
        return None
    inside = sum(r["inside"] for r in rows)
    data = TextTable(
        title="Predicted and measured: data",
        headings=("name", "measured tokens/s/device", "predicted", "80 % interval", "measured over predicted"),
        rows=[
            (r["name"], f"{r['measured']:,.0f}", f"{r['predicted']:,.0f}", f"{r['low']:,.0f} to {r['high']:,.0f}",
             f"{r['measured'] / r['predicted']:.2f}")
            for r in rows
        ],
    )  # fmt: skip
    figure = ReportFigure(
        title="Predicted over measured tokens/s/device", data=data, chart=draw.predicted_chart(rows),
        legend=(("measured inside the 80 % interval", draw.GREEN), ("outside", draw.RED), ("within 20 %", "#8a919b2e")),
    )  # fmt: skip
    text = f"Measured inside the 80 % interval that was predicted before the run: {inside:,} of {len(rows):,}."
    if len(rows) > draw.MOST_POINTS:
        text += f" Of them {draw.MOST_POINTS} are drawn: the {draw.MOST_POINTS // 2} worst, and others evenly by error."
    return ReportSection(title="Predicted and measured", text=text, figures=(figure,))


def _serving(found: RecordReport) -> ReportSection | None:
    named = []
    for entry in found.entries:
        rates = {v.workload: v for v in entry.side.values if v.metric == OUTPUT_RATE}
        gaps = {v.workload: v.value for v in entry.side.values if v.metric == TPOT}
        points = [
            {"rate": v.value, "user_rate": 1 / gaps[w], "load": v.conditions.get("load", ""), "order": i}
            for i, (w, v) in enumerate(rates.items())
            if gaps.get(w)
        ]
        if points:
            named.append((entry.name, points))
    if not named:
        return None
    named = named[:MOST_CURVES]
    rows = [(name, p["load"], f"{p['rate']:,.1f}", f"{p['user_rate']:,.2f}") for name, points in named for p in points]
    data = TextTable(
        title="Serving: data",
        headings=("name", "load", "output tokens/s", "tokens/s of one request"),
        rows=rows,
        text_columns=("load",),
    )
    legend = tuple((name, draw.SERIES[i]) for i, (name, _) in enumerate(named))
    figure = ReportFigure(
        title="Output rate against the speed of one request", data=data, chart=draw.serving_chart(named), legend=legend
    )
    return ReportSection(title="Serving", text="Up and to the right is better.", figures=(figure,))


def _cost(found: RecordReport) -> ReportSection | None:
    values = [v for e in found.entries for v in priced_values(e.side)]
    tokens = {
        e.name: float(e.run.statistics["tokens"])
        for e in found.entries
        if e.run is not None and "tokens" in e.run.statistics
    }
    rows = cost_rows(values, found.terms, tokens=tokens)
    missing = unpriced(values, rows)
    if not rows:
        return ReportSection(title="Cost", text=missing) if missing else None
    cheapest = min(rows, key=lambda r: r.usd_per_million_tokens)
    value = next(v for v in values if v.workload == cheapest.name)
    varied = sensitivities(value, found.terms)
    figures = ()
    if varied:
        base = usd_per_million(*(hour_prices(value.conditions.get("accelerator", ""), found.terms)[0][0], value.value))
        table = sensitivity_table(cheapest.name, varied)
        figures = (ReportFigure(title=table.title, data=table, chart=draw.sensitivity_chart(varied, base_usd=base)),)
    text = (
        "One price of a device-hour, the licence included, over the tokens of that hour and the utilisation. Prices "
        "come from the catalogue with date and region, or from the terms given; rented prices include the power."
    )
    return ReportSection(
        title="Cost", text=text, tables=(cost_table(rows, missing=missing),), figures=figures, is_wide=True
    )


def _by_workload(found: RecordReport) -> ReportSection | None:
    table = values_table(found)
    return ReportSection(title="Values by workload", tables=(table,), is_wide=True) if table.rows else None


_SECTIONS: dict[str, Callable[[RecordReport], ReportSection | None]] = {
    "throughput": _values(THROUGHPUT, "Throughput"),
    "MFU": _values(MFU, "MFU"),
    "loss curves": _loss,
    "memory": _memory,
    "time by kind of kernel": _kernels,
    "kernels by shape": _kernel_calls,
    "pipeline timeline": _pipeline,
    "scaling": _scaling,
    "predicted against measured": _predicted,
    "serving": _serving,
    "cost": _cost,
    "values by workload": _by_workload,
}


# --- HTML ---


def _section(section: ReportSection, *, command: str) -> PageSection:
    parts = [paragraph(section.text)] if section.text else []
    parts += [page_table(t) for t in section.tables]
    parts += [figure.html(command=command) for figure in section.figures]
    return PageSection(title=section.title, parts=parts, is_wide=section.is_wide)


def _lead(found: RecordReport) -> str:
    count = len(found.entries)
    shown = [(f"{count:,}", "record" if count == 1 else "records", found.summary())]
    for metric, name in ((THROUGHPUT, "highest throughput, tokens/s/device"), (MFU, "highest MFU")):
        best = draw.highest(found.entries, metric, most=1)
        shown += [(value_text(v), name, who) for who, v in best]
    ratios = [r for e in found.entries if (r := predicted_ratio(e)) is not None]
    if ratios:
        errors = [abs(r - 1) for r in ratios]
        shown.append((f"{100 * median(errors):.0f} %", "median error of the prediction", f"trainings: {len(ratios):,}"))
    left = "".join(paragraph(f"Not read: {text}.", css_class="caution") for text in found.unreadable[:20])
    more = len(found.unreadable) - 20
    left += paragraph(f"And {more:,} more could not be read.", css_class="caution") if more > 0 else ""
    return tiles(shown) + left


def _notes(found: RecordReport) -> PageSection:
    notes = endnotes([e.side for e in found.entries[:MOST_NOTES]])
    more = len(found.entries) - len(notes)
    below = paragraph(f"{more:,} more are in the JSON document.") if more > 0 else ""
    return PageSection(title="Endnotes", parts=[numbered_notes(notes) + below], is_wide=True)


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else ""


def terminal_tables(found: RecordReport) -> list[TextTable]:
    """Tables for the terminal: the entries, and their costs."""
    values = [v for e in found.entries for v in priced_values(e.side)]
    rows = cost_rows(values, found.terms)
    missing = unpriced(values, rows)
    return [entries_table(found), *([cost_table(rows, missing=missing)] if rows or missing else [])]
