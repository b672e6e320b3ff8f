"""The documents' figures, drawn again: printed values beside predictions and values of published logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.answers.sources.facts import CONTEXT, memory_rows
from meshwright.answers.sources.study import SourceReport, SourceRow
from meshwright.answers.text_table import TextTable
from meshwright.catalog.lookup import market_prices, prices
from meshwright.files import toml_table
from meshwright.report.charts import (
    BLUE,
    GRAY,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    ROOMY,
    TEAL,
    WIDTH,
    across,
    alt,
    bounded_scale,
    chart_of,
    color_by,
    names_of,
    rule_at,
    stacked,
    up,
)
from meshwright.report.html import ReportFigure
from meshwright.report.sources.tables import number

PRINTED, PREDICTED, LOGS = ORANGE, BLUE, GREEN
KINDS = {"printed": PRINTED, "predicted": PREDICTED, "published logs": LOGS}
LEGEND = (("printed", PRINTED), ("predicted, 80 % interval", PREDICTED), ("published logs", LOGS))
MEMORY_PARTS = {
    "weights": BLUE, "cache": ORANGE, "adapters and optimizer": PURPLE, "activations": TEAL, "kept back": GRAY,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SourceFigure(ReportFigure):
    """One figure with its data. `section` is the heading it stands under."""

    section: str
    legend: tuple[tuple[str, str], ...] = LEGEND


def source_figures(found: SourceReport) -> list[SourceFigure]:
    """All figures in the order of the documents."""
    return [make(found) for make in _FIGURES]


def _claims(found: SourceReport, *names: str) -> list[SourceRow]:
    return [r for name in names for r in found.rows if r.claim.claim_id == name]


def _data(title: str, rows: Sequence[SourceRow], label: Callable[[SourceRow], str]) -> TextTable:
    cells = [
        (
            label(r), r.claim.claim_id, number(r.claim.value), "" if r.predicted is None else number(r.predicted.value),
            "" if r.predicted is None else f"{number(r.predicted.low)} to {number(r.predicted.high)}",
            "" if r.logs is None else number(r.logs),
        )
        for r in rows
    ]  # fmt: skip
    headings = ("what", "claim", "printed", "predicted", "interval", "published logs")
    return TextTable(title=f"{title}: data", headings=headings, rows=cells, text_columns=("claim",))


def _intervals(rows: Sequence[SourceRow], label: Callable[[SourceRow], str], *, axis: str, parity: bool = False) -> Any:
    """One line a claim: interval and value of the prediction, printed value, value of the logs."""
    data, marks = [], []
    for row in rows:
        name, p = label(row), row.predicted
        if p is not None:
            data.append({"name": name, "low": p.low, "high": p.high})
            marks.append({"name": name, "value": p.value, "kind": "predicted", "shift": -8})
        marks.append({"name": name, "value": row.claim.value, "kind": "printed", "shift": 8})
        if row.logs is not None:
            marks.append({"name": name, "value": row.logs, "kind": "published logs", "shift": 0})
    for mark in marks:
        mark["text"] = number(mark["value"]) if mark["kind"] == "printed" else ""
    ends = [v for d in data for v in (d["low"], d["high"])] + [m["value"] for m in marks]
    low, high = min(ends), max(ends)
    scale = alt.Scale(domain=[max(0.0, low - 0.12 * (high - low)), high + 0.12 * (high - low)], nice=False, zero=False)
    y = names_of(marks, labelLimit=270)
    x = across("value", scale=scale, title=axis, grid=True, tickCount=6, format="~r")
    color = color_by("kind", KINDS)
    band = chart_of(data).mark_bar(color=PREDICTED, opacity=0.22, height={"band": 0.6})
    points = chart_of(marks).encode(x=x, y=y)
    shapes = alt.Scale(domain=list(KINDS), range=["diamond", "circle", "square"])
    shape = alt.Shape("kind:N", scale=shapes, legend=None)
    layers = [
        *([rule_at(1.0, scale=scale, color=INK)] if parity else []),
        band.encode(y=y, x=across("low", scale=scale), x2="high:Q"),
        points.mark_point(filled=True, size=70, opacity=1).encode(color=color, shape=shape),
        points.mark_text(dy=-10, color=INK).encode(text="text:N"),
    ]
    return alt.layer(*layers).properties(width=WIDTH, height={"step": 36})


def _of_claims(found: SourceReport, *, name: str) -> SourceFigure:
    """A figure of figures.toml."""
    about = toml_table(Path(__file__).with_name("figures.toml"))[name]
    rows, title, labels = _claims(found, *about["claims"]), about["title"], about.get("labels", {})

    def label(row: SourceRow) -> str:
        return labels.get(row.claim.claim_id, about["label"]).format(c=row.claim)

    drawn = [row for row in rows if row.claim.claim_id in about.get("drawn", about["claims"])]
    return SourceFigure(
        section=about["section"], title=title, text=about.get("text", ""),
        chart=_intervals(drawn, label, axis=about["axis"], parity=about.get("parity", False)),
        data=_data(about.get("data_title", title), rows, label),
    )  # fmt: skip


def _devices(row: SourceRow) -> str:
    return f"{row.claim.num_accelerators:,}"


def _table_1(found: SourceReport) -> SourceFigure:
    rows = _claims(found, "scale_02", "scale_03", "scale_04", "scale_05", "scale_06")
    title = "Table 1: scaling efficiency of a 2T mixture of experts, emulated on 768 MI300X"
    data = [
        {
            "devices": r.claim.num_accelerators, "printed": r.claim.value, "value": r.predicted and r.predicted.value,
            "low": r.predicted and r.predicted.low, "high": r.predicted and r.predicted.high,
            "text": f"{r.claim.value:g} / {r.predicted.value:.2f}" if r.predicted else f"{r.claim.value:g}",
        }
        for r in rows
    ]  # fmt: skip
    devices = [d["devices"] for d in data]
    sizes = bounded_scale([min(devices) / 1.4, max(devices) * 1.4])
    x = across("devices", title="GPUs", scale=sizes, values=devices, format=",d", grid=False)
    scale = alt.Scale(domain=[0.8, 1.05], nice=False)
    y, value = up("printed", title="realized over ideal", scale=scale, grid=True, tickCount=5), up("value", scale=scale)
    base = chart_of(data).encode(x=x)
    chart = alt.layer(
        base.mark_area(color=PREDICTED, opacity=0.2).encode(y=up("low", scale=scale), y2="high:Q"),
        base.mark_line(color=PREDICTED).encode(y=value),
        base.mark_point(filled=True, color=PREDICTED, size=50, opacity=1).encode(y=value),
        base.mark_point(filled=True, color=PRINTED, size=70, opacity=1, shape="diamond").encode(y=y),
        base.mark_text(dy=-14, color=INK, style=ROOMY).encode(y=y, text="text:N"),
    ).properties(width=WIDTH, height=240)  # fmt: skip
    return SourceFigure(
        section="At scale", title=title, chart=chart, data=_data(title, rows, _devices),
        legend=LEGEND[:2],
    )  # fmt: skip


def _figure_2(found: SourceReport) -> SourceFigure:
    base_row, last = _claims(found, "scale_08", "scale_09")
    first, most = base_row.claim.num_accelerators or 1, last.claim.num_accelerators or 1
    days = base_row.claim.value
    title = "Figure 2: days to train the 2T mixture of experts on MI355X"
    ideal = [{"devices": n, "days": days * first / n} for n in (first, most)]
    data = [
        {"devices": first, "days": days, "kind": "printed", "text": f"{days:g}"},
        {"devices": most, "days": last.claim.value, "kind": "printed", "text": f"{last.claim.value:g}"},
    ]
    band = []
    if last.predicted is not None:
        p = last.predicted
        data.append({"devices": most, "days": p.value, "kind": "predicted", "text": f"{p.value:.1f}"})
        band.append({"devices": most, "low": p.low, "high": p.high})
    ends = [d["days"] for d in (*data, *ideal)] + [v for b in band for v in (b["low"], b["high"])]
    sizes = {"scale": bounded_scale([first / 1.4, most * 1.5]), "values": [8192, 16384, 32768, 65536, 98304]}
    x = across("devices", title="GPUs", format=",d", grid=False, **sizes)
    scale = bounded_scale([min(ends) / 1.3, max(ends) * 1.3])
    ticks = [t for t in (1, 2, 5, 10, 20, 50) if min(ends) / 1.3 <= t <= max(ends) * 1.3]
    y = up("days", title="days", scale=scale, values=ticks, grid=True, format="d")
    color, points = color_by("kind", KINDS, ("printed", "predicted")), chart_of(data).encode(x=x, y=y)
    spread = chart_of(band).mark_rule(color=PREDICTED, strokeWidth=6, opacity=0.3)
    chart = alt.layer(
        chart_of(ideal).mark_line(color=INK, strokeDash=[5, 4], strokeWidth=1).encode(x=x, y=y),
        spread.encode(x=x, y=up("low", scale=scale), y2="high:Q"),
        points.mark_point(filled=True, size=80, opacity=1).encode(color=color),
        points.mark_text(align="left", dx=9, color=INK).encode(text="text:N"),
    ).properties(width=WIDTH, height=280)  # fmt: skip
    return SourceFigure(
        section="At scale", title=title, chart=chart, data=_data(title, [base_row, last], _devices),
        legend=(*LEGEND[:2], ("perfect scaling", INK)),
        text="The number of tokens is not printed: it is solved for from 22.8 days on 8,192 GPUs.",
    )  # fmt: skip


def _memory(found: SourceReport) -> SourceFigure:
    title = "Memory of one 288 GiB device"
    cases = memory_rows()
    rows = [row for case in cases for row in stacked(case.parts_gib, case=case.name)]
    totals = [
        {"case": c.name, "end": sum(c.parts_gib.values()), "text": f"{sum(c.parts_gib.values()):.0f} GiB"}
        for c in cases
    ]
    y = names_of(totals, "case", labelLimit=300)
    scale = alt.Scale(domain=[0, max(r["end"] for r in totals) * 1.15], nice=False)
    x = across("start", scale=scale, title="GiB", grid=True, tickCount=6)
    limits = [{"x": c, "text": t} for c, t in ((288.0, "MI355X"), (179.06, "B200"))]
    rule, sums = chart_of(limits).encode(x=across("x", scale=scale)), chart_of(totals)
    bars = chart_of(rows).mark_bar(height={"band": 0.65})
    chart = alt.layer(
        bars.encode(y=y, x=x, x2="end:Q", color=color_by("part", MEMORY_PARTS)),
        rule.mark_rule(color=INK, strokeWidth=1.5),
        rule.mark_text(color=INK, dy=-6, baseline="bottom", y=0).encode(text="text:N"),
        sums.mark_text(align="left", dx=5, color=INK).encode(x=across("end", scale=scale), y=y, text="text:N"),
    ).properties(width=WIDTH, height={"step": 34})  # fmt: skip
    data = TextTable(
        title=f"{title}: data", headings=("case", *MEMORY_PARTS, "sum, GiB", "how"),
        rows=[
            (
                c.name, *(f"{c.parts_gib.get(p, 0.0):.1f}" for p in MEMORY_PARTS),
                f"{sum(c.parts_gib.values()):.1f}", c.how,
            )
            for c in cases
        ],
        text_columns=("how",),
    )  # fmt: skip
    return SourceFigure(
        section="Memory", title=title, chart=chart, data=data, legend=tuple(MEMORY_PARTS.items()),
        text=f"Sessions have {CONTEXT:,} tokens. A tenth of the memory and 3.5 GB are kept back for the engine.",
    )  # fmt: skip


PRICED = ("mi300x", "h100", "h200", "b200")
"""Accelerators whose prices the documents print or imply."""


def _prices(found: SourceReport) -> SourceFigure:
    title = "Price of a node of eight, Azure on demand, 2025-06-10"
    rows = [
        {
            "name": f"{p.accelerator.upper()}, {p.region}",
            "usd": 8 * p.usd_per_device_hour,
            "text": f"{8 * p.usd_per_device_hour:,.2f}",
        }
        for p in prices()
        if "Azure" in p.offer
    ]
    rows.sort(key=lambda r: r["name"])
    x = across("usd", title="USD per hour", scale=alt.Scale(domain=[0, 150], nice=False), grid=True, tickCount=6)
    base = chart_of(rows).encode(y=alt.Y("name:N", sort=None, title=None))
    chart = alt.layer(
        base.mark_bar(color=PRINTED, opacity=0.8, height={"band": 0.65}).encode(x=x),
        base.mark_text(align="left", dx=5, color=INK).encode(x=x, text="text:N"),
    ).properties(width=WIDTH, height={"step": 26})  # fmt: skip
    data = TextTable(
        title=f"{title}: data",
        headings=("device", "region", "USD per node-hour", "USD per device-hour", "date", "offer"),
        rows=[
            (
                p.accelerator, p.region, f"{8 * p.usd_per_device_hour:.3f}", f"{p.usd_per_device_hour:.4f}", p.date,
                p.offer,
            )
            for p in (*prices(), *(m for m in market_prices() if m.accelerator in PRICED))
        ],
        text_columns=("region", "date", "offer"),
    )  # fmt: skip
    text = (
        "The figure has the prices that the documents print. The market's later prices, of several sellers, stand "
        "below them in the data."
    )
    return SourceFigure(section="Prices", title=title, chart=chart, data=data, legend=(), text=text)


_FIGURES: tuple[Callable[[SourceReport], SourceFigure], ...] = (
    *(partial(_of_claims, name=name) for name in ("pytorch", "jax", "nodes", "minutes", "minutes_8b", "generations")),
    _table_1, _figure_2, partial(_of_claims, name="inference"), _memory, _prices,
)  # fmt: skip
