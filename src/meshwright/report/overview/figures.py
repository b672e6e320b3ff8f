"""Figures of a report on records: values with intervals, loss, memory, kernels, scaling, predictions, cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.answers.comparison.sides import MEMORY, Metric, SideValue
from meshwright.answers.overview.collect import ReportEntry
from meshwright.answers.overview.cost import CostSensitivity
from meshwright.answers.training_run import TrainingRun
from meshwright.report.charts import (
    BLUE,
    GRAY,
    GREEN,
    INK,
    ORANGE,
    OUTLIER_COLOR,
    OUTLIER_LEGEND,
    PURPLE,
    RED,
    TEAL,
    WIDTH,
    across,
    alt,
    axis_end,
    bounded_scale,
    chart_of,
    color_by,
    lines_of,
    names_of,
    rule_at,
    stacked,
    up,
)
from meshwright.report.comparison.tables import value_text
from meshwright.report.training_figures import portions
from meshwright.units import GIB

SERIES = (BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, "#a07e3b", GRAY)
MOST_BARS = 30
MOST_POINTS = 400
"""Points of a scatter plot: more cover each other, and a page of thousands opens slowly."""
"""Entries in one figure, the best first; the table has all."""
NAMES: dict[str, Any] = {"labelLimit": 220}
LABELLED = 8
LABEL_ROOM = (0.5, 0.08)
"""Logarithms of the rates, across and up, within which a second name would cover the first."""
KERNEL_COLORS = {
    "GEMM": BLUE, "attention": TEAL, "elementwise": GREEN, "optimizer": PURPLE, "pipeline wait": "#c2a83e",
    "communication": ORANGE, "other": GRAY, "idle": RED,
}  # fmt: skip
CURVE_POINTS = 120
LOSS_LABELS = 44
"""Least pixels of the labels of losses: fonts of browsers are wider than measured."""
WIDE_LOSSES = 20.0
"""Largest over smallest loss above which the axis is logarithmic."""


def values_chart(named: Sequence[tuple[str, SideValue]]) -> Any:
    """One line an entry: its value with text, and the range of its samples or its interval."""
    rows: list[dict[str, Any]] = []
    for name, value in named:
        low, high = _spread(value)
        rows.append({"name": name, "value": value.value, "low": low, "high": high, "text": value_text(value)})
    longest = axis_end([max(r["high"], r["value"]) for r in rows])
    metric = named[0][1].metric
    scale = alt.Scale(domain=[0, longest * 1.25 or 1.0], nice=False)
    form, title = "%" if metric.unit == "ratio" else "~s", f"{metric.name}, {metric.unit}"
    x = across("value", scale=scale, title=title, format=form, tickCount=6, grid=True)
    for row in rows:
        _cut(row, "value", longest=longest, largest=max(row["high"], row["value"]))
    base = lines_of(rows, **NAMES)
    whole = base.mark_rule(color=INK, strokeWidth=1.5).encode(x=across("low", scale=scale), x2="high:Q")
    return alt.layer(*_bars(base, x, scale), whole).properties(width=WIDTH, height={"step": 24})


def _cut(row: dict[str, Any], key: str, *, longest: float, largest: float) -> None:
    """Shorten a bar and its interval to the axis, and say so in its text. `largest` is the end of both."""
    row |= {"cut": largest > longest, "end": min(largest, longest)}
    if row["cut"]:
        row |= {k: min(row[k], longest) for k in (key, "low", "high") if k in row}
        row["text"] += " \u00bb"


def _bars(base: Any, x: Any, scale: Any) -> tuple[Any, Any]:
    """Bars with their text; one that is longer than the axis has another colour."""
    color = alt.condition("datum.cut", alt.value(OUTLIER_COLOR), alt.value(BLUE))
    bars = base.mark_bar(opacity=0.75, height={"band": 0.6}).encode(x=x, color=color)
    texts = base.mark_text(align="left", dx=6, color=INK)
    return bars, texts.encode(x=across("end", scale=scale), text="text:N")


def cut_legend(sizes: Sequence[float]) -> tuple[tuple[str, str], ...]:
    """(name, colour) of bars that are longer than the axis, where there are some."""
    return (OUTLIER_LEGEND,) if max(sizes) > axis_end(sizes) else ()


def value_ends(named: Sequence[tuple[str, SideValue]]) -> list[float]:
    """End of each bar of `values_chart`, its interval included."""
    return [max(v.value, *_spread(v)) for _, v in named]


def _spread(value: SideValue) -> tuple[float, float]:
    """The interval of a value, or the middle 80 % of its samples."""
    ends = [e for e in (value.low, value.high) if e is not None] or list(value.samples) or [value.value]
    low, high = np.quantile(ends, [0.1, 0.9]) if len(ends) > 4 else (min(ends), max(ends))
    return float(low), float(high)


def loss_chart(runs: Sequence[tuple[str, TrainingRun]]) -> Any:
    """Training loss over tokens, one line a training, its name at its end."""
    rows, ends = [], []
    for name, run in runs:
        steps = [s for s in run.steps if isinstance(s.get("loss"), int | float)]
        per_step = run.run["global_batch"] * run.run["sequence_length"]
        curve = [
            {"name": name, "tokens": p["step"] * per_step, "loss": p["median"]}
            for p in portions(steps, "loss", most=CURVE_POINTS)
        ]
        rows += curve
        ends += curve[-1:]
    color = color_by("name", dict(loss_legend(runs)))
    x = across("tokens", title="tokens", format="~s", tickCount=6, grid=False)
    losses = [r["loss"] for r in rows]
    is_wide = min(losses) > 0 and max(losses) > WIDE_LOSSES * min(losses)  # one that diverged, as a rule
    scale = alt.Scale(type="log", nice=False) if is_wide else alt.Scale(zero=False)
    form, title = "~r" if is_wide else alt.Undefined, "loss, nats per token"
    y = up("loss", title=title, scale=scale, grid=True, tickCount=6, format=form, minExtent=LOSS_LABELS)
    lines = chart_of(rows).mark_line(strokeWidth=1.7).encode(x=x, y=y, color=color)
    dots = chart_of(ends).mark_point(filled=True, size=40, opacity=1).encode(x=x, y=y, color=color)
    return alt.layer(lines, dots).properties(width=WIDTH + 100, height=260)


def loss_legend(runs: Sequence[tuple[str, TrainingRun]]) -> list[tuple[str, str]]:
    """(name, colour) of each curve."""
    return [(name, SERIES[i]) for i, (name, _) in enumerate(runs)]


def memory_chart(entries: Sequence[ReportEntry]) -> Any:
    """Memory of each entry as a bar, and its prediction as a tick."""
    rows: list[dict[str, Any]] = []
    ticks: list[dict[str, Any]] = []
    for entry, end in zip(entries, memory_ends(entries), strict=True):
        value, predicted = entry.value(MEMORY), _predicted_memory(entry.run)
        assert value is not None
        rows.append({"name": entry.name, "gib": value.value / GIB, "end": end / GIB, "text": value_text(value)})
        if predicted:
            ticks.append({"name": entry.name, "gib": predicted / GIB})
    longest = axis_end([r["end"] for r in rows])
    for row in rows:
        _cut(row, "gib", longest=longest, largest=row["end"])
    for tick in ticks:
        tick["gib"] = min(tick["gib"], longest)
    scale = alt.Scale(domain=[0, longest * 1.25], nice=False)
    x = across("gib", scale=scale, title="GiB per device", grid=True, tickCount=6)
    drawn = chart_of(ticks).mark_tick(color=PURPLE, thickness=3, size=18).encode(x=x, y=names_of(rows, **NAMES))
    return alt.layer(*_bars(lines_of(rows, **NAMES), x, scale), drawn).properties(width=WIDTH, height={"step": 24})


def memory_ends(entries: Sequence[ReportEntry]) -> list[float]:
    """End of each bar of `memory_chart`, its prediction included."""
    return [max(e.known(MEMORY), _predicted_memory(e.run) or 0.0) for e in entries]


def kernels_chart(runs: Sequence[tuple[str, TrainingRun]]) -> Any:
    """Stacked bars: share of a step by kind of kernel, one a training."""
    rows: list[dict[str, Any]] = []
    for name, run in runs:
        rows += stacked({c: run.record["profile"]["shares"].get(c, 0.0) for c in KERNEL_COLORS}, name=name)
    for row in rows:
        share = row["end"] - row["start"]
        row |= {"middle": row["start"] + share / 2, "text": f"{share:.0%}" if share > 0.055 else ""}
    x = across("start", title="share of a step", format="%", tickCount=5, scale=alt.Scale(domain=[0, 1], clamp=True))
    base, color = lines_of(rows, **NAMES), color_by("part", KERNEL_COLORS)
    bars = base.mark_bar(height={"band": 0.7}).encode(x=x, x2="end:Q", color=color)
    texts = base.mark_text(color="white").encode(x="middle:Q", text="text:N")
    return alt.layer(bars, texts).properties(width=WIDTH, height={"step": 28})


def scaling_chart(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Whole throughput over devices on logarithmic axes, the line of perfect scaling, efficiency as text."""
    ideal = [
        {"devices": r["devices"], "rate": rows[0]["rate"] / rows[0]["devices"] * r["devices"]}
        for r in (rows[0], rows[-1])
    ]
    devices, rates = [r["devices"] for r in rows], [r["rate"] for r in (*rows, *ideal)]
    sizes, bounds = bounded_scale([min(devices) / 1.3, max(devices) * 1.3]), [min(rates) / 1.5, max(rates) * 1.5]
    x = across("devices", title="devices", scale=sizes, values=sorted(set(devices)), format="d", grid=False)
    y = up("rate", title="tokens/s", scale=bounded_scale(bounds), format="~s", grid=True, tickCount=5)
    line = chart_of(ideal).mark_line(color=INK, strokeDash=[5, 4], strokeWidth=1).encode(x=x, y=y)
    base = chart_of(rows)
    dots = base.mark_point(filled=True, size=80, color=BLUE, opacity=1).encode(x=x, y=y)
    texts = base.mark_text(dy=-12, color=INK).encode(x=x, y=y, text="text:N")
    return alt.layer(line, dots, texts).properties(width=WIDTH, height=260)


def predicted_chart(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Measured over predicted tokens/s/device, one point an entry of `drawn_points`; the worst carry their names."""
    ends = [r[k] for r in rows for k in ("measured", "predicted", "low", "high")]
    domain = [min(ends) / 1.4, max(ends) * 1.4]
    scale = alt.Scale(type="log", domain=domain, nice=False)
    line = [{"measured": e, "predicted": e, "below": e / 1.2, "above": e * 1.2} for e in domain]
    axis: dict[str, Any] = {"scale": scale, "format": "~s", "grid": True, "tickCount": 5}
    x = across("measured", title="measured tokens/s/device", **axis)
    y = up("predicted", title="predicted tokens/s/device", **axis)
    drawn = drawn_points(rows)
    marked = [{**r, "text": text} for r, text in zip(drawn, _labels(drawn), strict=True)]
    base = chart_of(marked)
    color = alt.condition("datum.inside", alt.value(GREEN), alt.value(RED))
    band = chart_of(line).mark_area(color=GRAY, opacity=0.18, clip=True)
    texts = chart_of([r for r in marked if r["text"]])
    whole = base.mark_rule(strokeWidth=1.5, opacity=0.5)
    return alt.layer(
        band.encode(x=x, y=up("below", scale=scale), y2="above:Q"),
        chart_of(line).mark_line(color=INK, strokeWidth=1).encode(x=x, y=y),
        whole.encode(x=x, y=up("low", scale=scale), y2="high:Q", color=color),
        base.mark_point(filled=True, size=60, opacity=1).encode(x=x, y=y, color=color),
        texts.mark_text(align="left", dx=8, dy=4, color=INK).encode(x=x, y=y, text="text:N"),
    ).properties(width=WIDTH, height=WIDTH * 0.6)  # fmt: skip


def drawn_points(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The worst predictions first: half of `MOST_POINTS`, and as many of the others, evenly."""
    worst = sorted(rows, key=lambda r: -abs(np.log(r["measured"] / r["predicted"])))
    if len(worst) <= MOST_POINTS:
        return worst
    half = MOST_POINTS // 2
    return worst[:half] + [worst[i] for i in np.linspace(half, len(worst) - 1, half).astype(int)]


def serving_chart(named: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> Any:
    """Output rate over the speed that one request sees, one line a server, its loads as labels."""
    rows = [{**point, "name": name} for name, points in named for point in points]
    color = color_by("name", {name: SERIES[i] for i, (name, _) in enumerate(named)})
    title, scale = "tokens/s of one request (1 / time per output token)", alt.Scale(zero=True)
    x = across("user_rate", title=title, scale=scale, grid=True, tickCount=6)
    y = up("rate", title="output tokens/s", scale=alt.Scale(zero=True), format="~s", grid=True, tickCount=6)
    base = chart_of(rows)
    return alt.layer(
        base.mark_line(strokeWidth=1.5).encode(x=x, y=y, color=color, order="order:Q"),
        base.mark_point(filled=True, size=60, opacity=1).encode(x=x, y=y, color=color),
        base.mark_text(dy=-11, color=INK).encode(x=x, y=y, text="load:N"),
    ).properties(width=WIDTH, height=300)  # fmt: skip


def sensitivity_chart(rows: Sequence[CostSensitivity], *, base_usd: float) -> Any:
    """USD per million tokens from the low to the high case of each assumption; the rule is the base case."""
    data = [{"what": r.what, "low": r.low, "high": r.high, "left": r.low_case, "right": r.high_case} for r in rows]
    ends = [e for r in data for e in (r["low"], r["high"])]
    span = max(ends) - min(ends) or 1
    scale = alt.Scale(domain=[min(ends) - 0.35 * span, max(ends) + 0.35 * span], nice=False)
    base = lines_of(data, "what")
    x = across("low", scale=scale, title="USD per million tokens", format="~r", grid=True, tickCount=6)
    end = across("high", scale=scale)
    return alt.layer(
        base.mark_bar(color=BLUE, opacity=0.7, height={"band": 0.6}).encode(x=x, x2="high:Q"),
        rule_at(base_usd, scale=scale, color=INK),
        base.mark_text(align="right", dx=-5, color=INK, limit=95).encode(x=x, text="left:N"),
        base.mark_text(align="left", dx=5, color=INK, limit=150).encode(x=end, text="right:N"),
    ).properties(width=WIDTH, height={"step": 28})  # fmt: skip


def highest(entries: Sequence[ReportEntry], metric: Metric, *, most: int = MOST_BARS) -> list[tuple[str, SideValue]]:
    """Names and values of the entries with this metric, best first."""
    found = [(e.name, v) for e in entries if (v := e.value(metric)) is not None]
    return sorted(found, key=lambda item: -item[1].value)[:most]


def _labels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the first points that are not beside one that has its name already; the others get none."""
    named: list[Mapping[str, Any]] = []
    texts = []
    for row in rows:
        near = any(
            abs(np.log(row["measured"] / other["measured"])) < LABEL_ROOM[0]
            and abs(np.log(row["predicted"] / other["predicted"])) < LABEL_ROOM[1]
            for other in named
        )
        texts.append("" if near or len(named) == LABELLED else row["name"])
        named += [row] if texts[-1] else []
    return texts


def _predicted_memory(run: TrainingRun | None) -> float | None:
    if run is None:
        return None
    rows = [r for r in run.measured_quantities() if r.unit == "bytes"]
    return rows[0].predicted.value if rows and rows[0].predicted else None
