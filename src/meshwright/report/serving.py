"""Tables and the JSON document of `bench serve`: rates, latencies, failures, and the best load under a bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.answers.quantities import percent, rate
from meshwright.answers.text_table import TextTable
from meshwright.bench.serving.summary import BoundStep, InterTokenDefinition, LoadSummary, best_by_bound, best_under
from meshwright.records.measurement import ValueRange
from meshwright.records.serving import ServingPoint, TokenSource

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
        cells = [_middle(s.value(f"{kind}_tokens_per_s")) for kind in ("input", "output")]
        good = s.value("good_ratio")
        cells += [_rate(s.value("total_tokens_per_s")), _middle(s.value("steady_total_tokens_per_s"))]
        cells.append(_middle(s.value("requests_per_s")))
        cells += [percent(good.value) if good else ""] if has_goodput else []
        rows.append((s.load.name, s.total("num_ok"), *cells))
    headings = ["load", "requests", "input", "output", "total", "total, steady", "requests/s"]
    return TextTable(
        title="Tokens/s",
        headings=[*headings, "goodput"] if has_goodput else headings,
        rows=rows,
        caption="Successful requests over the whole load; steady: without ramp and drain, empty if that is too short."
        + (" Goodput: share of all requests within all bounds." if has_goodput else "")
        + _spread_sentence(found),
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
        caption="Each line holds for bounds above its latency, up to the next line. Nothing is interpolated.",
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
        for name, count in s.errors.items()
    ]
    rows += [(s.load.name, "refused", len(s.points), s.refusal) for s in found if s.points and not s.usable]
    return TextTable(
        title="Not measured", headings=("load", "ended", "count", "why"), rows=rows, text_columns=("ended", "why")
    )


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
        (sum(p.interrupted for p in points), "loads were interrupted"),
    ):
        if count:
            said.append(f"{count} {text}")
    reasoning, made = (sum(getattr(p, n) for p in points) for n in ("reasoning_tokens", "output_tokens"))
    if reasoning:
        firsts = [p.first_answer_s.median for p in points if p.first_answer_s is not None]
        begins = f"; the answer began after {min(firsts):.3g} to {max(firsts):.3g} s in the median" if firsts else ""
        said.append(f"{reasoning:,} of {made:,} output tokens are reasoning, which TTFT and rates count{begins}")
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


def _spread_sentence(found: Sequence[LoadSummary]) -> str:
    most = max((len(s.usable) for s in found), default=0)
    if most < 2:
        return ""
    return f" Medians of {most} repeats, total with its {'95 % interval' if most >= 6 else 'range'}."


def _middle(found: ValueRange | None) -> str:
    return "" if found is None else rate(found.value)


def _rate(found: ValueRange | None) -> str:
    if found is None:
        return ""
    return (
        rate(found.value) if found.low == found.high else f"{rate(found.value)} ({rate(found.low)}–{rate(found.high)})"
    )


def _ms(found: ValueRange | None) -> str:
    return "" if found is None else f"{found.value * 1e3:.2f}"
