"""Figures of an accuracy report, as inline SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.accuracy.report import HEADLINE, AccuracyReport, RowReport
from meshwright.report.figures import FAINT, INK, WIDTH, svg

BLUE, GREEN, ORANGE, PURPLE = "#3f78b5", "#4c9a6a", "#d98a35", "#8b6bb1"
SIDE = 560
NEAR = 0.2
"""Relative width of the band on each side of a perfect prediction."""

MOST_NAMES, LABEL_WIDTH, LABEL_HEIGHT = 8, 0.24, 0.03
"""Points with a name, and the room of one as shares of the figure's side."""

MAX_GROUPS = 24
MAX_ERROR = 1.5
"""End of the axis of errors. A prediction above 2.5 times the measurement is drawn at the end."""

LEGEND = {HEADLINE: BLUE, "other quality, GPU, no sweep": GREEN, "sweeps": PURPLE, "other accelerators": ORANGE}


def subset_of(row: RowReport) -> str:
    """The entry of `LEGEND` that a row belongs to."""
    if row.run.is_sweep:
        return "sweeps"
    if not row.run.is_gpu:
        return "other accelerators"
    return HEADLINE if row.run.quality_letter == "A" else "other quality, GPU, no sweep"


def legend(report: AccuracyReport) -> list[tuple[str, str]]:
    """(name, colour) of the subsets that the figure of `report` shows."""
    present = {subset_of(row) for row in _known(report)}
    return [(name, color) for name, color in LEGEND.items() if name in present]


def predicted_svg(report: AccuracyReport) -> str:
    """Predicted over measured rates on logarithmic axes, one point a row, the headline rows on top."""
    import altair as alt

    order = list(LEGEND)[::-1]
    points = sorted(
        ({"measured": row.measured, "predicted": row.predicted, "subset": subset_of(row)} for row in _known(report)),
        key=lambda point: order.index(point["subset"]) if point["subset"] != "sweeps" else -1,
    )
    rates = [rate for p in points for rate in (p["measured"], p["predicted"])] or [1.0]
    ends = [min(rates) / 1.5, max(rates) * 1.5]
    line = [{"x": e, "y": e, "low": e * (1 - NEAR), "high": e * (1 + NEAR)} for e in ends]
    scale = alt.Scale(type="log", domain=ends, nice=False)
    axis = alt.Axis(format="~s", values=_decades(ends), grid=True)

    def x(field: str) -> alt.X:
        return alt.X(field, type="quantitative", scale=scale, axis=axis, title="measured tokens/s per device")

    def y(field: str) -> alt.Y:
        return alt.Y(field, type="quantitative", scale=scale, axis=axis, title="predicted tokens/s per device")

    colors = alt.Scale(domain=list(LEGEND), range=list(LEGEND.values()))
    band = alt.Chart(alt.Data(values=line)).mark_area(opacity=0.5, color=FAINT, clip=True, aria=False)
    exact = alt.Chart(alt.Data(values=line)).mark_line(color=INK, strokeWidth=1, aria=False)
    dots = alt.Chart(alt.Data(values=points)).mark_circle(size=16, opacity=0.55, aria=False)
    worst = _worst(report, ends)
    names = [
        alt.Chart(alt.Data(values=[w for w in worst if w["is_over"] == is_over]))
        .mark_text(align="right" if is_over else "left", dx=-6 if is_over else 6, fontSize=10, color=INK)
        .encode(x=x("measured"), y=y("predicted"), text="id:N")
        for is_over in (True, False)
    ]
    chart = alt.layer(
        band.encode(x=x("x"), y=y("low"), y2="high:Q"),
        exact.encode(x=x("x"), y=y("y")),
        dots.encode(x=x("measured"), y=y("predicted"), color=alt.Color("subset:N", scale=colors, legend=None)),
        *names,
    ).properties(width=SIDE, height=SIDE)
    return svg(chart, title="Predicted over measured tokens/s per device, one point a published run")


def _worst(report: AccuracyReport, ends: Sequence[float]) -> list[dict[str, Any]]:
    """Names of the worst predictions of the headline rows that do not run into each other."""
    rows = [row for row in _known(report) if subset_of(row) == HEADLINE and abs(row.signed_error) > NEAR]
    rows.sort(key=lambda row: -abs(np.log(row.predicted / row.measured)))
    span = np.log(ends[1] / ends[0])
    found: list[dict[str, Any]] = []
    for row in rows:
        near = any(
            abs(np.log(row.predicted / other["predicted"])) < LABEL_HEIGHT * span
            and abs(np.log(row.measured / other["measured"])) < LABEL_WIDTH * span
            for other in found
        )
        is_over = row.predicted > row.measured  # its name stands on the side away from the line
        room = np.log(row.measured / ends[0] if is_over else ends[1] / row.measured)
        if not near and room > LABEL_WIDTH * span and len(found) < MOST_NAMES:
            found.append({"id": row.run.id, "measured": row.measured, "predicted": row.predicted, "is_over": is_over})
    return found


def errors_svg(report: AccuracyReport, *, by: str) -> str | None:
    """Signed errors by group: quartiles as a bar, 10th to 90th percentile as a line, the median as a tick.

    The groups with most predicted rows; None when no row was predicted.
    """
    import altair as alt

    rows = _quantiles(report, by)
    if not rows:
        return None
    scale = alt.Scale(domain=[-1, MAX_ERROR], clamp=True, nice=False)
    x = alt.X("low:Q", scale=scale, axis=alt.Axis(format="+%", tickCount=6), title="prediction against measurement")
    y = alt.Y("group:N", sort=[row["group"] for row in rows], title=None, axis=alt.Axis(labelLimit=260))
    base = alt.Chart(alt.Data(values=rows)).encode(y=y)
    exact = alt.Chart(alt.Data(values=[{"x": 0}])).mark_rule(color=FAINT).encode(x=alt.X("x:Q", scale=scale))
    whole = base.mark_rule(color=BLUE, strokeWidth=1.5).encode(x=x, x2="high:Q")
    middle = base.mark_bar(color=BLUE, opacity=0.55, height={"band": 0.55}).encode(
        x=alt.X("quarter:Q", scale=scale), x2="three_quarters:Q"
    )
    median = base.mark_tick(color=INK, thickness=2, size=14).encode(x=alt.X("median:Q", scale=scale))
    chart = alt.layer(exact, whole, middle, median).properties(width=WIDTH, height={"step": 20})
    return svg(chart, title=f"Error of the predicted rate by {by}")


def _decades(ends: Sequence[float]) -> list[float]:
    """The powers of ten between two rates."""
    first, last = (int(np.floor(np.log10(end))) for end in ends)
    return [10.0**k for k in range(first + 1, last + 1)]


def _quantiles(report: AccuracyReport, by: str) -> list[dict[str, Any]]:
    errors: Mapping[str, list[float]] = defaultdict(list)
    for row in _known(report):
        errors[row.run.groups[by]].append(row.signed_error)
    largest = sorted(errors.items(), key=lambda item: (-len(item[1]), item[0]))[:MAX_GROUPS]
    return [_quantile_row(f"{group} ({len(values):,})", values) for group, values in largest]


def _quantile_row(group: str, errors: Sequence[float]) -> dict[str, Any]:
    names = ("low", "quarter", "median", "three_quarters", "high")
    found = np.quantile(errors, (0.1, 0.25, 0.5, 0.75, 0.9))
    return {"group": group, **dict(zip(names, found.tolist(), strict=True))}


def _known(report: AccuracyReport) -> list[RowReport]:
    return [row for row in report.rows if row.predicted > 0 and row.measured > 0]
