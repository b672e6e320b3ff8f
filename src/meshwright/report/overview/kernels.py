"""Kernels of a report: time, FLOP/s, bytes/s and share of the roofline by shape, and the routes of each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.answers.comparison.kernel_sides import CallRates
from meshwright.answers.overview.collect import RecordReport
from meshwright.answers.quantities import percent
from meshwright.answers.text_table import TextTable
from meshwright.report.figures import INK, OUTLIER_COLOR, OUTLIER_LEGEND, WIDTH, axis_end
from meshwright.units import format_seconds

BLUE, ORANGE = "#3f78b5", "#d98a35"
KERNEL_RATES = (
    "FLOP/s and bytes/s are the least work of a call over its time, forward and backward together. The roofline is "
    "made of the rates that the same record measured; above 100 % operands stay in a cache."
)
MOST_CALLS = 40
"""Calls in the figure: those with the lowest share first, which have most to gain."""


def kernels_table(found: RecordReport) -> TextTable:
    """One row for each route of each call."""
    rows = [
        (
            entry.name, c.call, c.route, format_seconds(c.forward_s),
            "" if c.backward_s is None else format_seconds(c.backward_s), _scaled(c.flops_per_s, 1e12),
            _scaled(c.bytes_per_s, 1e9), "" if c.roofline_ratio is None else percent(c.roofline_ratio),
            "" if c.peak_bytes is None else f"{c.peak_bytes / 2**20:,.0f} MiB",
            "" if c.error is None else f"{c.error:.1e}",
            ", ".join(w for w, on in (("default", c.is_default), ("fastest", c.route and c.is_fastest)) if on),
        )
        for entry in found.entries
        for c in entry.kernels
    ]  # fmt: skip
    return TextTable(
        title="Kernels",
        headings=(
            "record", "call", "route", "forward", "backward", "TFLOP/s", "GB/s", "of the roofline", "memory", "error",
            "remark",
        ),
        rows=rows, text_columns=("call", "route", "remark"),
    )  # fmt: skip


def drawn_calls(found: RecordReport) -> list[tuple[str, CallRates]]:
    """The fastest route of every call that has a share of the roofline, lowest share first."""
    many = sum(bool(e.kernels) for e in found.entries) > 1
    calls = [
        (f"{e.name}: {c.call}" if many else c.call, c)
        for e in found.entries
        for c in e.kernels
        if c.is_fastest and c.roofline_ratio
    ]
    return sorted(calls, key=lambda item: item[1].roofline_ratio or 0.0)


def roofline_chart(calls: Sequence[tuple[str, CallRates]]) -> Any:
    """Share of the roofline of each call as a bar, with its time and route."""
    import altair as alt

    longest = _longest(calls)
    rows = [_bar(name, c, longest) for name, c in calls[:MOST_CALLS]]
    scale = alt.Scale(domain=[0, longest * 1.05], nice=False)
    axis = alt.Axis(labelLimit=260)
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("call:N", sort=[r["call"] for r in rows], title=None, axis=axis),
        x=alt.X("share:Q", scale=scale, title="share of the roofline", axis=alt.Axis(format="%", tickCount=6)),
    )
    color = alt.condition("datum.cut", alt.value(OUTLIER_COLOR), alt.value(BLUE))
    bars = base.mark_bar(opacity=0.5, height={"band": 0.65}).encode(color=color)
    whole = alt.Chart(alt.Data(values=[{"x": 1.0}])).mark_rule(color=ORANGE, strokeDash=[4, 3])
    # From the axis on, over the bars: there a text has the width of the whole plot, on a phone too.
    texts = base.mark_text(align="left", fontSize=11, color=INK).encode(x=alt.value(5), text="text:N")
    rule = whole.encode(x=alt.X("x:Q", scale=scale))
    return alt.layer(bars, rule, texts).properties(width=WIDTH - 100, height={"step": 22})


def roofline_cuts(calls: Sequence[tuple[str, CallRates]]) -> tuple[tuple[str, str], ...]:
    """(name, colour) of bars that are longer than the axis, where there are some."""
    longest = _longest(calls)
    return (OUTLIER_LEGEND,) if any((c.roofline_ratio or 0.0) > longest for _, c in calls[:MOST_CALLS]) else ()


def _longest(calls: Sequence[tuple[str, CallRates]]) -> float:
    return max(1.0, axis_end([c.roofline_ratio or 0.0 for _, c in calls[:MOST_CALLS]]))


def _bar(name: str, call: CallRates, longest: float) -> dict[str, Any]:
    share = call.roofline_ratio or 0.0
    is_cut = share > longest
    above = f"{percent(share)} \u00bb" if is_cut else ""
    text = ", ".join(filter(None, (format_seconds(call.seconds), call.route, above)))
    return {"call": name, "share": min(share, longest), "cut": is_cut, "text": text}


def _scaled(rate: float | None, unit: float) -> str:
    return "" if rate is None else f"{rate / unit:,.3g}" if rate / unit < 1000 else f"{rate / unit:,.0f}"
