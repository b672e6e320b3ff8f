"""Tables, JSON document and page of `bench serve`: rates, latencies, failures, the best load under a bound.

The page adds throughput against interactivity, and the conditions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.answers.quantities import cell, cell_with_ends, percent, rate, spread_sentence
from meshwright.answers.text_table import TextTable
from meshwright.bench.serving.importers import ImportedResult
from meshwright.bench.serving.summary import BoundStep, InterTokenDefinition, LoadSummary, best_by_bound, best_under
from meshwright.records.measurement import ValueRange
from meshwright.records.serving import RequestStatus, ServingPoint, TokenSource, sum_known
from meshwright.report.charts import BLUE, GREEN, INK, RED, WIDTH, across, alt, chart_of, up
from meshwright.report.figures import pareto_svg, svg
from meshwright.report.html import PageSection, figure, measured_page, page_table, paragraph, table_sections

DEFINITIONS = {InterTokenDefinition.TPOT: "time per output token", InterTokenDefinition.CHUNK_GAP: "gap between chunks"}
LITTLES_LAW_LIMIT = 0.05
SEVERAL_TOKENS = 1.05
"""Tokens per chunk from which on gaps between chunks are not inter-token latencies."""


def serving_document(found: Sequence[LoadSummary], *, bound_s: float) -> dict[str, Any]:
    """All values for JSON: each load, each repeat, and the best loads by bound."""
    usable = [s for s in found if s.usable]
    best: dict[str, Any] = {}
    for definition in InterTokenDefinition:
        steps = best_by_bound(usable, definition)
        best[definition] = {"steps": steps, "bound_s": bound_s, "under_bound": best_under(steps, bound_s)}
    return {
        "points": [s.document() for s in found],
        "repeats": [point for s in found for point in s.points],
        "best": best,
        "cautions": cautions(found),
    }


def tables(found: Sequence[LoadSummary], *, bound_s: float) -> list[TextTable]:
    """The tables that have rows."""
    made = (rate_table(found), latency_table(found), best_table(found, bound_s=bound_s), failure_table(found))
    return [table for table in made if table.rows]


def rate_table(found: Sequence[LoadSummary]) -> TextTable:
    """Rates of each load."""
    has_goodput = any(s.value("good_ratio") is not None for s in found)
    rows = []
    for s in found:
        if not s.usable:
            rows.append((s.load.name, s.total("num_ok"), *[""] * (6 if has_goodput else 5)))
            continue
        cells = [cell(s.value(f"{kind}_tokens_per_s")) for kind in ("input", "output")]
        good = s.value("good_ratio")
        cells += [cell_with_ends(s.value("total_tokens_per_s")), cell(s.value("steady_total_tokens_per_s"))]
        cells.append(cell(s.value("requests_per_s")))
        cells += [percent(good.value) if good else ""] if has_goodput else []
        rows.append((s.load.name, s.total("num_ok"), *cells))
    headings = ["load", "requests", "input", "output", "total", "total, steady", "requests/s"]
    return TextTable(
        title="Tokens/s",
        headings=[*headings, "goodput"] if has_goodput else headings,
        rows=rows,
        caption="Successful requests over the whole load; steady: without ramp and drain, empty if that is too short."
        + (" Goodput: share of all requests within all bounds." if has_goodput else "")
        + spread_sentence(max((len(s.usable) for s in found), default=0), "total"),
    )


def latency_table(found: Sequence[LoadSummary]) -> TextTable:
    """Latencies of each load in milliseconds."""
    rows = []
    for s in found:
        if s.usable:
            cells = []
            for name in ("ttft_s", "tpot_s", "chunk_gap_s"):
                cells += [_ms(s.latency(name)), _ms(s.latency(name, "p99"))]
            rows.append((s.load.name, *cells, _ms(s.latency("e2e_s"))))
    return TextTable(
        title="Latency in ms",
        headings=("load", "TTFT", "TTFT p99", "per token", "per token p99", "gap", "gap p99", "whole answer"),
        rows=rows,
        caption="Medians and 99th percentiles. Per token: time per output token after the first, of each request. "
        "Gap: between two chunks, over all requests.",
    )


def best_table(found: Sequence[LoadSummary], *, bound_s: float) -> TextTable:
    """Best total tokens/s under a bound n of the median inter-token latency, for both definitions."""
    rows = []
    for definition, name in DEFINITIONS.items():
        steps = best_by_bound([s for s in found if s.usable], definition)
        best = best_under(steps, bound_s)
        rows += [_step_row(name, step, is_best=step is best) for step in steps]
    return TextTable(
        title="Best load under a bound",
        headings=("median of", "bound above", "total tokens/s", "output tokens/s", "load", f"{bound_s * 1e3:g} ms"),
        rows=rows,
        caption="Each line holds for bounds above its latency, up to the next line. Nothing is interpolated. Loads in "
        "which requests failed are left out.",
        text_columns=("load",),
    )


def _step_row(name: str, step: BoundStep, *, is_best: bool) -> tuple[str, ...]:
    return (
        name, f"{step.above_s * 1e3:.2f} ms", rate(step.total_tokens_per_s), rate(step.output_tokens_per_s),
        step.load.name, "best" if is_best else "",
    )  # fmt: skip


def failure_table(found: Sequence[LoadSummary]) -> TextTable:
    """Requests that failed, by kind, and loads that are refused."""
    rows = [
        (s.load.name, name.replace("_", " "), count, f"of {s.total('num_requests')} requests")
        for s in found
        for name, count in failures_by_kind(s).items()
    ]
    rows += [(s.load.name, "refused", len(s.points), s.refusal) for s in found if s.points and not s.usable]
    return TextTable(
        title="Not measured", headings=("load", "ended", "count", "why"), rows=rows, text_columns=("ended", "why")
    )


def failures_by_kind(found: LoadSummary | ServingPoint) -> dict[str, int]:
    """Failed requests by kind, HTTP errors by their status where it is known."""
    counts = dict(found.errors)
    statuses = {f"{RequestStatus.HTTP_ERROR} {status}": count for status, count in found.http_statuses.items()}
    rest = counts.pop(RequestStatus.HTTP_ERROR, 0) - sum(statuses.values())
    return statuses | counts | ({RequestStatus.HTTP_ERROR: rest} if rest else {})


WAIT_LIMIT = 0.05
"""Share of its time without a processor above which a caution says so."""


def cautions(found: Sequence[LoadSummary]) -> list[str]:
    """Cautions for the reader of the rates, one sentence each."""
    points = [p for s in found for p in s.points]
    said: list[str] = []
    if any(p.token_source is TokenSource.CHUNKS and p.num_ok for p in points):
        said.append("the server sends no usage: chunks are counted as output tokens, and inputs as asked")
    if any(p.token_source is TokenSource.TOKENIZER for p in points):
        said.append("the server sends no usage: tokens are counted by the local tokenizer")
    if any((p.tokens_per_chunk or 1.0) > SEVERAL_TOKENS for p in points):
        most = max(p.tokens_per_chunk or 1.0 for p in points)
        said.append(f"chunks hold up to {most:.2f} tokens in the mean: their gaps are not per token")
    for count, text in (
        (sum(p.num_short for p in points), "answers are shorter than asked for"),
        (sum(p.num_reconnects for p in points), "kept-alive connections were closed by the server and opened again"),
        (
            sum_known(p.num_retries for p in points),
            "times a request was sent again after HTTP 429 or 503; latencies count from its first time",
        ),
        (sum(p.interrupted for p in points), "loads were interrupted"),
    ):
        if count:
            said.append(f"{count} {text}")
    reasoning, made = (sum(getattr(p, n) for p in points) for n in ("reasoning_tokens", "output_tokens"))
    if reasoning:
        firsts = [p.first_answer_s.median for p in points if p.first_answer_s is not None]
        begins = f"; the answer began after {min(firsts):.3g} to {max(firsts):.3g} s in the median" if firsts else ""
        said.append(f"{reasoning:,} of {made:,} output tokens are reasoning, which TTFT and rates count{begins}")
    cached = sum_known(p.cached_tokens for p in points)
    if cached is not None:
        inputs = sum(p.input_tokens for p in points)
        said.append(f"{cached:,} of {inputs:,} input tokens were in the server's prefix cache, as it counts them")
    said += [text for s in found if (text := _own_count(s))]
    said += [
        f"{s.load.name}: {sum(s.errors.values())} of {s.total('num_requests')} requests failed, so it is no best load"
        for s in found
        if s.usable and s.errors
    ]
    waited = max((p.server_wait_ratio or 0.0 for p in points), default=0.0)
    if waited > WAIT_LIMIT:
        said.append(
            f"the server waited for a processor in up to {percent(waited)} of its time: other programs ran on this "
            "machine, and its latencies are longer by that"
        )
    for p in points:
        if p.littles_law_ratio is not None and abs(p.littles_law_ratio - 1) > LITTLES_LAW_LIMIT:
            said.append(f"{p.load.name}: Little's law is off by {percent(abs(p.littles_law_ratio - 1))}")
        if p.refusal:
            said.append(f"{p.load.name}: {p.refusal}")
    return list(dict.fromkeys(said))


def _own_count(found: LoadSummary) -> str:
    """The server's own metrics of a load, as a sentence; empty where it has none."""
    named = (
        ("server_running", "{:.1f} running"), ("server_waiting", "{:.1f} waiting"),
        ("server_cache_usage", "at most {:.0%} of the cache in use"), ("server_hit_ratio", "{:.0%} of prompts cached"),
    )  # fmt: skip
    parts = [text.format(value.value) for name, text in named if (value := found.value(name)) is not None]
    if count := sum_known(p.server_preemptions for p in found.points):
        parts.append(f"{count} preemptions")
    return f"{found.load.name}, by the server's metrics: {', '.join(parts)}" if parts else ""


def point_line(point: ServingPoint) -> str:
    """One line about a load that has just been measured."""
    failed = sum(point.errors.values())
    text = f"{point.load.name:>16}  repeat {point.repeat}  "
    if point.ttft_s is None:
        return f"{text}{failed} of {point.num_requests} requests failed"
    text += f"{rate(point.total_tokens_per_s)} tokens/s, TTFT {point.ttft_s.median * 1e3:.1f} ms"
    if point.tpot_s is not None:
        text += f", {point.tpot_s.median * 1e3:.2f} ms per token"
    return text + (f", {failed} of {point.num_requests} requests failed" if failed else "")


def _ms(found: ValueRange | None) -> str:
    return "" if found is None else f"{found.value * 1e3:.2f}"


# --- the page ---


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
    done = sum(s.total("num_ok") for s in found)
    asked = sum(s.total("num_requests") for s in found)
    lead = (
        f"{len(found)} loads, {done} of {asked} requests successful, {sidecar['input_tokens']} input and "
        f"{sidecar['output_tokens']} output tokens asked for."
    )
    return measured_page(
        f"Serving {sidecar['endpoint']['model']}", lead=lead, key_figures=_tiles(usable, bound_s),
        notes=cautions(found), sections=[*sections, *table_sections(failure_table(found))],
        conditions=_conditions(sidecar), about=sidecar,
    )  # fmt: skip


def _tiles(usable: Sequence[LoadSummary], bound_s: float) -> list[tuple[str, str, str]]:
    shown = []
    rates = {s.load.name: s.value("total_tokens_per_s") for s in usable if not s.errors}
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


def interactivity_svg(usable: Sequence[LoadSummary]) -> str:
    """Total tokens/s of each load over output tokens per second and user, with the Pareto front as a line."""
    rows: list[dict[str, Any]] = []
    for s in usable:
        tpot, total = s.latency("tpot_s"), s.value("total_tokens_per_s")
        if tpot is not None and total is not None and tpot.value > 0:
            rows.append(
                {
                    "name": s.load.name, "x": 1 / tpot.value, "y": total.value, "low": total.low, "high": total.high,
                    "failed": bool(s.errors),
                }
            )  # fmt: skip
    whole = [row for row in rows if not row["failed"]]
    front = {
        row["name"]
        for row in whole
        if not any(
            other["x"] >= row["x"] and other["y"] >= row["y"] and (other["x"], other["y"]) != (row["x"], row["y"])
            for other in whole
        )
    }
    for row in rows:
        row["front"] = "yes" if row["name"] in front else "no"
    title = "output tokens/s of one user (1 / median time per token)"
    x = across("x", title=title, grid=True, scale=alt.Scale(zero=True))
    y = up("y", title="total tokens/s", format="~s", grid=True)
    return pareto_svg(rows, x=x, y=y, title="Total tokens/s against output tokens/s of one user")


def bound_svg(usable: Sequence[LoadSummary], *, bound_s: float) -> str:
    """Best total tokens/s as a step function of the bound, for both definitions of inter-token latency."""
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
    scale = alt.Scale(domain=[0, limit], nice=False)
    x = across("x", title="bound of the median inter-token latency, ms", scale=scale)
    y = up("y", title="best total tokens/s", format="~s", grid=True)
    lines = chart_of(rows).mark_line(interpolate="step-after", strokeWidth=2).encode(x=x, y=y, color=color)
    rule = chart_of([{"x": bound_s * 1e3}]).mark_rule(color=INK, strokeDash=[4, 3]).encode(x="x:Q")
    return svg((lines + rule).properties(width=WIDTH, height=240), title="Best total tokens/s under a bound")


def _conditions(sidecar: Mapping[str, Any]) -> dict[str, Any]:
    endpoint, server, client = sidecar["endpoint"], sidecar.get("server") or {}, sidecar.get("client") or {}
    ceilings = sidecar.get("ceilings_chunks_per_s") or ()
    return {
        "endpoint": endpoint.get("interface"),
        "server": server.get("name"),
        "server options": ", ".join(f"{k}={v}" for k, v in (server.get("options") or {}).items()),
        "model": endpoint.get("model") if not server.get("model") else server["model"],
        "client": " ".join(str(v) for v in client.values() if v),
        "client's ceiling": f"{min(ceilings):,.0f} chunks/s; half of it is allowed" if ceilings else "not measured",
        "prompts": f"seed {sidecar['seed']}" if "seed" in sidecar else "",
        "end token": "ignored" if endpoint.get("ignore_eos") else "ends an answer",
        "ramp": f"{sidecar['ramp_s']:g} s" if sidecar.get("ramp_s") else "",
    }


# --- results of other clients ---


def results_document(found: Sequence[ImportedResult], *, bound_s: float) -> dict[str, Any]:
    """All values for JSON, and the best loads of each client by bound."""
    return {"results": found, "best": [_best(name, group, bound_s) for name, group in _groups(found).items()]}


def _groups(found: Sequence[ImportedResult]) -> dict[tuple[str, str], list[ImportedResult]]:
    """Results of one client and model: only they are points of one curve."""
    groups: dict[tuple[str, str], list[ImportedResult]] = {}
    for result in found:
        groups.setdefault((result.format, result.model), []).append(result)
    return groups


def _best(name: tuple[str, str], group: Sequence[ImportedResult], bound_s: float) -> dict[str, Any]:
    loads = [LoadSummary(load=result.point.load, points=(result.point,)) for result in group]
    by_definition = {d: best_by_bound(loads, d) for d in InterTokenDefinition}
    return {
        "format": name[0], "model": name[1], "bound_s": bound_s,
        **{d: {"steps": steps, "under_bound": best_under(steps, bound_s)} for d, steps in by_definition.items()},
    }  # fmt: skip


def results_tables(found: Sequence[ImportedResult], *, bound_s: float) -> list[TextTable]:
    """One table of all results, and one of the limits to their comparison."""
    rows = [
        (
            f"{r.format} {r.model}".strip(), r.point.load.name if r.point.load.concurrency or r.point.load.offered_per_s
            else "not stated", rate(r.point.output_tokens_per_s), rate(r.point.total_tokens_per_s),
            *(
                f"{latency.median * 1e3:.2f}" if latency else ""
                for latency in (r.point.ttft_s, r.point.tpot_s, r.point.chunk_gap_s, r.point.e2e_s)
            ),
        )
        for r in found
    ]  # fmt: skip
    made = TextTable(
        title="Results of other clients",
        headings=("client, model", "load", "output tokens/s", "total tokens/s", "TTFT ms", "per token ms", "gap ms",
                  "whole answer ms"),
        rows=rows,
        caption="Medians. Per token: time per output token of each request. Gap: between chunks over all requests. "
        "Compare only values of one column.",
        text_columns=("load",),
    )  # fmt: skip
    gaps = [(r.format, text) for r in found for text in r.gaps]
    gaps += [
        (r.format, f"{sum(r.point.errors.values())} of {r.point.num_requests} requests failed: no best load")
        for r in found
        if r.point.errors
    ]
    limits = TextTable(
        title="Values that the files lack or define otherwise, and failures",
        headings=("client", "what"),
        rows=list(dict.fromkeys(gaps)),
        text_columns=("what",),
    )
    return [made, limits] if gaps else [made]
