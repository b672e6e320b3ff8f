"""Indexes compared on the same vectors: builds, searches, recall."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.bench.ingest.choices import IndexChoice
from meshwright.bench.ingest.chunks import TokenChunk
from meshwright.bench.ingest.indexes import VectorIndex, Vectors, make_index
from meshwright.bench.ingest.passes import now, resident_bytes
from meshwright.bench.ingest.prepare import IngestRequest, IngestWatch
from meshwright.bench.ingest.queries import query_ids, time_searches
from meshwright.bench.ingest.recall import exact_similarities, recall_at_k, with_same_vector
from meshwright.bench.ingest.stages import Encoder
from meshwright.errors import InputError
from meshwright.records.ingest import IndexBuild, IndexSearch, IngestRecorder

NOISE = 0.5
"""Length of the noise that makes a synthetic vector from a vector of length one: cosine 0.89 between them."""


@dataclass(frozen=True, kw_only=True)
class IndexComparison:
    """Vectors and queries on which all indexes are compared."""

    request: IngestRequest
    recorder: IngestRecorder
    watch: IngestWatch
    has_meaning: bool  # the encoder's weights are not random
    vectors: Vectors
    num_synthetic: int
    queries: Vectors
    own: NDArray[np.int64]  # the chunk that each query was taken from
    least: NDArray[np.float64]  # similarity of each query's k-th exact neighbour
    k: int

    def record(self, row: IndexBuild | IndexSearch) -> None:
        """Write a row and show it."""
        self.recorder.append(row)
        self.watch.end(row)


def compare_indexes(compared: IndexComparison) -> None:
    """Build and search all indexes, once for each repeat."""
    builds: dict[tuple[str, str], list[IndexChoice]] = {}
    for choice in compared.request.indexes:
        builds.setdefault((choice.kind, choice.build), []).append(choice)
    for repeat in range(1, compared.request.repeats + 1):
        for choices in builds.values():
            _build(compared, choices, repeat)


def comparison(
    request: IngestRequest, encoder: Encoder, chunks: Sequence[TokenChunk], encoded: Vectors, *, has_meaning: bool,
    recorder: IngestRecorder, watch: IngestWatch,
) -> IndexComparison:  # fmt: skip
    """Encode the queries, and find their exact neighbours among the vectors."""
    watch.begin("encoding queries", request.num_queries)
    ids, own = query_ids(chunks, num_queries=request.num_queries, num_tokens=request.query_tokens, seed=request.seed)
    encoder.encode(ids[:1])
    parts, seconds = [], []
    for part in ids:
        start_s = time.perf_counter()
        parts.append(encoder.encode([part]))
        seconds.append(time.perf_counter() - start_s)
        watch.advance(1)
    queries = np.concatenate(parts)
    vectors = extended(encoded, request.num_vectors or len(encoded), seed=request.seed)
    k = min(request.k, len(vectors))
    watch.end(None)
    watch.begin("exact neighbours", None)
    least = exact_similarities(vectors, queries, k, threads=request.threads)
    watch.end(None)
    recorder.save(
        queries={
            "num": len(queries), "tokens": request.query_tokens, "k": k, "k_asked": request.k,
            "encode_p50_s": float(np.median(seconds)), "encode_p99_s": float(np.quantile(seconds, 0.99)),
        }
    )  # fmt: skip
    return IndexComparison(
        request=request, recorder=recorder, watch=watch, has_meaning=has_meaning, vectors=vectors,
        num_synthetic=max(0, len(vectors) - len(encoded)), queries=queries, own=np.asarray(own), least=least, k=k,
    )  # fmt: skip


def extended(vectors: Vectors, size: int, *, seed: int) -> Vectors:
    """Return the first `size` vectors; if there are fewer, add noisy copies of length one."""
    if size <= len(vectors):
        return np.ascontiguousarray(vectors[:size])
    rng = np.random.default_rng(seed)
    origin = vectors[rng.integers(0, len(vectors), size - len(vectors))]
    noise = rng.standard_normal(origin.shape, dtype=np.float32)
    noise *= NOISE / np.linalg.norm(noise, axis=1, keepdims=True)
    more = origin + noise
    more /= np.linalg.norm(more, axis=1, keepdims=True)
    return np.concatenate([vectors, more])


def _build(compared: IndexComparison, choices: list[IndexChoice], repeat: int) -> None:
    """Build one index and search it in all ways."""
    request, choice = compared.request, choices[0]
    compared.watch.begin(f"{choice.name}, repeat {repeat}", None)
    row = IndexBuild(
        index=choice.kind, build=choice.build, repeat=repeat, started=now(), num_vectors=len(compared.vectors),
        num_synthetic=compared.num_synthetic, dim=compared.vectors.shape[1], threads=request.threads,
    )  # fmt: skip
    before = resident_bytes()
    try:
        index = make_index(choice, dim=row.dim, num_vectors=row.num_vectors, threads=request.threads)
        start_s = time.perf_counter()
        if index.needs_training:
            index.train(compared.vectors)
        index.add(compared.vectors)
    except (InputError, RuntimeError, MemoryError, ValueError) as error:
        compared.record(replace(row, refusal=_line(error)))
        return
    build_s = time.perf_counter() - start_s
    grown = max(0, resident_bytes() - before)
    compared.record(replace(row, build_s=build_s, file_bytes=_file_bytes(index), resident_growth_bytes=grown))
    for each in choices:
        for batch in request.query_batches:
            for threads in request.query_threads:
                _search(compared, index, each, batch, threads, repeat)


def _search(
    compared: IndexComparison, index: VectorIndex, choice: IndexChoice, batch: int, threads: int,
    repeat: int,
) -> None:  # fmt: skip
    compared.watch.begin(f"{choice.name}, {batch} queries at a time, {threads} threads", None)
    row = IndexSearch(
        index=choice.kind, build=choice.build, search=choice.search, repeat=repeat, k=compared.k, batch=batch,
        threads=threads, num_vectors=len(compared.vectors), num_queries=len(compared.queries),
    )  # fmt: skip
    try:
        index.set_search(choice, threads=threads)
        times = time_searches(index, compared.queries, k=compared.k, batch=batch)
    except (RuntimeError, ValueError) as error:
        compared.record(replace(row, refusal=_line(error)))
        return
    own = with_same_vector(times.keys, compared.vectors, compared.own)
    compared.record(
        replace(
            row, num_calls=len(times.call_s),
            recall=recall_at_k(times.keys, compared.vectors, compared.queries, compared.least),
            own_chunk_ratio=own if compared.has_meaning else None,
            p50_s=times.quantile(0.5), p90_s=times.quantile(0.9), p99_s=times.quantile(0.99),
            queries_per_s=times.queries_per_s,
        )
    )  # fmt: skip


def _file_bytes(index: VectorIndex) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        index.save(path)
        return path.stat().st_size


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
