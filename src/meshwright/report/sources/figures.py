"""The documents' figures, drawn again: printed values beside predictions and values of published logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.answers.sources.facts import CONTEXT, memory_rows
from meshwright.answers.sources.study import SourceReport, SourceRow
from meshwright.answers.text_table import TextTable
from meshwright.catalog.lookup import market_prices, prices
from meshwright.report.figures import INK, ROOMY, WIDTH, alt, bounded_scale, color_by, stacked
from meshwright.report.html import ReportFigure
from meshwright.report.sources.tables import number

PRINTED, PREDICTED, LOGS = "#d98a35", "#3f78b5", "#4c9a6a"
KINDS = {"printed": PRINTED, "predicted": PREDICTED, "published logs": LOGS}
LEGEND = (("printed", PRINTED), ("predicted, 80 % interval", PREDICTED), ("published logs", LOGS))
MEMORY_PARTS = {
    "weights": "#3f78b5",
    "cache": "#d98a35",
    "adapters and optimizer": "#8b6bb1",
    "activations": "#6bb0b8",
    "kept back": "#8a919b",
}


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
    order = list(dict.fromkeys(m["name"] for m in marks))
    y = alt.Y("name:N", sort=order, title=None, axis=alt.Axis(labelLimit=270))
    x = alt.X("value:Q", scale=scale, title=axis, axis=alt.Axis(grid=True, tickCount=6, format="~r"))
    color = color_by("kind", KINDS)
    band = alt.Chart(alt.Data(values=data)).mark_bar(color=PREDICTED, opacity=0.22, height={"band": 0.6})
    points = alt.Chart(alt.Data(values=marks))
    shapes = alt.Scale(domain=list(KINDS), range=["diamond", "circle", "square"])
    layers = [
        band.encode(y=y, x=alt.X("low:Q", scale=scale), x2="high:Q"),
        points.mark_point(filled=True, size=70, opacity=1).encode(
            x=x, y=y, color=color, shape=alt.Shape("kind:N", scale=shapes, legend=None)
        ),
        points.mark_text(dy=-10, color=INK).encode(x=x, y=y, text="text:N"),
    ]
    if parity:
        rule = alt.Chart(alt.Data(values=[{"x": 1.0}])).mark_rule(color=INK)
        layers.insert(0, rule.encode(x=alt.X("x:Q", scale=scale)))
    return alt.layer(*layers).properties(width=WIDTH, height={"step": 36})


def _workload(row: SourceRow) -> str:
    c = row.claim
    return f"{c.model} {c.precision}, {c.num_accelerators} GPUs"


def _ratios(section: str, title: str, *names: str) -> Callable[[SourceReport], SourceFigure]:
    def make(found: SourceReport) -> SourceFigure:
        rows = _claims(found, *names)
        chart = _intervals(rows, _workload, axis="MI355X over B200, tokens/s per GPU", parity=True)
        return SourceFigure(section=section, title=title, chart=chart, data=_data(title, rows, _workload))

    return make


_ROUND_5_0 = {"s65_07": ", best of v5.0", "s65_08": ", v5.0", "mlperf51_09": ", v5.0"}
"""Claims whose results are of the round before."""


def _minutes(found: SourceReport) -> SourceFigure:
    def label(row: SourceRow) -> str:
        which = _ROUND_5_0.get(row.claim.claim_id, "")
        return f"{row.claim.model} {row.claim.method}, {row.claim.accelerator}{which}"

    rows = _claims(
        found, "mlperf51_01", "mlperf51_02", "mlperf51_03", "mlperf51_09", "s65_07", "s65_08", "mlperf51_04",
        "mlperf51_05", "mlperf51_06",
    )  # fmt: skip
    lora = [r for r in rows if r.claim.method == "lora"]
    title = "MLPerf time to train, 8 GPUs"
    return SourceFigure(
        section="MLPerf Training", title=f"{title}: Llama 2 70B LoRA", chart=_intervals(lora, label, axis="minutes"),
        data=_data(title, rows, label),
        text="Predicted: samples to convergence of the published runs over the predicted rate, without evaluations.",
    )  # fmt: skip


def _minutes_8b(found: SourceReport) -> SourceFigure:
    rows = _claims(found, "mlperf51_04", "mlperf51_05", "mlperf51_06")
    title = "MLPerf time to train, 8 GPUs: Llama 3.1 8B"
    chart = _intervals(rows, lambda r: r.claim.accelerator, axis="minutes")
    return SourceFigure(
        section="MLPerf Training", title=title, chart=chart, data=_data(title, rows, lambda r: r.claim.accelerator)
    )


def _generations(found: SourceReport) -> SourceFigure:
    rows = _claims(found, "mlperf51_08", "mlperf51_07", "s65_09")
    title = "Generation over generation: MI355X, Llama 2 70B LoRA"

    def label(row: SourceRow) -> str:
        return f"over {row.claim.baseline}"

    return SourceFigure(
        section="MLPerf Training",
        title=title,
        chart=_intervals(rows, label, axis="times as fast"),
        data=_data(title, rows, label),
    )


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
    x = alt.X(
        "devices:Q", title="GPUs", scale=bounded_scale([min(devices) / 1.4, max(devices) * 1.4]),
        axis=alt.Axis(values=devices, format=",d", grid=False),
    )  # fmt: skip
    scale = alt.Scale(domain=[0.8, 1.05], nice=False)
    y = alt.Y("printed:Q", title="realized over ideal", scale=scale, axis=alt.Axis(grid=True, tickCount=5))
    base = alt.Chart(alt.Data(values=data))
    chart = alt.layer(
        base.mark_area(color=PREDICTED, opacity=0.2).encode(x=x, y=alt.Y("low:Q", scale=scale), y2="high:Q"),
        base.mark_line(color=PREDICTED).encode(x=x, y=alt.Y("value:Q", scale=scale)),
        base.mark_point(filled=True, color=PREDICTED, size=50, opacity=1).encode(x=x, y=alt.Y("value:Q", scale=scale)),
        base.mark_point(filled=True, color=PRINTED, size=70, opacity=1, shape="diamond").encode(x=x, y=y),
        base.mark_text(dy=-14, color=INK, style=ROOMY).encode(x=x, y=y, text="text:N"),
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
    x = alt.X(
        "devices:Q", title="GPUs", scale=bounded_scale([first / 1.4, most * 1.5]),
        axis=alt.Axis(values=[8192, 16384, 32768, 65536, 98304], format=",d", grid=False),
    )  # fmt: skip
    scale = bounded_scale([min(ends) / 1.3, max(ends) * 1.3])
    ticks = [t for t in (1, 2, 5, 10, 20, 50) if min(ends) / 1.3 <= t <= max(ends) * 1.3]
    y = alt.Y("days:Q", title="days", scale=scale, axis=alt.Axis(values=ticks, grid=True, format="d"))
    points = alt.Chart(alt.Data(values=data))
    chart = alt.layer(
        alt.Chart(alt.Data(values=ideal)).mark_line(color=INK, strokeDash=[5, 4], strokeWidth=1).encode(x=x, y=y),
        alt.Chart(alt.Data(values=band)).mark_rule(color=PREDICTED, strokeWidth=6, opacity=0.3).encode(
            x=x, y=alt.Y("low:Q", scale=scale), y2="high:Q"
        ),
        points.mark_point(filled=True, size=80, opacity=1).encode(
            x=x, y=y, color=color_by("kind", KINDS, ("printed", "predicted"))
        ),
        points.mark_text(align="left", dx=9, color=INK).encode(x=x, y=y, text="text:N"),
    ).properties(width=WIDTH, height=280)  # fmt: skip
    return SourceFigure(
        section="At scale", title=title, chart=chart, data=_data(title, [base_row, last], _devices),
        legend=(*LEGEND[:2], ("perfect scaling", INK)),
        text="The number of tokens is not printed: it is solved for from 22.8 days on 8,192 GPUs.",
    )  # fmt: skip


def _serving(found: SourceReport) -> SourceFigure:
    rows = _claims(found, "s65_12", "s65_10")

    def label(row: SourceRow) -> str:
        return "Llama 3.1 405B offline" if row.claim.claim_id == "s65_12" else "DeepSeek-R1 online, 16 in flight"

    title = "Inference in FP4: MI355X over B200"
    return SourceFigure(
        section="Inference", title=title,
        chart=_intervals(rows, label, axis="MI355X over B200, output tokens/s", parity=True),
        data=_data(title, rows, label),
    )  # fmt: skip


def _memory(found: SourceReport) -> SourceFigure:
    title = "Memory of one 288 GiB device"
    cases = memory_rows()
    rows = [row for case in cases for row in stacked(case.parts_gib, case=case.name)]
    totals = [
        {"case": c.name, "end": sum(c.parts_gib.values()), "text": f"{sum(c.parts_gib.values()):.0f} GiB"}
        for c in cases
    ]
    y = alt.Y("case:N", sort=[c.name for c in cases], title=None, axis=alt.Axis(labelLimit=300))
    scale = alt.Scale(domain=[0, max(r["end"] for r in totals) * 1.15], nice=False)
    bars = alt.Chart(alt.Data(values=rows)).mark_bar(height={"band": 0.65})
    limits = [{"x": c, "text": t} for c, t in ((288.0, "MI355X"), (179.06, "B200"))]
    rule = alt.Chart(alt.Data(values=limits))
    chart = alt.layer(
        bars.encode(
            y=y, x=alt.X("start:Q", scale=scale, title="GiB", axis=alt.Axis(grid=True, tickCount=6)), x2="end:Q",
            color=color_by("part", MEMORY_PARTS),
        ),
        rule.mark_rule(color=INK, strokeWidth=1.5).encode(x=alt.X("x:Q", scale=scale)),
        rule.mark_text(color=INK, dy=-6, baseline="bottom", y=0).encode(
            x=alt.X("x:Q", scale=scale), text="text:N"
        ),
        alt.Chart(alt.Data(values=totals)).mark_text(align="left", dx=5, color=INK).encode(
            x=alt.X("end:Q", scale=scale), y=y, text="text:N"
        ),
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
    x = alt.X(
        "usd:Q",
        title="USD per hour",
        axis=alt.Axis(grid=True, tickCount=6),
        scale=alt.Scale(domain=[0, 150], nice=False),
    )
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("name:N", sort=None, title=None))
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
    _ratios("Training throughput", "Single node, PyTorch", *(f"perf25_0{i}" for i in range(1, 6))),
    _ratios("Training throughput", "Single node, JAX MaxText", "perf25_06", "perf25_07", "perf25_08"),
    _ratios("Training throughput", "Several nodes", "perf25_09", "perf25_10", "perf25_11"),
    _minutes, _minutes_8b, _generations, _table_1, _figure_2, _serving, _memory, _prices,
)  # fmt: skip
