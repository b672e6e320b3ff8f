"""The page of `bench ingest`: rates of ingestion and its stages, recall against latency, conditions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from meshwright.answers.documents.ingest import notes
from meshwright.answers.quantities import rate, seconds
from meshwright.answers.text_table import TextTable
from meshwright.bench.ingest.summary import IngestSummary, summarize
from meshwright.records.ingest import STAGES, IngestRecords
from meshwright.report.figures import INK, WIDTH, svg
from meshwright.report.html import PageSection, document, figure, page_table, paragraph, tiles
from meshwright.report.ingest import build_table, pass_labels, rate_table, refusal_table, search_table, stage_table
from meshwright.report.training_figures import BLUE, GREEN
from meshwright.version import __version__

STAGE_COLORS = dict(zip(STAGES, ("#8a919b", "#d98a35", BLUE, GREEN), strict=True))


def ingest_page(records: IngestRecords) -> str:
    """The whole page."""
    found, sidecar = summarize(records), records.sidecar
    lead = paragraph(_lead(sidecar), css_class="lead") + tiles(_tiles(found))
    lead += "".join(paragraph(f"Note: {text}.", css_class="lead") for text in notes(records))
    sections = []
    if any(p.whole for p in found.passes):
        legend = list(STAGE_COLORS.items())
        parts = [page_table(rate_table(found)), figure(stages_svg(found), legend=legend)]
        parts.append(page_table(stage_table(found, sidecar)))
        sections.append(PageSection(title="Ingestion", parts=parts))
    if found.front:
        legend = [("search", BLUE), ("on the Pareto front", GREEN)]
        parts = [figure(recall_svg(found), legend=legend), page_table(search_table(found))]
        sections.append(PageSection(title="Recall against latency", parts=parts))
    others = (build_table(found), refusal_table(found))
    sections += [PageSection(title=t.title, parts=[page_table(t)]) for t in others if t.rows]
    sections.append(PageSection(title="Conditions", parts=[page_table(_conditions(sidecar))]))
    return document(
        title="Retrieval ingestion", lead=lead, sections=sections,
        footer=f"Meshwright {__version__}. Measured on {sidecar['started'][:10]}.",
    )  # fmt: skip


def _lead(sidecar: Mapping[str, Any]) -> str:
    documents = sidecar.get("documents") or {}
    return (
        f"{documents.get('num_used', 0):,} documents of {documents.get('source', 'no source')}, "
        f"{documents.get('num_bytes', 0) / 1e6:,.2f} MB, {documents.get('num_tokens', 0):,} tokens."
    )


def _tiles(found: IngestSummary) -> list[tuple[str, str, str]]:
    rates = [(r.value, p) for p in found.passes if (r := p.rate("chunks_per_s")) is not None]
    shown = []
    if rates:
        best, p = max(rates, key=lambda pair: pair[0])
        shown.append((rate(best), "chunks/s, the most", f"{p.encoding.name}, {p.mode}"))
        first = p.value("first_searchable_s")
        if first is not None:
            shown.append((seconds(first.value), "first chunk searchable", str(p.mode)))
    front = found.front
    if front:
        p50, recall = front[-1].value("p50_s"), front[-1].value("recall")
        assert p50 is not None
        assert recall is not None  # searches of the front have both
        shown.append((f"{p50.value * 1e3:.2f} ms", f"search with recall {recall.value:.3f}", front[-1].name))
    return shown


def stages_svg(found: IngestSummary) -> str:
    """Seconds of each stage for a thousand chunks, one bar for each encoding and mode."""
    import altair as alt

    rows = [
        {"pass": label, "stage": stage, "order": place, "seconds": 1000 / pace.value}
        for p, label in zip(found.passes, pass_labels(found)[0], strict=True)
        for place, stage in enumerate(STAGES)
        if (pace := p.stage_rate(stage, "chunks_per_s")) is not None
    ]
    order = list(dict.fromkeys(row["pass"] for row in rows))
    color = alt.Color(
        "stage:N", legend=None, scale=alt.Scale(domain=list(STAGE_COLORS), range=list(STAGE_COLORS.values()))
    )
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(height={"band": 0.7})
        .encode(
            y=alt.Y("pass:N", sort=order, title=None, axis=alt.Axis(labelLimit=420)),
            x=alt.X("sum(seconds):Q", title="seconds for 1,000 chunks"),
            color=color,
            order="order:Q",
        )
    )
    return svg(chart.properties(width=WIDTH - 120, height={"step": 26}), title="Seconds of each stage")


def recall_svg(found: IngestSummary) -> str:
    """Recall over the median latency of one query, with the Pareto front as a line."""
    import altair as alt

    front = {s.name for s in found.front}
    rows = [
        {"name": s.name, "x": p50.value * 1e3, "y": recall.value, "front": "yes" if s.name in front else "no"}
        for s in found.searches
        if (s.batch, s.threads) == found.least
        and (recall := s.value("recall")) is not None
        and (p50 := s.value("p50_s")) is not None
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("x:Q", title="median latency of one query, ms", scale=alt.Scale(type="log"), axis=alt.Axis(grid=True)),
        y=alt.Y("y:Q", title="recall", scale=alt.Scale(zero=False), axis=alt.Axis(grid=True)),
    )  # fmt: skip
    color = alt.Color("front:N", legend=None, scale=alt.Scale(domain=["no", "yes"], range=[BLUE, GREEN]))
    line = base.transform_filter("datum.front == 'yes'").mark_line(color=GREEN).encode(order="x:Q")
    points = base.mark_point(filled=True, size=70, opacity=1).encode(color=color)
    names = base.mark_text(align="left", dx=7, dy=-6, color=INK, fontSize=10).encode(text="name:N")
    chart = alt.layer(line, points, names).properties(width=WIDTH, height=300)
    return svg(chart, title="Recall against latency of a search")


def _conditions(sidecar: Mapping[str, Any]) -> TextTable:
    encoder, device = sidecar.get("encoder") or {}, sidecar.get("device") or {}
    documents, queries = sidecar.get("documents") or {}, sidecar.get("queries") or {}
    software = sidecar.get("software") or {}
    rows = {
        "documents": documents.get("source"),
        "digest of the texts": documents.get("sha256"),
        "encoder": encoder.get("origin"),
        "shape": f"{encoder.get('layers')} layers, hidden {encoder.get('hidden')}, {encoder.get('heads')} heads, "
        f"FFN {encoder.get('ffn')}, {encoder.get('parameters', 0):,} parameters" if encoder else "",
        "tokenizer": encoder.get("tokenizer"),
        "device": f"{device.get('name')}, {device.get('threads')} threads" if device else "",
        "queries": f"{queries['num']} of {queries['tokens']} tokens; encoding one takes "
        f"{queries['encode_p50_s'] * 1e3:.2f} ms" if queries else "",
        "software": ", ".join(f"{name} {version}" for name, version in software.items()),
        "command": shlex.join(sidecar["command"]),
        "from, to": f"{sidecar['started']}, {sidecar['ended'] or 'interrupted'}",
    }  # fmt: skip
    shown = [(name, value) for name, value in rows.items() if value]
    return TextTable(title="Conditions", headings=("", "what"), rows=shown, text_columns=("what",))
