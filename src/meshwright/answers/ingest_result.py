"""Retrieval ingestion that was measured: the answer and document of `meshwright bench ingest`, and its notes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.answers.quantities import rate
from meshwright.bench.ingest.summary import IngestSummary, PassSummary, summarize
from meshwright.json_values import jsonable
from meshwright.records.ingest import ChunkEncoding, IngestRecords
from meshwright.result import Result


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class IngestBenchmark(Result):
    """Ingestions, index builds and searches of one benchmark.

    Attributes:
        records: the measurements, and the content of `ingest.json`.
    """

    records: IngestRecords

    @property
    def folder(self) -> Path:
        """Folder of the records."""
        return self.records.folder

    @cached_property
    def totals(self) -> IngestSummary:
        """Medians over the repeats, and the Pareto front of recall against latency."""
        return summarize(self.records)

    @property
    def notes(self) -> list[str]:
        """Cautions for the reader."""
        return notes(self.records)

    def to_dict(self) -> dict[str, Any]:
        found, sidecar = self.totals, self.records.sidecar
        keys = ("documents", "encoder", "device", "software", "queries", "least_cosine", "started", "ended", "command")
        rows = []
        for bound in sidecar.get("bounds") or []:
            of = [p for p in found.passes if _has(bound, p.encoding)]
            shares = [share for p in of if (share := bound_share(p, sidecar)) is not None]
            rows.append({**bound, "best_share": max(shares, default=None)})
        document = {
            **{key: sidecar.get(key) for key in keys},
            "bounds": rows,
            "passes": [p.document() for p in found.passes],
            "pipelined_over_sequential": found.overlaps,
            "builds": [b.document() for b in found.builds],
            "searches": [s.document() for s in found.searches],
            "pareto_front": [s.name for s in found.front],
            "notes": self.notes,
        }
        return jsonable(document)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each search of an index: parameters, recall, latencies, rate."""
        return [asdict(row) for row in self.records.searches]

    def summary(self) -> str:
        """Return the rate of the fastest ingestion and the number of searches."""
        rates = [p.rate("chunks_per_s") for p in self.totals.passes]
        best = max((r.value for r in rates if r is not None), default=0.0)
        return f"{rate(best)} chunks/s ingested, {len(self.totals.searches)} searches of indexes measured"


FEW_VECTORS = 10_000
"""Below this, a graph visits much of the index in each search, and every index has a recall near 1."""


def _has(bound: Mapping[str, Any], e: ChunkEncoding) -> bool:
    return (bound["precision"], bound["batch"], bound["chunk_tokens"]) == (e.precision, e.batch, e.chunk_tokens)


def bound_share(found: PassSummary, sidecar: Mapping[str, Any]) -> float | None:
    """Tokens/s of the encode stage over its bound."""
    measured = found.stage_rate("encode", "tokens_per_s")
    bound = next((b for b in sidecar.get("bounds") or [] if _has(b, found.encoding)), None)
    return None if measured is None or bound is None else measured.value / bound["tokens_per_s"]


def notes(records: IngestRecords) -> list[str]:
    """Cautions for the reader, one sentence each."""
    sidecar, found = records.sidecar, []
    encoder, documents, queries = (sidecar.get(key) or {} for key in ("encoder", "documents", "queries"))
    if encoder.get("is_random"):
        found.append(
            "the encoder has random weights: rates hold for its shape, recall measures the index, and the chunks "
            "found mean nothing"
        )
    used, seen = documents.get("num_used", 0), documents.get("num_found", 0)
    if used and used < seen - sum((documents.get("skipped") or {}).values()):
        found.append(f"{used:,} of {seen:,} documents were drawn; --chunks all takes every one")
    for reason, count in (documents.get("skipped") or {}).items():
        found.append(f"skipped documents: {count:,} {reason}")
    if queries.get("k", 0) < queries.get("k_asked", 0):
        found.append(f"there are {queries['k']} vectors, fewer than the {queries['k_asked']} neighbours asked for")
    vectors = max((b.num_vectors for b in records.builds), default=0)
    if 0 < vectors < FEW_VECTORS:
        found.append(f"{vectors:,} vectors are few for a comparison of indexes; --vectors N adds noisy copies")
    if any(p.interrupted for p in records.passes):
        found.append("the last ingestion was interrupted")
    return found
