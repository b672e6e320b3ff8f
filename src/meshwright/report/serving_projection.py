"""Pages of `meshwright inference estimate` and `plan`: rates against the speed of one user, and arrivals."""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

import numpy as np

from meshwright.answers.quantities import rate, seconds
from meshwright.answers.serving_estimate import ServingEstimate
from meshwright.answers.serving_plan import ServingPlan
from meshwright.answers.text_table import TextTable
from meshwright.inference.arrivals import ArrivalEstimate
from meshwright.inference.estimate import LoadEstimate
from meshwright.inference.price import TokenPrice
from meshwright.report.charts import BLUE, GREEN, INK, ORANGE, WIDTH, across, alt, chart_of, color_by, up
from meshwright.report.figures import pareto_svg, svg
from meshwright.report.html import PageSection, document, figure, page_table, paragraph, tiles
from meshwright.version import __version__

MOST_LAYOUTS = 20
"""Layouts on the page of a plan; the JSON document has all."""


def estimate_page(found: ServingEstimate, *, command: str = "") -> str:
    """The whole page of a server under one load or several. `command` is the command line that makes it."""
    loads, last = found.loads, found.loads[-1]
    points = [
        {
            "name": f"{e.in_flight:,.0f} in flight", "x": e.interactivity, "y": e.output_tokens_per_s.value,
            "low": e.output_tokens_per_s.low, "high": e.output_tokens_per_s.high, "front": "no",
        }
        for e in loads
    ]  # fmt: skip
    drawn = (
        [_speeds(points, of="all devices", legend=[("load, with its 80 % interval", BLUE)])] if len(loads) > 1 else []
    )
    table, *under = found.tables()
    sections = [PageSection(title="Loads", parts=[*drawn, page_table(table)], is_wide=True)]
    return _page(
        found.summary(), last, price=found.prices()[-1], notes=found.notes, command=command,
        sections=[*sections, *_under_arrivals(found.arrivals, under)],
    )  # fmt: skip


def plan_page(found: ServingPlan, *, command: str = "") -> str:
    """The whole page of the layouts of a cluster. `command` is the command line that makes it."""
    front = set(map(id, found.search.front))
    best = [v.best for v in found.search.verdicts[:MOST_LAYOUTS] if v.best is not None]
    points = [
        {
            "name": p.describe(), "x": p.interactivity, "y": p.tokens_per_s_per_device,
            "front": "yes" if id(p) in front else "no",
        }
        for p in [*found.search.front, *(p for p in best if id(p) not in front)]
    ]  # fmt: skip
    legend = [("best load of another layout", BLUE), ("on the Pareto front", GREEN)]
    drawn = _speeds(points, of="one device", legend=legend, bound_s=found.question.bounds.itl_s)
    under = [] if (table := found.arrival_table()) is None else [table]
    sections = [
        PageSection(title="Layouts", parts=[drawn, page_table(found.layout_table(MOST_LAYOUTS))], is_wide=True),
        *_under_arrivals(found.arrivals, under),
        PageSection(title="Pareto front", parts=[page_table(found.front_table())], is_wide=True),
    ]
    return _page(
        found.summary(), found.estimate, price=found.token_price, notes=found.notes, sections=sections, command=command
    )


def _page(
    title: str, of: LoadEstimate, *, price: TokenPrice | None, notes: tuple[str, ...], sections: list[PageSection],
    command: str,
) -> str:  # fmt: skip
    out, itl = of.output_tokens_per_s, of.itl
    figures = [
        (rate(out.value), "output tokens/s", f"80 % interval {rate(out.low)} to {rate(out.high)}"),
        (seconds(itl.value), "inter-token latency", f"{seconds(itl.low)} to {seconds(itl.high)}"),
        (seconds(of.ttft.value), "time to first token", f"{seconds(of.ttft.low)} to {seconds(of.ttft.high)}"),
    ]
    if price is not None:
        hour = f"{price.hour.total_usd_per_device_hour:.4g} USD per device-hour: {price.hour.source}"
        figures.append((f"{price.usd_per_million_output:.3g} USD", "per million output tokens", hour))
    name, _, answer = title.partition(": ")
    cautions = "".join(paragraph(f"Note: {text}.", css_class="lead") for text in notes)
    lead = paragraph(f"{answer}.", css_class="lead") + tiles(figures) + cautions
    return document(title=name, lead=lead, sections=sections, footer=f"Meshwright {__version__}. {command}")


def _speeds(points: list[dict[str, Any]], *, of: str, legend: list[tuple[str, str]], bound_s: float = inf) -> str:
    """Output tokens/s over output tokens/s of one user; a bound of the inter-token latency ends the text below."""
    shown = [p for p in points if isfinite(p["x"])]  # answers of one token have no speed
    if not shown:
        return ""
    x = across("x", title="output tokens/s of one user (1 / ITL)", grid=True, scale=alt.Scale(zero=True))
    y = up("y", title=f"output tokens/s of {of}", format="~s", grid=True, scale=alt.Scale(zero=True))
    drawn = figure(
        pareto_svg(shown, x=x, y=y, title=f"Output tokens/s of {of} against the speed of one user"), legend=legend
    )
    if bound_s == inf:
        return drawn
    return drawn + paragraph(f"The bound of {seconds(bound_s)} is {1 / bound_s:.3g} tokens/s of one user.")


def _under_arrivals(found: ArrivalEstimate | None, tables: list[TextTable]) -> list[PageSection]:
    """The share of requests within each latency, with the percentiles below it; nothing without a rate."""
    if found is None:
        return []
    drawn = [] if found.simulated is None else [figure(latencies_svg(found), legend=LATENCIES.values())]
    parts = [*drawn, *(page_table(t) for t in tables)]
    return [PageSection(title="Under arrivals", parts=parts, is_wide=True)]


LATENCIES = {
    "itl_s": ("inter-token latency", BLUE), "ttft_s": ("time to first token", ORANGE), "e2e_s": ("end to end", GREEN),
}  # fmt: skip


def latencies_svg(found: ArrivalEstimate) -> str:
    """The share of the simulated requests within each latency, and the bounds as dashed lines."""
    assert found.simulated is not None
    shares = np.linspace(0, 1, 201)
    rows = [
        {"name": name, "ms": 1e3 * value, "share": share}
        for key, (name, _) in LATENCIES.items()
        for value, share in zip(
            np.quantile(getattr(found.simulated, key), shares).tolist(), shares.tolist(), strict=True
        )
        if value > 0  # answers of one token have no time between tokens
    ]
    scale = alt.Scale(type="log", nice=False)
    x = across("ms", title="latency, ms", scale=scale, grid=True, format="~s")
    y = up("share", title="share of requests within it", format="%", grid=True)
    lines = chart_of(rows).mark_line(strokeWidth=2).encode(x=x, y=y, color=color_by("name", dict(LATENCIES.values())))
    bounds = {"itl_s": found.bounds.itl_s, "ttft_s": found.bounds.ttft_s}
    ruled = [{"ms": 1e3 * value, "name": LATENCIES[key][0]} for key, value in bounds.items() if value < inf]
    rules = chart_of(ruled).mark_rule(color=INK, strokeDash=[4, 3]).encode(x=across("ms", scale=scale))
    drawn = alt.layer(lines, rules) if ruled else lines
    return svg(drawn.properties(width=WIDTH, height=260), title="Share of requests within a latency")
