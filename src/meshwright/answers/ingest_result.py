"""Retrieval ingestion that was measured: what `meshwright bench ingest` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.json_values import jsonable
from meshwright.records.ingest import IngestRecords
from meshwright.result import Result

if TYPE_CHECKING:
    from meshwright.bench.ingest.summary import IngestSummary


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
        from meshwright.bench.ingest.summary import summarize

        return summarize(self.records)

    @property
    def notes(self) -> list[str]:
        """Cautions for the reader."""
        from meshwright.answers.documents.ingest import notes

        return notes(self.records)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of `meshwright bench ingest --json`."""
        from meshwright.answers.documents.ingest import ingest_document

        return jsonable(ingest_document(self.records))

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each search of an index: parameters, recall, latencies, rate."""
        return [asdict(row) for row in self.records.searches]

    def summary(self) -> str:
        """Return the rate of the fastest ingestion and the number of searches."""
        from meshwright.answers.quantities import rate

        rates = [p.rate("chunks_per_s") for p in self.totals.passes]
        best = max((r.value for r in rates if r is not None), default=0.0)
        return f"{rate(best)} chunks/s ingested, {len(self.totals.searches)} searches of indexes measured"
