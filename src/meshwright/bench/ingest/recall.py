"""Recall of an index against exact neighbours, with ties.

The k exact neighbours of a query have similarities of at least s_k. A returned key counts once, and only if
its own similarity is at least s_k, less the rounding of fp32. Duplicate chunks have equal vectors: any of
them is right.

    recall@k = counted keys / k
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.bench.ingest.choices import parse_index
from meshwright.bench.ingest.indexes import Keys, Vectors, make_index

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
