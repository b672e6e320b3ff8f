"""Figures of a scaling study, as inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.planner.scaling import EmulatedPoint, Emulation, ScaleCurve, ScalePoint, Sensitivity
from meshwright.report.figures import FAINT, INK, WIDTH, svg
from meshwright.units import DAY_S

BLUE, ORANGE, RED = "#3f78b5", "#d98a35", "#b5525c"
HEIGHT = 300
MAX_BARS = 16
MOST_LABELS = 9
"""Points of a line that each have a label."""


def efficiency_svg(curve: ScaleCurve) -> str:
    """Efficiency over devices with its interval; a second line counts failures in."""
    steps = _efficiencies(curve.points)
    series = [{**row, "what": "steps"} for row in steps]
    first = curve.points[0].goodput
    if first is not None:
        series += [
            {"devices": p.num_devices, "y": p.efficiency.value * p.goodput.value / first.value,
             "what": "steps and failures"}
            for p in curve.points
            if p.goodput is not None
        ]  # fmt: skip
    top = max(row["high"] for row in steps)
    chart = _band(steps, top) + _lines(series, top, {"steps": BLUE, "steps and failures": RED})
    chart += _labels([{**row, "text": f"{row['y']:.0%}"} for row in steps], _ratio("y:Q", top))
    return _finish(chart, title="Efficiency against the smallest size, over the number of devices")


def days_svg(curve: ScaleCurve) -> str:
    """Days of training over devices on logarithmic axes; the thin line is perfect scaling."""
    import altair as alt

    trained = [(p.num_devices, p.training) for p in curve.points if p.training is not None]
    first, days = trained[0][0], trained[0][1].productive.value / DAY_S
    series = [
        {"devices": n, "y": y, "what": what}
        for n, t in trained
        for what, y in (
            ("perfect", days * first / n),
            ("steps", t.productive.value / DAY_S),
            ("steps and failures", t.wall.value / DAY_S),
        )
    ]
    colors = {"perfect": "#8a919b", "steps": BLUE, "steps and failures": RED}
    y = alt.Y("y:Q", title="days", scale=alt.Scale(type="log"))
    named = [{"devices": n, "y": t.wall.value / DAY_S, "text": f"{t.wall.value / DAY_S:,.3g}"} for n, t in trained]
    chart = _plot(series, y, colors) + _labels(named, y)
    return _finish(chart, title="Days of training over the number of devices")


def emulation_svg(emulation: Emulation) -> str:
    """Efficiency of the emulation with its interval, and of the clusters that it stands for."""
    steps = _efficiencies(emulation.points)
    small = f"emulated on {emulation.base.num_devices:,} devices"
    series = [{**row, "what": small} for row in steps]
    series += [
        {"devices": p.num_devices, "y": p.real_efficiency.value, "what": "the same replicas for real"}
        for p in emulation.points
        if p.real_efficiency is not None
    ]
    colors = {small: BLUE, "the same replicas for real": ORANGE}
    top = max(row["high"] for row in steps)
    title = "Efficiency of the emulation and of the clusters that it stands for"
    named = [{**row, "text": f"{row['y']:.0%}"} for row in steps]
    chart = _band(steps, top) + _lines(series, top, colors) + _labels(named, _ratio("y:Q", top))
    return _finish(chart, title=title)


def tornado_svg(found: Sensitivity) -> str:
    """Change of the efficiency by each changed assumption."""
    import altair as alt

    rows: list[dict[str, Any]] = [
        {"what": f"{s.assumption}: {s.value}", "from": found.efficiency, "to": s.efficiency,
         "side": "better" if s.change > 0 else "worse", "text": f"{s.efficiency:.3f}"}
        for s in found.swings
        if s.change is not None and s.efficiency is not None
    ][:MAX_BARS]  # fmt: skip
    ends = [row["to"] for row in rows] + [found.efficiency]
    pad = max(0.05 * (max(ends) - min(ends)), 0.005) * 2.5
    scale = alt.Scale(domain=[min(ends) - pad, max(ends) + pad], nice=False)
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("what:N", sort=[row["what"] for row in rows], title=None, axis=alt.Axis(labelLimit=360))
    )
    color = alt.Scale(domain=["better", "worse"], range=[BLUE, RED])
    bars = base.mark_bar(height={"band": 0.7}).encode(
        x=alt.X("from:Q", title="efficiency", scale=scale, axis=alt.Axis(tickCount=6)),
        x2="to:Q",
        color=alt.Color("side:N", scale=color, legend=None),
    )
    better = base.transform_filter("datum.side == 'better'").mark_text(align="left", dx=4, color=INK)
    worse = base.transform_filter("datum.side == 'worse'").mark_text(align="right", dx=-4, color=INK)
    text = [mark.encode(x="to:Q", text="text:N") for mark in (better, worse)]
    chart = alt.layer(bars, *text).properties(width=WIDTH - 120, height={"step": 22})
    return svg(chart, title="Efficiency with one assumption changed")


def _efficiencies(points: Sequence[ScalePoint] | Sequence[EmulatedPoint]) -> list[dict[str, Any]]:
    return [
        {"devices": p.num_devices, "low": p.efficiency.low, "high": p.efficiency.high, "y": p.efficiency.value}
        for p in points
    ]


def _band(rows: Sequence[dict[str, Any]], top: float) -> Any:
    import altair as alt

    area = alt.Chart(alt.Data(values=list(rows))).mark_area(opacity=0.15, color=BLUE)
    return area.encode(x=_devices(r["devices"] for r in rows), y=_ratio("low:Q", top), y2="high:Q")


def _lines(series: Sequence[dict[str, Any]], top: float, colors: dict[str, str]) -> Any:
    import altair as alt

    ideal = alt.Chart(alt.Data(values=[{"y": 1.0}])).mark_rule(color=FAINT).encode(y=_ratio("y:Q", top))
    return ideal + _plot(series, _ratio("y:Q", top), colors)


def _plot(series: Sequence[dict[str, Any]], y: Any, colors: dict[str, str]) -> Any:
    import altair as alt

    present = {row["what"] for row in series}
    domain = [name for name in colors if name in present]
    scale = alt.Scale(domain=domain, range=[colors[name] for name in domain])
    color = alt.Color("what:N", scale=scale, title=None, legend=alt.Legend(orient="top"))
    chart = alt.Chart(alt.Data(values=list(series)))
    return chart.mark_line(point=True, strokeWidth=2).encode(
        x=_devices(row["devices"] for row in series), y=y, color=color
    )


def _labels(rows: Sequence[dict[str, Any]], y: Any) -> Any:
    """The value above each point; every other one where there are many."""
    import altair as alt

    kept = list(rows)[:: 1 + len(rows) // MOST_LABELS]
    text = alt.Chart(alt.Data(values=kept)).mark_text(dy=-11, color=INK, fontSize=11)
    return text.encode(x=_devices(r["devices"] for r in rows), y=y, text="text:N")


def _devices(sizes: Iterable[int]) -> Any:
    import altair as alt

    axis = alt.Axis(format=",", values=sorted(set(sizes)), labelOverlap=True)
    return alt.X("devices:Q", title="devices", scale=alt.Scale(type="log", base=2, nice=False), axis=axis)


def _ratio(field: str, top: float) -> Any:
    import altair as alt

    scale = alt.Scale(domain=[0, max(1.0, top) * 1.04], nice=False)
    return alt.Y(field, title="efficiency", scale=scale, axis=alt.Axis(format="%"))


def _finish(chart: Any, *, title: str) -> str:
    return svg(chart.properties(width=WIDTH, height=HEIGHT), title=title)
