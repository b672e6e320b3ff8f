"""Medians over repeats of passes, builds and searches, and the Pareto front of recall against latency.

A value is the median over its repeats, with the 95 % interval of order statistics from six repeats on and their range
below. Interrupted passes and refused indexes have no values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

from meshwright.json_values import picked
from meshwright.records.ingest import (
    STAGES,
    ChunkEncoding,
    IndexBuild,
    IndexSearch,
    IngestMode,
    IngestPass,
    IngestRecords,
)
from meshwright.records.measurement import ValueRange, value_range

MB = 1e6

RATES: dict[str, Callable[[IngestPass, float], float]] = {
    "documents_per_s": lambda p, s: p.num_documents / s,
    "chunks_per_s": lambda p, s: p.num_chunks / s,
    "tokens_per_s": lambda p, s: p.num_tokens / s,
    "mb_per_s": lambda p, s: p.num_bytes / s / MB,
}
"""Rates of a pass or of one of its stages, from its seconds."""

Kept = TypeVar("Kept", IngestPass, IndexBuild, IndexSearch)
Tried = TypeVar("Tried", IndexBuild, IndexSearch)


@dataclass(frozen=True, kw_only=True)
class PassSummary:
    """One encoding in one mode over its repeats."""

    encoding: ChunkEncoding
    mode: IngestMode
    index: str
    rows: tuple[IngestPass, ...]

    @property
    def whole(self) -> tuple[IngestPass, ...]:
        """Passes that ended, in the order of the repeats."""
        return tuple(row for row in self.rows if not row.interrupted and row.wall_s > 0)

    def rate(self, name: str) -> ValueRange | None:
        """A rate of the whole pass."""
        return value_range(RATES[name](row, row.wall_s) for row in self.whole)

    def stage_rate(self, stage: str, name: str) -> ValueRange | None:
        """A rate of one stage while it works."""
        found = [(row, row.stage_s[stage]) for row in self.whole]
        return value_range(RATES[name](row, s) for row, s in found if s > 0)

    def value(self, name: str) -> ValueRange | None:
        """A field of the rows."""
        return value_range(getattr(row, name) for row in self.whole)

    @property
    def busy_cores(self) -> ValueRange | None:
        """CPU seconds over wall seconds. Below the number of threads, others used the cores, or threads waited."""
        return value_range(row.cpu_s / row.wall_s for row in self.whole)

    def stage_share(self, stage: str) -> ValueRange | None:
        """Seconds of a stage over seconds of all stages."""
        return value_range(row.stage_s[stage] / total for row in self.whole if (total := sum(row.stage_s.values())) > 0)

    def document(self) -> dict[str, Any]:
        """All values for JSON."""
        last = self.rows[-1]
        return {
            "encoding": self.encoding, "mode": self.mode, "index": self.index, "num_repeats": len(self.rows),
            "interrupted": any(row.interrupted for row in self.rows),
            **picked(last, "num_documents", "num_bytes", "num_chunks", "num_tokens", "padding_ratio"),
            **{name: self.rate(name) for name in RATES},
            "stages": {
                stage: {
                    "seconds": self.value(f"{stage}_s"), "share": self.stage_share(stage),
                    **{name: self.stage_rate(stage, name) for name in RATES},
                }
                for stage in STAGES
            },
            **{
                name: self.value(name)
                for name in ("wall_s", "cpu_s", "first_searchable_s", "last_searchable_s", "peak_resident_bytes")
            },
            "peak_device_bytes": self.value("peak_device_bytes"), "busy_cores": self.busy_cores,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Rate of a pipelined pass over the rate of a sequential pass, repeat by repeat."""

    encoding: ChunkEncoding
    ratio: ValueRange
    best_ratio: float
    """Sum of the sequential stages over the slowest stage: full overlap if each stage has its own cores."""


@dataclass(frozen=True, kw_only=True)
class _IndexSummary(Generic[Tried]):
    """One index over its repeats."""

    index: str
    build: str
    rows: tuple[Tried, ...]

    @property
    def name(self) -> str:
        return f"{self.index} {self.build}".strip()

    @property
    def refusal(self) -> str:
        return next((row.refusal for row in self.rows if row.refusal), "")

    def value(self, name: str) -> ValueRange | None:
        """A field of the rows."""
        return value_range(getattr(row, name) for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class SearchSummary(_IndexSummary[IndexSearch]):
    """One way of searching one index over its repeats."""

    search: str
    batch: int
    threads: int

    @property
    def name(self) -> str:
        parameters = ",".join(filter(None, (self.build, self.search)))
        return f"{self.index} {parameters}".strip()

    def document(self) -> dict[str, Any]:
        """All values for JSON."""
        names = ("recall", "own_chunk_ratio", "p50_s", "p90_s", "p99_s", "queries_per_s")
        return {
            **picked(self, "index", "build", "search", "batch", "threads"), **picked(self.rows[0], "k", "num_vectors"),
            "refusal": self.refusal or None, **{name: self.value(name) for name in names},
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BuildSummary(_IndexSummary[IndexBuild]):
    """One index over its builds."""

    @property
    def vectors_per_s(self) -> ValueRange | None:
        """Rate of the build over the repeats."""
        return value_range(row.num_vectors / row.build_s for row in self.rows if row.build_s)

    @property
    def bytes_per_vector(self) -> float | None:
        """Size of the saved index per vector."""
        size = self.value("file_bytes")
        return None if size is None else size.value / self.rows[0].num_vectors

    def document(self) -> dict[str, Any]:
        """All values for JSON."""
        return {
            **picked(self, "index", "build"), **picked(self.rows[0], "num_vectors", "num_synthetic", "dim", "threads"),
            "build_s": self.value("build_s"), "vectors_per_s": self.vectors_per_s,
            "file_bytes": self.value("file_bytes"), "bytes_per_vector": self.bytes_per_vector,
            "resident_growth_bytes": self.value("resident_growth_bytes"), "refusal": self.refusal or None,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class IngestSummary:
    """All of one `bench ingest`."""

    passes: tuple[PassSummary, ...]
    overlaps: tuple[Overlap, ...]
    builds: tuple[BuildSummary, ...]
    searches: tuple[SearchSummary, ...]

    @property
    def front(self) -> tuple[SearchSummary, ...]:
        """Searches of one query by one thread that no other beats in both recall and median latency, fastest first."""
        singles = [
            (s, recall.value, p50.value)
            for s in self.searches
            if (s.batch, s.threads) == self.least
            and (recall := s.value("recall")) is not None
            and (p50 := s.value("p50_s")) is not None
        ]
        kept = [
            (p50, s)
            for s, recall, p50 in singles
            if not any(r >= recall and p <= p50 and (r, p) != (recall, p50) for _, r, p in singles)
        ]
        return tuple(s for _, s in sorted(kept, key=lambda pair: pair[0]))

    @property
    def least(self) -> tuple[int, int]:
        """The smallest batch and number of threads of all searches."""
        return min(((s.batch, s.threads) for s in self.searches), default=(1, 1))


def _groups(rows: Sequence[Kept], key: Callable[[Kept], Hashable]) -> list[tuple[Kept, ...]]:
    found: dict[Hashable, list[Kept]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return [tuple(group) for group in found.values()]


def summarize(records: IngestRecords) -> IngestSummary:
    """Summary of all rows, in order of their first measurement."""
    passes = tuple(
        PassSummary(encoding=rows[0].encoding, mode=rows[0].mode, index=rows[0].index, rows=rows)
        for rows in _groups(records.passes, lambda row: (row.encoding, row.mode))
    )
    builds = tuple(
        BuildSummary(index=rows[0].index, build=rows[0].build, rows=rows)
        for rows in _groups(records.builds, lambda row: (row.index, row.build))
    )
    searches = tuple(
        SearchSummary(
            index=r[0].index, build=r[0].build, search=r[0].search, batch=r[0].batch, threads=r[0].threads, rows=r
        )
        for r in _groups(records.searches, lambda row: (row.index, row.build, row.search, row.batch, row.threads))
    )
    return IngestSummary(passes=passes, overlaps=_overlaps(passes), builds=builds, searches=searches)


def _overlaps(passes: Sequence[PassSummary]) -> tuple[Overlap, ...]:
    found = []
    for one in passes:
        for other in passes:
            is_pair = one.encoding == other.encoding and one.mode is IngestMode.SEQUENTIAL is not other.mode
            before = {row.repeat: row for row in one.whole}
            after = [row for row in other.whole if row.repeat in before]
            if is_pair and after:
                ratio = value_range(before[row.repeat].wall_s / row.wall_s for row in after)
                stage_s = [row.stage_s.values() for row in one.whole]
                best = median(sum(s) / max(s) for s in stage_s)
                assert ratio is not None
                found.append(Overlap(encoding=one.encoding, ratio=ratio, best_ratio=best))
    return tuple(found)
