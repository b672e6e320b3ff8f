"""Stages: the same results alternating and overlapped, errors and Ctrl-C end all threads, sum against maximum."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("faiss")
pytest.importorskip("tokenizers")

from tests.tiny_encoder import TEXTS

from meshwright.bench.ingest.choices import parse_index
from meshwright.bench.ingest.chunks import train_chunk_tokenizer
from meshwright.bench.ingest.documents import Document
from meshwright.bench.ingest.passes import PassInput, PassInterruptedError, run_pass
from meshwright.bench.ingest.stages import run_alternating, run_overlapped
from meshwright.records.ingest import BatchOrder, ChunkEncoding, IngestMode

RUNS = {IngestMode.SEQUENTIAL: run_alternating, IngestMode.PIPELINED: run_overlapped}


class CountingEncoder:
    """A vector of each chunk's length and sum, so that a permutation shows."""

    def __init__(self, fail_at: int | None = None, error: type[BaseException] = RuntimeError) -> None:
        self.fail_at, self.error, self.sizes = fail_at, error, []

    def encode(self, ids):
        if len(self.sizes) == self.fail_at:
            raise self.error("in the encoder")
        self.sizes.append([len(part) for part in ids])
        found = np.array([[len(part), float(part.sum()), 1.0] for part in ids], dtype=np.float32)
        return found / np.linalg.norm(found, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def tokenizer():
    return train_chunk_tokenizer(TEXTS, vocabulary=200)


@pytest.fixture
def documents(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("import os " * (1 + 7 * number % 31))
    return [Document(path=path) for path in sorted(tmp_path.iterdir())]


def taken(documents, tokenizer, mode, *, order=BatchOrder.LENGTH, encoder=None, index="usearch"):
    asked = PassInput(
        documents=documents, tokenizer=tokenizer, encoder=encoder or CountingEncoder(),
        encoding=ChunkEncoding(chunk_tokens=12, overlap=2, batch=4, order=order), mode=mode,
        index=parse_index(index)[0], dim=3, num_chunks=100, threads=1, repeat=1,
    )  # fmt: skip
    return run_pass(asked, advance=lambda count: None)


@pytest.mark.parametrize("order", BatchOrder)
@pytest.mark.parametrize("index", ["usearch", "faiss-ivf:lists=2"])
def test_both_modes_ingest_the_same(documents, tokenizer, order, index):
    found = [taken(documents, tokenizer, mode, order=order, index=index) for mode in IngestMode]
    (one, one_out), (other, other_out) = found
    for name in ("num_documents", "num_bytes", "num_chunks", "num_tokens", "num_computed_tokens"):
        assert getattr(one, name) == getattr(other, name) > 0, name
    assert one.num_documents == len(documents)
    assert one.num_bytes == sum(d.path.stat().st_size for d in documents)
    (chunks, vectors), (others, other_vectors) = one_out.ordered, other_out.ordered
    assert [c.number for c in chunks] == [c.number for c in others] == list(range(one.num_chunks))
    np.testing.assert_array_equal(vectors, other_vectors)
    assert len(one_out.index.search(vectors[:1], 1)) == 1
    for row in (one, other):
        assert 0 < row.first_searchable_s <= row.last_searchable_s <= row.wall_s
        assert all(s > 0 for s in row.stage_s.values())
        assert row.cpu_s > 0
        assert row.peak_resident_bytes > 10**7
    if index.startswith("faiss-ivf"):  # nothing can be found before it is trained
        assert one.first_searchable_s == one.last_searchable_s


def test_sorted_batches_have_less_padding(documents, tokenizer):
    by_length, by_arrival = (taken(documents, tokenizer, IngestMode.SEQUENTIAL, order=order)[0] for order in BatchOrder)
    assert by_length.num_tokens == by_arrival.num_tokens
    assert by_length.padding_ratio < by_arrival.padding_ratio


@pytest.mark.parametrize("mode", IngestMode)
def test_an_error_in_a_stage_ends_all(documents, tokenizer, mode):
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="in the encoder"):
        taken(documents, tokenizer, mode, encoder=CountingEncoder(fail_at=3))
    assert threading.active_count() == before


@pytest.mark.parametrize("mode", IngestMode)
def test_ctrl_c_keeps_what_was_ingested(documents, tokenizer, mode):
    before = threading.active_count()
    with pytest.raises(PassInterruptedError) as stopped:
        taken(documents, tokenizer, mode, encoder=CountingEncoder(fail_at=3, error=KeyboardInterrupt))
    row = stopped.value.row
    assert row.interrupted
    assert 0 <= row.num_chunks <= 12
    assert threading.active_count() == before


@dataclass
class Sleeper:
    """A stage of known duration."""

    each_s: float
    seconds: float = 0.0

    def process(self, item):
        time.sleep(self.each_s)
        return [item]

    def finish(self):
        return []


def test_overlapped_stages_take_the_slowest_and_alternating_ones_the_sum():
    count, each_s = 12, (0.01, 0.02, 0.005)
    wall_s, seen = {}, []
    for mode, run in RUNS.items():
        stages = [Sleeper(each_s=s) for s in each_s]
        start_s = time.perf_counter()
        run(stages, [(n,) for n in range(count)], seen.append)
        wall_s[mode] = time.perf_counter() - start_s
        for stage in stages:
            assert stage.seconds >= count * stage.each_s
    assert seen == [*range(count), *range(count)]
    assert wall_s[IngestMode.SEQUENTIAL] >= count * sum(each_s)
    assert wall_s[IngestMode.PIPELINED] >= count * max(each_s)
    assert wall_s[IngestMode.PIPELINED] < 0.85 * wall_s[IngestMode.SEQUENTIAL]
