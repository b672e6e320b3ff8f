"""Queries: short texts taken from chunks, their vectors, and the latency and rate of searching them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.bench.ingest.chunks import NUM_SPECIAL, TokenChunk, TokenIds
from meshwright.bench.ingest.indexes import Keys, VectorIndex, Vectors

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
