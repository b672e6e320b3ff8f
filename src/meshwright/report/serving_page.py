"""The page of `bench serve`: throughput against interactivity, latencies, the best load under a bound, conditions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.answers.quantities import rate
from meshwright.answers.text_table import TextTable
from meshwright.bench.serving.summary import InterTokenDefinition, LoadSummary, best_by_bound, best_under
from meshwright.report.figures import INK, WIDTH, svg
from meshwright.report.html import PageSection, document, figure, page_table, paragraph, tiles
from meshwright.report.serving import DEFINITIONS, best_table, cautions, failure_table, latency_table, rate_table
from meshwright.report.training_figures import BLUE, GREEN, RED
from meshwright.version import __version__

DEFINITION_NOTE = (
    "Interactivity is output tokens per second and user: one over the median time per output token. Time per output "
    "token is (end - first token) / (output tokens - 1) of each request, as AIPerf and genai-perf report it under the "
    "name inter-token latency. The gap between chunks is pooled over all requests, as vLLM and SGLang report it under "
    "the same name. Prefill of other requests lengthens the first and hides in the tail of the second: compare only "
    "values of one definition."
)


def serving_page(found: Sequence[LoadSummary], *, sidecar: Mapping[str, Any], bound_s: float) -> str:
    """The whole page."""
    usable = [s for s in found if s.usable]
    lead = paragraph(_lead(found, sidecar), css_class="lead") + tiles(_tiles(usable, bound_s))
    lead += "".join(paragraph(f"Note: {text}.", css_class="lead") for text in cautions(found))
    sections = []
    if usable:
        parts = []
        if any(s.latency("tpot_s") for s in usable):
            legend = [("load", BLUE), ("on the Pareto front", GREEN)]
            parts.append(figure(interactivity_svg(usable), legend=legend))
        parts += [paragraph(DEFINITION_NOTE), page_table(rate_table(found)), page_table(latency_table(found))]
        sections.append(PageSection(title="Throughput against interactivity", parts=parts))
        steps = best_table(found, bound_s=bound_s)
        if steps.rows:
            parts = [figure(bound_svg(usable, bound_s=bound_s)), page_table(steps)]
            sections.append(PageSection(title="Best load under a bound", parts=parts))
    failed = failure_table(found)
    if failed.rows:
        sections.append(PageSection(title="Not measured", parts=[page_table(failed)]))
    sections.append(PageSection(title="Conditions", parts=[page_table(_conditions(sidecar))]))
    return document(
        title=f"Serving {sidecar['endpoint']['model']}",
        lead=lead,
        sections=sections,
        footer=f"Meshwright {__version__}. Measured on {sidecar['started'][:10]}.",
    )


def _lead(found: Sequence[LoadSummary], sidecar: Mapping[str, Any]) -> str:
    done = sum(s.total("num_ok") for s in found)
    asked = sum(s.total("num_requests") for s in found)
    return (
        f"{len(found)} loads, {done} of {asked} requests successful, {sidecar['input_tokens']} input and "
        f"{sidecar['output_tokens']} output tokens asked for."
    )


def _tiles(usable: Sequence[LoadSummary], bound_s: float) -> list[tuple[str, str, str]]:
    shown = []
    rates = {s.load.name: s.value("total_tokens_per_s") for s in usable}
    best = max(((v.value, name) for name, v in rates.items() if v), default=None)
    if best:
        shown.append((rate(best[0]), "total tokens/s, the most", best[1]))
    for definition, name in DEFINITIONS.items():
        step = best_under(best_by_bound(usable, definition), bound_s)
        text = "none" if step is None else rate(step.total_tokens_per_s)
        where = "" if step is None else f", {step.load.name}"
        shown.append((text, f"total tokens/s under {bound_s * 1e3:g} ms", f"{name}{where}"))
    first = usable[0].latency("ttft_s") if usable else None
    if first is not None:
        shown.append((f"{first.value * 1e3:.1f} ms", "first token", usable[0].load.name))
    return shown


def _front(rows: Sequence[dict[str, Any]]) -> set[str]:
    """Names of the loads that no other load beats in both throughput and interactivity."""
    return {
        row["load"]
        for row in rows
        if not any(
            other["x"] >= row["x"] and other["y"] >= row["y"] and (other["x"], other["y"]) != (row["x"], row["y"])
            for other in rows
        )
    }


def interactivity_svg(usable: Sequence[LoadSummary]) -> str:
    """Total tokens/s of each load over output tokens per second and user, with the Pareto front as a line."""
    import altair as alt

    rows: list[dict[str, Any]] = []
    for s in usable:
        tpot, total = s.latency("tpot_s"), s.value("total_tokens_per_s")
        if tpot is not None and total is not None and tpot.value > 0:
            rows.append(
                {"load": s.load.name, "x": 1 / tpot.value, "y": total.value, "low": total.low, "high": total.high}
            )
    front = _front(rows)
    for row in rows:
        row["front"] = "yes" if row["load"] in front else "no"
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X(
            "x:Q",
            title="output tokens/s of one user (1 / median time per token)",
            axis=alt.Axis(grid=True),
            scale=alt.Scale(zero=True),
        ),
        y=alt.Y("y:Q", title="total tokens/s", axis=alt.Axis(format="~s", grid=True)),
    )
    color = alt.Color("front:N", legend=None, scale=alt.Scale(domain=["no", "yes"], range=[BLUE, GREEN]))
    line = base.transform_filter("datum.front == 'yes'").mark_line(color=GREEN, strokeWidth=1.5).encode(order="x:Q")
    spread = base.mark_rule(strokeWidth=2).encode(y="low:Q", y2="high:Q", color=color)
    points = base.mark_point(filled=True, size=70, opacity=1).encode(color=color)
    names = base.mark_text(align="left", dx=7, dy=-6, color=INK, fontSize=11).encode(text="load:N")
    chart = alt.layer(line, spread, points, names).properties(width=WIDTH, height=300)
    return svg(chart, title="Total tokens/s against output tokens/s of one user")


def bound_svg(usable: Sequence[LoadSummary], *, bound_s: float) -> str:
    """Best total tokens/s as a step function of the bound, for both definitions of inter-token latency."""
    import altair as alt

    rows: list[dict[str, Any]] = []
    ends = [bound_s * 1e3]
    for definition in InterTokenDefinition:
        ends += [step.above_s * 1e3 for step in best_by_bound(usable, definition)]
    limit = 1.15 * max(ends)
    for definition, name in DEFINITIONS.items():
        steps = best_by_bound(usable, definition)
        corners = [(step.above_s * 1e3, step.total_tokens_per_s) for step in steps]
        corners += [(limit, steps[-1].total_tokens_per_s)] if steps else []
        rows += [{"definition": name, "x": x, "y": y} for x, y in corners]
    color = alt.Color(
        "definition:N", title=None,
        scale=alt.Scale(domain=list(DEFINITIONS.values()), range=[BLUE, RED]),
        legend=alt.Legend(orient="top", labelColor=INK),
    )  # fmt: skip
    lines = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(interpolate="step-after", strokeWidth=2)
        .encode(
            x=alt.X(
                "x:Q",
                title="bound of the median inter-token latency, ms",
                scale=alt.Scale(domain=[0, limit], nice=False),
            ),
            y=alt.Y("y:Q", title="best total tokens/s", axis=alt.Axis(format="~s", grid=True)),
            color=color,
        )
    )
    rule = alt.Chart(alt.Data(values=[{"x": bound_s * 1e3}])).mark_rule(color=INK, strokeDash=[4, 3]).encode(x="x:Q")
    return svg((lines + rule).properties(width=WIDTH, height=240), title="Best total tokens/s under a bound")


def _conditions(sidecar: Mapping[str, Any]) -> TextTable:
    endpoint, server, client = sidecar["endpoint"], sidecar.get("server") or {}, sidecar.get("client") or {}
    ceilings = sidecar.get("ceilings_chunks_per_s") or ()
    rows = {
        "endpoint": endpoint.get("interface"),
        "server": server.get("name"),
        "server options": ", ".join(f"{k}={v}" for k, v in (server.get("options") or {}).items()),
        "model": endpoint.get("model") if not server.get("model") else server["model"],
        "client": " ".join(str(v) for v in client.values() if v),
        "client's ceiling": f"{min(ceilings):,.0f} chunks/s; half of it is allowed" if ceilings else "not measured",
        "prompts": f"seed {sidecar['seed']}" if "seed" in sidecar else "",
        "end token": "ignored" if endpoint.get("ignore_eos") else "ends an answer",
        "ramp": f"{sidecar['ramp_s']:g} s" if sidecar.get("ramp_s") else "",
        "command": shlex.join(sidecar["command"]),
        "from, to": f"{sidecar['started']}, {sidecar['ended'] or 'interrupted'}",
    }
    shown = [(name, value) for name, value in rows.items() if value]
    return TextTable(title="Conditions", headings=("", "what"), rows=shown, text_columns=("what",))
