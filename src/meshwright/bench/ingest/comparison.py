"""Indexes compared on the same vectors: builds, searches, and recall against exact neighbours, with ties.

The k exact neighbours of a query have similarities of at least s_k. A returned key counts once, and only if
its own similarity is at least s_k, less the rounding of fp32. Duplicate chunks have equal vectors: any of
them is right.

    recall@k = counted keys / k
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.bench.ingest.choices import IndexChoice, parse_index
from meshwright.bench.ingest.chunks import NUM_SPECIAL, TokenChunk, TokenIds
from meshwright.bench.ingest.indexes import Keys, VectorIndex, Vectors, make_index
from meshwright.bench.ingest.prepare import IngestRequest, IngestWatch
from meshwright.bench.ingest.stages import Encoder
from meshwright.errors import InputError
from meshwright.records.files import now
from meshwright.records.ingest import IndexBuild, IndexSearch, IngestRecorder
from meshwright.training.device import resident_bytes

NOISE = 0.5
"""Length of the noise that makes a synthetic vector from a vector of length one: cosine 0.89 between them."""


LEAST_S = 0.5
"""Time for which searches are repeated; the first round is a warm-up."""
MOST_CALLS = 20_000


def query_ids(
    chunks: Sequence[TokenChunk], *, num_queries: int, num_tokens: int, seed: int
) -> tuple[list[TokenIds], list[int]]:
    """Token ids of queries, and the numbers of the chunks that they were taken from.

    A query is `num_tokens` consecutive tokens of a chunk at a random place, framed as a chunk is. Each chunk is used
    once before any is used again.
    """
    rng = random.Random(f"queries {seed}")
    own = rng.sample(range(len(chunks)), k=min(num_queries, len(chunks)))
    own += rng.choices(range(len(chunks)), k=num_queries - len(own))
    found = []
    for number in own:
        ids = chunks[number].ids
        inner = ids[1:-1]
        start = rng.randrange(max(1, len(inner) - num_tokens + 1))
        found.append(np.concatenate([ids[:1], inner[start : start + num_tokens], ids[-1:]]))
    assert all(len(part) <= num_tokens + NUM_SPECIAL for part in found)
    return found, own


@dataclass(frozen=True, kw_only=True)
class SearchTimes:
    """Seconds of the calls of one search, all queries several times over, and the keys of the first round."""

    keys: Keys
    call_s: tuple[float, ...]
    num_queries: int  # of all calls

    @property
    def queries_per_s(self) -> float:
        """Rate of one caller that waits for each answer."""
        return self.num_queries / sum(self.call_s)

    def quantile(self, q: float) -> float:
        """A quantile of the calls' seconds."""
        return float(np.quantile(self.call_s, q))


def time_searches(index: VectorIndex, queries: Vectors, *, k: int, batch: int) -> SearchTimes:
    """Search all queries in batches, again and again for `LEAST_S`."""
    parts = [queries[start : start + batch] for start in range(0, len(queries), batch)]
    keys = np.concatenate([index.search(part, k) for part in parts])
    seconds: list[float] = []
    searched, begin_s = 0, time.perf_counter()
    while time.perf_counter() - begin_s < LEAST_S and len(seconds) < MOST_CALLS:
        for part in parts:
            start_s = time.perf_counter()
            index.search(part, k)
            seconds.append(time.perf_counter() - start_s)
            searched += len(part)
    return SearchTimes(keys=keys, call_s=tuple(seconds), num_queries=searched)


TOLERANCE = 1e-6
"""Rounding of an inner product of vectors of length one in fp32."""


def exact_similarities(vectors: Vectors, queries: Vectors, k: int, *, threads: int) -> NDArray[np.float64]:
    """Similarity s_k of the k-th exact neighbour of each query, by faiss's exact index."""
    (choice,) = parse_index("flat")
    index = make_index(choice, dim=vectors.shape[1], num_vectors=len(vectors), threads=threads)
    index.add(vectors)
    last = vectors[index.search(queries, k)[:, -1]].astype(np.float64)
    return np.einsum("qd,qd->q", last, queries.astype(np.float64))


def recall_at_k(found: Keys, vectors: Vectors, queries: Vectors, least: NDArray[np.float64]) -> float:
    """Mean recall. `found` (queries, k) has -1 where nothing was found; `least` is each query's s_k."""
    num_right = 0
    for keys, query, limit in zip(found, queries.astype(np.float64), least, strict=True):
        distinct = np.unique(keys[(keys >= 0) & (keys < len(vectors))])
        num_right += int((vectors[distinct].astype(np.float64) @ query >= limit - TOLERANCE).sum())
    return num_right / found.size


def with_same_vector(found: Keys, vectors: Vectors, own: NDArray[np.int64]) -> float:
    """Share of the queries whose own chunk, or one with the same vector, was found."""
    num_found = 0
    for keys, of_query in zip(found, own, strict=True):
        if of_query < len(vectors):
            near = vectors[keys[keys >= 0]] @ vectors[of_query]
            num_found += bool((near >= 1 - TOLERANCE).any())
    return num_found / len(found)


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
