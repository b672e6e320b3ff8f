"""Tables and page of `bench ingest`: rates of ingestion and its stages, recall against latency, conditions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.answers.ingest_result import bound_share, notes
from meshwright.answers.quantities import cell, cell_with_ends, percent, rate, seconds, spread_sentence
from meshwright.answers.text_table import TextTable
from meshwright.bench.ingest.summary import BuildSummary, IngestSummary, SearchSummary, summarize
from meshwright.records.ingest import STAGES, IndexBuild, IngestMode, IngestPass, IngestRecords, IngestRow
from meshwright.records.measurement import ValueRange
from meshwright.report.charts import BLUE, GRAY, GREEN, ORANGE, WIDTH, across, alt, color_by, lines_of, up
from meshwright.report.figures import pareto_svg, svg
from meshwright.report.html import PageSection, figure, measured_page, page_table, table_sections
from meshwright.units import format_bytes


def tables(records: IngestRecords) -> list[TextTable]:
    """The tables that have rows."""
    found = summarize(records)
    made = (
        rate_table(found), stage_table(found, records.sidecar), build_table(found), search_table(found),
        refusal_table(found),
    )  # fmt: skip
    return [table for table in made if table.rows]


def pass_labels(found: IngestSummary) -> tuple[list[str], str]:
    """A label of each pass from what differs between them, and a sentence about what all have in common."""
    shown = [
        {
            "chunk": f"chunks of {p.encoding.chunk_tokens}", "overlap": f"overlap {p.encoding.overlap}",
            "batch": f"batch {p.encoding.batch}", "precision": p.encoding.precision,
            "order": f"by {p.encoding.order}", "mode": str(p.mode),
        }
        for p in found.passes
    ]  # fmt: skip
    keys = list(shown[0]) if shown else []
    varied = [key for key in keys if len({row[key] for row in shown}) > 1]
    common = ", ".join(shown[0][key] for key in keys if key not in varied)
    return [", ".join(row[key] for key in varied or ["mode"]) for row in shown], common


def rate_table(found: IngestSummary) -> TextTable:
    """Rates of whole ingestions."""
    ratios = {overlap.encoding: overlap for overlap in found.overlaps}
    labels, common = pass_labels(found)
    rows = []
    for p, label in zip(found.passes, labels, strict=True):
        if not p.whole:
            continue
        overlap = ratios.get(p.encoding) if p.mode is IngestMode.PIPELINED else None
        row = [label, cell(p.rate("documents_per_s")), cell_with_ends(p.rate("chunks_per_s"))]
        row += [cell(p.rate("mb_per_s")), cell(p.value("first_searchable_s"), seconds)]
        row += [cell(p.value("last_searchable_s"), seconds), cell(p.busy_cores, "{:.2f}".format)]
        row.append(cell(p.value("peak_resident_bytes"), format_bytes))
        row.append("" if overlap is None else f"{overlap.ratio.value:.2f} of {overlap.best_ratio:.2f}")
        rows.append(row)
    return TextTable(
        title="Ingestion",
        headings=(
            "ingestion", "documents/s", "chunks/s", "MB/s", "first searchable", "last", "cores", "resident", "gain",
        ),
        rows=rows,
        caption=f"All: {common}. Searchable: from the start until the first and the last chunk can be found. Cores: "
        "CPU time over wall time. Gain: rate over the rate of sequential stages, of the gain with cores for "
        "each stage." + spread_sentence(max((len(p.whole) for p in found.passes), default=0), "chunks/s"),
    )  # fmt: skip


def stage_table(found: IngestSummary, sidecar: Mapping[str, Any]) -> TextTable:
    """Rates of each stage while it works."""
    rows = []
    for p, label in zip(found.passes, pass_labels(found)[0], strict=True):
        if not p.whole:
            continue
        shares, bound = [p.stage_share(stage) for stage in STAGES], bound_share(p, sidecar)
        row = [label, cell(p.stage_rate("read", "mb_per_s")), cell(p.stage_rate("tokenize", "tokens_per_s"))]
        row += [cell(p.stage_rate("encode", "tokens_per_s")), "" if bound is None else percent(bound)]
        row += [percent(p.whole[-1].padding_ratio), cell(p.stage_rate("index", "chunks_per_s"))]
        row.append(" / ".join("" if s is None else f"{100 * s.value:.1f}" for s in shares))
        rows.append(row)
    return TextTable(
        title="Stages",
        headings=(
            "ingestion", "read, MB/s", "tokenize", "encode", "of bound", "padding", "index", "shares, %",
        ),
        rows=rows,
        caption="Rates while a stage works: tokens/s, index in chunks/s. Of bound: tokens/s over the rate at which the "
        "encoder's own GEMMs run here. Shares: read / tokenize / encode / index.",
    )  # fmt: skip


def build_table(found: IngestSummary) -> TextTable:
    """Builds of indexes from all vectors at once."""
    rows = [
        (
            b.name, cell(b.value("build_s"), seconds), cell(b.vectors_per_s), cell(b.value("file_bytes"), format_bytes),
            "" if b.bytes_per_vector is None else f"{b.bytes_per_vector:,.0f}",
        )
        for b in found.builds
        if b.value("build_s") is not None
    ]  # fmt: skip
    first = found.builds[0].rows[0] if found.builds else None
    return TextTable(
        title="Index builds",
        headings=("index", "build", "vectors/s", "file", "bytes a vector"),
        rows=rows,
        caption="" if first is None else _vectors_sentence(first),
    )


def _vectors_sentence(first: IndexBuild) -> str:
    made = f", {first.num_synthetic:,} of them noisy copies" if first.num_synthetic else ""
    threads = f"{first.threads} thread" + ("s" if first.threads > 1 else "")
    return f"{first.num_vectors:,} vectors of {first.dim} numbers{made}; {threads}."


def search_table(found: IngestSummary) -> TextTable:
    """Recall, latency and rate of searches."""
    front = {s.name for s in found.front}
    has_own = any(s.value("own_chunk_ratio") for s in found.searches)
    rows = []
    for s in found.searches:
        recall, own = s.value("recall"), s.value("own_chunk_ratio")
        if recall is None:
            continue
        is_least = (s.batch, s.threads) == found.least
        cells = [f"{recall.value:.4f}"] + (["" if own is None else percent(own.value)] if has_own else [])
        rows.append(
            (
                s.name, s.batch, s.threads, *cells, _ms(s.value("p50_s")), _ms(s.value("p99_s")),
                cell_with_ends(s.value("queries_per_s")), "yes" if is_least and s.name in front else "",
            )
        )  # fmt: skip
    k = found.searches[0].rows[0].k if found.searches else 0
    return TextTable(
        title="Searches",
        headings=(
            "index", "batch", "threads", f"recall@{k}", *(["own"] if has_own else []), "p50 ms", "p99 ms",
            "queries/s", "front",
        ),
        rows=rows,
        caption="Recall against the exact index; equal similarities count as equal. Latency of one call from Python. "
        "Front: no other search of one query has both more recall and less latency."
        + (" Own: queries that find the chunk they were taken from." if has_own else ""),
    )  # fmt: skip


def refusal_table(found: IngestSummary) -> TextTable:
    """Indexes that could not be built or searched."""
    refused: list[BuildSummary | SearchSummary] = [b for b in found.builds if b.refusal]
    refused += [s for s in found.searches if s.refusal]
    rows = list(dict.fromkeys((each.name, each.refusal) for each in refused))
    return TextTable(title="Not measured", headings=("index", "why"), rows=rows, text_columns=("why",))


def row_line(row: IngestRow) -> str:
    """One line about the last measurement."""
    if isinstance(row, IngestPass):
        pace = row.num_chunks / row.wall_s if row.wall_s else 0.0
        text = f"{row.encoding.name}, {row.mode}, repeat {row.repeat}: {rate(pace)} chunks/s"
        return text + (", interrupted" if row.interrupted else "")
    name = ",".join(filter(None, (row.build, getattr(row, "search", ""))))
    text = f"{f'{row.index} {name}'.strip()}, repeat {row.repeat}: "
    if row.refusal:
        return text + row.refusal
    if isinstance(row, IndexBuild):
        return text + f"built in {seconds(row.build_s or 0.0)}"
    return text + (
        f"recall {row.recall:.4f}, {rate(row.queries_per_s or 0.0)} queries/s, {row.batch} at a time, "
        f"threads {row.threads}"
    )


def _ms(found: ValueRange | None) -> str:
    return "" if found is None else f"{found.value * 1e3:.3f}"


# --- the page ---


STAGE_COLORS: dict[str, str] = dict(zip(STAGES, (GRAY, ORANGE, BLUE, GREEN), strict=True))


def ingest_page(records: IngestRecords) -> str:
    """The whole page."""
    found, sidecar = summarize(records), records.sidecar
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
    documents = sidecar.get("documents") or {}
    lead = (
        f"{documents.get('num_used', 0):,} documents of {documents.get('source', 'no source')}, "
        f"{documents.get('num_bytes', 0) / 1e6:,.2f} MB, {documents.get('num_tokens', 0):,} tokens."
    )
    return measured_page(
        "Retrieval ingestion", lead=lead, key_figures=_tiles(found), notes=notes(records),
        sections=[*sections, *table_sections(build_table(found), refusal_table(found))],
        conditions=_conditions(sidecar), about=sidecar,
    )  # fmt: skip


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
    rows = [
        {"pass": label, "stage": stage, "order": place, "seconds": 1000 / pace.value}
        for p, label in zip(found.passes, pass_labels(found)[0], strict=True)
        for place, stage in enumerate(STAGES)
        if (pace := p.stage_rate(stage, "chunks_per_s")) is not None
    ]
    chart = lines_of(rows, "pass", labelLimit=420).mark_bar(height={"band": 0.7}).encode(
        x=across("sum(seconds)", title="seconds for 1,000 chunks"), color=color_by("stage", STAGE_COLORS),
        order="order:Q",
    )  # fmt: skip
    return svg(chart.properties(width=WIDTH - 120, height={"step": 26}), title="Seconds of each stage")


def recall_svg(found: IngestSummary) -> str:
    """Recall over the median latency of one query, with the Pareto front as a line."""
    front = {s.name for s in found.front}
    rows = [
        {"name": s.name, "x": p50.value * 1e3, "y": recall.value, "front": "yes" if s.name in front else "no"}
        for s in found.searches
        if (s.batch, s.threads) == found.least
        and (recall := s.value("recall")) is not None
        and (p50 := s.value("p50_s")) is not None
    ]
    x = across("x", title="median latency of one query, ms", scale=alt.Scale(type="log"), grid=True)
    y = up("y", title="recall", scale=alt.Scale(zero=False), grid=True)
    return pareto_svg(rows, x=x, y=y, title="Recall against latency of a search", is_log=True)


def _conditions(sidecar: Mapping[str, Any]) -> dict[str, Any]:
    encoder, device = sidecar.get("encoder") or {}, sidecar.get("device") or {}
    documents, queries = sidecar.get("documents") or {}, sidecar.get("queries") or {}
    software = sidecar.get("software") or {}
    return {
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
    }  # fmt: skip
