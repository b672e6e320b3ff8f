"""Summaries: medians over repeats, gains of overlap, the Pareto front."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.bench.ingest.summary import summarize
from meshwright.records.ingest import BatchOrder, IndexBuild, IndexSearch, IngestMode, IngestPass, IngestRecords

ONE = IngestPass(
    chunk_tokens=256, overlap=32, batch=8, precision="fp32", order=BatchOrder.LENGTH, mode=IngestMode.SEQUENTIAL,
    index="flat", repeat=1, started="now", wall_s=10.0, cpu_s=15.0, num_documents=5, num_bytes=2_000_000,
    num_chunks=100, num_tokens=20_000, num_computed_tokens=25_000, read_s=1.0, tokenize_s=1.0, encode_s=6.0,
    index_s=2.0, first_searchable_s=1.0, last_searchable_s=10.0,
)  # fmt: skip


def search(recall: float, p50_s: float, *, ef: int, batch: int = 1, threads: int = 1) -> IndexSearch:
    return IndexSearch(
        index="usearch", build="m=16", search=f"ef={ef}", repeat=1, k=10, batch=batch, threads=threads,
        num_vectors=1000, num_queries=50, num_calls=50, recall=recall, p50_s=p50_s, queries_per_s=batch / p50_s,
    )  # fmt: skip


def records(*, passes=(), builds=(), searches=()) -> IngestRecords:
    return IngestRecords(
        folder=Path(), sidecar={}, passes=tuple(passes), builds=tuple(builds), searches=tuple(searches)
    )


def test_rates_are_medians_over_repeats_with_their_range():
    rows = [replace(ONE, repeat=n, wall_s=w) for n, w in ((1, 10.0), (2, 20.0), (3, 12.5))]
    (found,) = summarize(records(passes=rows)).passes
    assert (found.rate("chunks_per_s").value, found.rate("chunks_per_s").low) == (8.0, 5.0)
    assert found.rate("mb_per_s").high == pytest.approx(0.2)
    assert found.stage_rate("encode", "tokens_per_s").value == pytest.approx(20_000 / 6)
    assert found.stage_share("encode").value == pytest.approx(0.6)
    assert ONE.padding_ratio == pytest.approx(0.2)
    assert found.busy_cores.value == pytest.approx(15 / 12.5)


def test_an_interrupted_pass_has_no_rate():
    (found,) = summarize(records(passes=[replace(ONE, interrupted=True)])).passes
    assert found.rate("chunks_per_s") is None
    assert found.document()["interrupted"]


def test_the_gain_of_overlap_is_taken_repeat_by_repeat():
    walls = ((1, 10.0, 5.0), (2, 30.0, 20.0), (3, 10.0, 4.0))
    rows = [replace(ONE, repeat=n, wall_s=w) for n, w, _ in walls]
    rows += [replace(ONE, repeat=n, wall_s=w, mode=IngestMode.PIPELINED) for n, _, w in walls]
    (overlap,) = summarize(records(passes=rows)).overlaps
    assert (overlap.ratio.low, overlap.ratio.value, overlap.ratio.high) == (1.5, 2.0, 2.5)
    assert overlap.best_ratio == pytest.approx(10 / 6)


def test_the_front_has_what_nothing_beats_in_both():
    searches = [
        search(0.9, 1e-4, ef=16), search(0.95, 3e-4, ef=64), search(0.94, 4e-4, ef=65), search(0.99, 9e-4, ef=256),
        search(0.9, 2e-4, ef=17), search(1.0, 1e-6, ef=8, batch=32), search(1.0, 1e-6, ef=9, threads=4),
    ]  # fmt: skip
    assert [s.search for s in summarize(records(searches=searches)).front] == ["ef=16", "ef=64", "ef=256"]


def test_equal_searches_are_both_on_the_front():
    found = summarize(records(searches=[search(1.0, 1e-4, ef=16), search(1.0, 1e-4, ef=32)])).front
    assert len(found) == 2


def test_refused_indexes_have_no_values():
    build = IndexBuild(
        index="faiss-ivf", build="lists=9", repeat=1, started="now", num_vectors=5, dim=3, threads=1, refusal="no"
    )
    found = summarize(
        records(builds=[build], searches=[replace(search(1, 1, ef=1), recall=None, p50_s=None, refusal="bad")])
    )
    assert found.builds[0].vectors_per_s is None
    assert found.builds[0].refusal == "no"
    assert found.front == ()
