"""Figures of ranked plans and of two compared plans, as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.answers.components import label
from meshwright.answers.quantities import rate
from meshwright.report.figures import FAINT, INK, WIDTH, svg

if TYPE_CHECKING:
    from meshwright.answers.plan_ranking import PlanRanking
    from meshwright.planner.explain import Difference

BLUE, RED = "#3f78b5", "#b5525c"
MAX_COMPONENTS = 14
NEGLIGIBLE_RATIO = 0.005
"""Differences below this share of the largest are not drawn."""


def ranking_svg(ranking: PlanRanking) -> str:
    """Throughput of each plan: a point, and its 80 % interval as a line."""
    import altair as alt

    estimates = [(done.plan.describe(), done.step.tokens_per_s_per_device) for done in ranking]
    rows = [
        {"plan": f"{rank:>2} {plan}", "value": e.value, "low": e.low, "high": e.high, "text": rate(e.value)}
        for rank, (plan, e) in enumerate(estimates, start=1)
    ]
    order = [row["plan"] for row in rows]
    scale = alt.Scale(domain=[0, max(e.high for _, e in estimates) * 1.08], nice=False)
    axis = alt.Axis(labelLimit=420)
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("plan:N", sort=order, title=None, axis=axis))
    x = alt.X("low:Q", scale=scale, title="tokens/s/device, 80 % interval", axis=alt.Axis(format="~s", tickCount=6))
    interval = base.mark_rule(color=BLUE, strokeWidth=2).encode(x=x, x2="high:Q")
    point = base.mark_point(color=BLUE, filled=True, size=70, opacity=1).encode(x=alt.X("value:Q", scale=scale))
    text = base.mark_text(dy=-9, color=INK, fontSize=10).encode(x=alt.X("value:Q", scale=scale), text="text:N")
    chart = alt.layer(interval, point, text).properties(width=WIDTH, height={"step": 28})
    return svg(chart, title="Throughput of each plan with its interval")


def difference_svg(components_ms: Sequence[Difference]) -> str:
    """Milliseconds by which the second plan's components are longer (right) or shorter (left)."""
    import altair as alt

    largest = sorted(components_ms, key=lambda d: -abs(d.delta))[:MAX_COMPONENTS]
    largest = [d for d in largest if abs(d.delta) >= NEGLIGIBLE_RATIO * abs(largest[0].delta)]
    rows = [
        {"component": label(d.name), "start": 0.0, "end": d.delta, "side": "longer" if d.delta > 0 else "shorter"}
        for d in largest
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("component:N", sort=[row["component"] for row in rows], title=None)
    )
    colors = alt.Scale(domain=["longer", "shorter"], range=[RED, BLUE])
    bars = base.mark_bar(height={"band": 0.7}).encode(
        x=alt.X("start:Q", title="milliseconds of a step, second plan minus first", axis=alt.Axis(tickCount=7)),
        x2="end:Q",
        color=alt.Color("side:N", scale=colors, legend=None),
    )
    axis = alt.Chart(alt.Data(values=[{"x": 0}])).mark_rule(color=FAINT).encode(x="x:Q")
    return svg((bars + axis).properties(width=WIDTH, height={"step": 22}), title="Difference by component")
