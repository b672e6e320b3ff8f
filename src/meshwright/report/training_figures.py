"""Figures of one training, as inline SVG. A long run is drawn in portions of steps: median, lowest and highest of
each, so that an outlier is seen however many steps there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.answers.training_run import WARM_UP_STEPS, MeasuredQuantity
from meshwright.report.charts import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    WIDTH,
    across,
    alt,
    chart_of,
    color_by,
    lines_of,
    rule_at,
    up,
)
from meshwright.report.figures import svg
from meshwright.specs.estimate import Estimate

MAX_POINTS = 300
OUTLIER_RATIO = 1.5
"""A step that takes this many times the median is drawn as a point of its own."""

STEPS_WIDTH, HEIGHT, LOW_HEIGHT = 620, 240, 110
TICK_ROOM = 36
"""Pixels that the label of a ratio needs, with the space around it."""
EXTENT: dict[str, Any] = {"minExtent": 48, "maxExtent": 48}
"""Pixels of the left axis, the same in all figures over steps, so that the figures of a page line up."""

STEP_LEGEND = {"step time": BLUE, "warming up": ORANGE, "under the profiler": PURPLE, "outlier": RED}
WHERE_COLORS = {"inside": GREEN, "outside": RED, "no interval": PURPLE}
LOSS_LEGEND = {"training": BLUE, "validation": ORANGE}


def ratio_svg(rows: Sequence[MeasuredQuantity]) -> str:
    """Measured over predicted, one line a quantity: the interval as a band, the measured value as a point on it."""
    known = [row for row in rows if row.predicted is not None]
    data = [_relative(row) for row in known]
    ends = [value for row in data for value in (row["low"], row["high"], row["measured"])]
    scale = alt.Scale(type="log", domain=[min([*ends, 0.8]) / 1.15, max([*ends, 1.25]) * 1.15], nice=False, clamp=True)
    base, ticks = lines_of(data), ratio_ticks(*scale.domain)
    x = across("low", scale=scale, title="measured over predicted", values=ticks, format="~r", grid=True)
    at, color = across("measured", scale=scale), color_by("where", WHERE_COLORS)
    band = base.mark_bar(color=BLUE, opacity=0.28, height={"band": 0.55}).encode(x=x, x2="high:Q")
    exact = rule_at(1, scale=scale, color=INK, strokeWidth=1.5)
    points = base.mark_point(filled=True, size=110, opacity=1).encode(x=at, color=color)
    text = base.mark_text(align="left", dx=10, color=INK).encode(x=at, text="text:N")
    chart = alt.layer(band, exact, points, text).properties(width=WIDTH, height={"step": 38})
    return svg(chart, title="Measured over predicted, with the 80 % interval of the prediction")


def ratio_legend(rows: Sequence[MeasuredQuantity]) -> list[tuple[str, str]]:
    """(name, colour) of what `ratio_svg` shows."""
    wheres = [_where(row) for row in rows if row.predicted is not None]
    measured = [(f"measured, {w}", WHERE_COLORS[w]) for w in WHERE_COLORS if w in wheres]
    return [("80 % interval of the prediction", f"{BLUE}47"), *measured]


def _where(row: MeasuredQuantity) -> str:
    return {True: "inside", False: "outside", None: "no interval"}[row.is_inside]


def ratio_ticks(low: float, high: float) -> list[float]:
    """Round ratios between `low` and `high` that have room on a logarithmic axis; 1 is among them.

    >>> ratio_ticks(0.6, 1.6)
    [0.67, 0.8, 1.0, 1.25, 1.5]
    >>> ratio_ticks(0.01, 100.0)
    [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
    """
    near = (0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0)
    powers = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    apart = TICK_ROOM / WIDTH * math.log10(high / low)
    for candidates in (near, sorted({1.0, *(m * p for p in powers for m in (1, 2, 5))}), sorted({1.0, *powers})):
        ticks = [t for t in candidates if low <= t <= high]
        covers = candidates is not near or (low >= near[0] / 1.5 and high <= near[-1] * 1.5)
        if covers and all(math.log10(b / a) >= apart for a, b in pairwise(ticks)):
            return ticks
    return [t for t in powers if low <= t <= high]


def _relative(row: MeasuredQuantity) -> dict[str, Any]:
    assert row.predicted is not None
    value, measured = row.predicted.value, row.measured / row.predicted.value
    return {
        "name": row.name, "low": row.predicted.low / value, "high": row.predicted.high / value,
        "measured": measured, "where": _where(row), "text": f"{measured:.2f}",
    }  # fmt: skip


def loss_svg(steps: Sequence[Mapping[str, Any]], *, title: str = "loss, nats per token") -> str:
    """Training loss of every step and the validation loss where it was taken."""
    x = _step_axis(steps)
    y = up("median", title=title, scale=alt.Scale(zero=False), grid=True, tickCount=6, **EXTENT)
    base = chart_of(portions(steps, "loss"))
    layers = [
        base.mark_area(color=BLUE, opacity=0.22, aria=False).encode(x=x, y=alt.Y("low:Q"), y2="high:Q"),
        base.mark_line(color=BLUE, strokeWidth=1.8, aria=False).encode(x=x, y=y),
    ]
    validated = [{"step": s["step"], "median": s["validation_loss"]} for s in steps if _is_number(s, "validation_loss")]
    if validated:
        held = chart_of(validated).encode(x=x, y=y)
        layers += [
            held.mark_line(color=ORANGE, strokeWidth=1.5, aria=False),
            held.mark_point(color=ORANGE, filled=True, size=60, opacity=1, aria=False),
        ]
    chart = alt.layer(*layers).properties(width=STEPS_WIDTH, height=HEIGHT)
    return svg(chart, title=f"{title.partition(',')[0].capitalize()} over steps")


def step_time_svg(steps: Sequence[Mapping[str, Any]], *, predicted: Estimate | None) -> str:
    """Step time over steps on a logarithmic axis, the predicted interval behind it, and outliers as points."""
    drawn = [dict(s, kind=_kind(s)) for s in steps]
    usual = [s for s in drawn if s["kind"] == "step time"]
    median_s = float(np.median([s["step_s"] for s in usual or drawn]))
    for s in usual:
        if s["step_s"] > OUTLIER_RATIO * median_s:
            s["kind"] = "outlier"
    x = _step_axis(steps)
    times = [s["step_s"] for s in drawn] + ([predicted.low, predicted.high] if predicted else [])
    scale = _logarithmic(times)
    y = up("median", title="seconds a step", scale=scale, format="~r", values=_ticks(times), grid=True, **EXTENT)
    layers = []
    if predicted is not None:
        interval = chart_of([{"low": predicted.low, "high": predicted.high, "value": predicted.value}])
        layers += [
            interval.mark_rect(color=BLUE, opacity=0.14, aria=False).encode(y=up("low", scale=scale), y2="high:Q"),
            interval.mark_rule(color=BLUE, strokeDash=[5, 4], aria=False).encode(y=up("value", scale=scale)),
        ]
    if usual:
        base = chart_of(portions(usual, "step_s"))
        layers.append(base.mark_line(color=BLUE, strokeWidth=1.6, aria=False).encode(x=x, y=y))
    marked = [{"step": s["step"], "median": s["step_s"], "kind": s["kind"]} for s in drawn]
    marked = [m for m in marked if m["kind"] != "step time" or len(drawn) <= MAX_POINTS]
    points = chart_of(marked).mark_point(filled=True, size=34, opacity=0.9, aria=False)
    layers.append(points.encode(x=x, y=y, color=color_by("kind", STEP_LEGEND)))
    chart = alt.layer(*layers).properties(width=STEPS_WIDTH, height=HEIGHT)
    return svg(chart, title="Step time over steps")


def step_legend(steps: Sequence[Mapping[str, Any]], *, has_prediction: bool) -> list[tuple[str, str]]:
    """(name, colour) of what `step_time_svg` may show."""
    present = {_kind(s) for s in steps} | {"outlier"}
    legend = [(name, color) for name, color in STEP_LEGEND.items() if name in present]
    return legend + ([("predicted, 80 % interval", f"{BLUE}24")] if has_prediction else [])


def line_svg(
    steps: Sequence[Mapping[str, Any]],
    key: str,
    *,
    title: str,
    color: str = BLUE,
    factor: float = 1.0,
    is_logarithmic: bool = False,
) -> str:
    """One quantity of the step log over steps, times `factor`, as a low figure."""
    data = [{**p, **{k: p[k] * factor for k in ("low", "median", "high")}} for p in portions(steps, key)]
    is_logarithmic = is_logarithmic and all(p["low"] > 0 for p in data)
    ticks, scale = alt.Undefined, alt.Scale(zero=True)
    if is_logarithmic and data:
        ends = [p[k] for p in data for k in ("low", "high")]
        ticks, scale = _ticks(ends), _logarithmic(ends)
    y = up("median", title=title, scale=scale, values=ticks, tickCount=4, grid=True, format=",~r", **EXTENT)
    x, base = _step_axis(steps), chart_of(data)
    chart = alt.layer(
        base.mark_area(color=color, opacity=0.22, aria=False).encode(x=x, y=alt.Y("low:Q"), y2="high:Q"),
        base.mark_line(color=color, strokeWidth=1.6, aria=False).encode(x=x, y=y),
    ).properties(width=STEPS_WIDTH, height=LOW_HEIGHT)
    return svg(chart, title=f"{title} over steps")


def portions(steps: Sequence[Mapping[str, Any]], key: str, *, most: int = MAX_POINTS) -> list[dict[str, float]]:
    """At most `most` portions of steps in a row: their middle step; lowest, median and highest value of `key`.

    Values that are no number are skipped.

    >>> portions([{"step": i, "x": float(i % 2)} for i in range(1, 5)], "x", most=2)
    [{'step': 1.5, 'low': 0.0, 'median': 0.5, 'high': 1.0}, {'step': 3.5, 'low': 0.0, 'median': 0.5, 'high': 1.0}]
    """
    known = [(float(s["step"]), float(s[key])) for s in steps if _is_number(s, key)]
    if not known:
        return []
    parts = np.array_split(np.array(known), min(most, len(known)))
    return [
        {
            "step": float(part[:, 0].mean()), "low": float(part[:, 1].min()),
            "median": float(np.median(part[:, 1])), "high": float(part[:, 1].max()),
        }
        for part in parts
    ]  # fmt: skip


def _is_number(entry: Mapping[str, Any], key: str) -> bool:
    value = entry.get(key)
    return isinstance(value, int | float) and math.isfinite(value)


def _kind(entry: Mapping[str, Any]) -> str:
    if entry.get("profiled"):
        return "under the profiler"
    return "warming up" if entry["step"] <= WARM_UP_STEPS else "step time"


def _step_axis(steps: Sequence[Mapping[str, Any]]) -> Any:
    first, last = steps[0]["step"] - 1, steps[-1]["step"]  # a run begins at 0, where the ticks are round
    scale, form = alt.Scale(domain=[first, last], nice=False), "~s" if last >= 10_000 else "d"
    return across("step", title="step", scale=scale, format=form, tickMinStep=1, grid=False)


def _logarithmic(values: Sequence[float]) -> Any:
    return alt.Scale(type="log", domain=[min(values) / 1.2, max(values) * 1.2], nice=False)


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers on a logarithmic axis about `values`: 1, 2, 5 of each power of ten, or multiples of one step.

    >>> _ticks([0.03, 1.1]), _ticks([1.05, 1.1])
    ([0.05, 0.1, 0.2, 0.5, 1.0], [0.9, 1.0, 1.1, 1.2, 1.3])
    """
    low, high = min(values) / 1.2, max(values) * 1.2
    powers = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    found = [power * m for power in powers for m in (1, 2, 5) if low <= power * m <= high]
    if len(found) >= 3:
        return found
    power = 10.0 ** math.floor(math.log10(high - low))
    step = next(power * m for m in (5, 2, 1, 0.5, 0.2) if high - low >= 3 * power * m)
    return [float(f"{n * step:.6g}") for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
