"""Chunks: every token once but for the overlap, at most the asked length, and tokens of long lines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from tests.tiny_encoder import TEXTS

from meshwright.bench.ingest.chunks import (
    NUM_SPECIAL,
    SEGMENT,
    check_encoding,
    open_chunk_tokenizer,
    segments,
    train_chunk_tokenizer,
    windows,
)
from meshwright.errors import InputError
from meshwright.records.ingest import ChunkEncoding


@given(length=st.integers(0, 300), width=st.integers(1, 40), data=st.data())
def test_windows_cover_a_document_with_the_asked_overlap(length, width, data):
    overlap = data.draw(st.integers(0, width - 1))
    encoding = ChunkEncoding(chunk_tokens=width + NUM_SPECIAL, overlap=overlap)
    ids = np.arange(length, dtype=np.int32)
    parts = list(windows(ids, encoding))
    fresh = [part if number == 0 else part[overlap:] for number, part in enumerate(parts)]
    assert np.concatenate([*fresh, ids[:0]]).tolist() == ids.tolist()
    assert all(len(part) == width for part in parts[:-1])
    assert all(len(part) for part in fresh), "a chunk that repeats another and adds nothing"


@pytest.mark.parametrize(("chunk", "overlap"), [(2, 0), (65, 0), (10, 8), (10, -1)])
def test_impossible_chunks_are_refused(chunk, overlap):
    with pytest.raises(InputError):
        check_encoding(ChunkEncoding(chunk_tokens=chunk, overlap=overlap), max_positions=64)
    check_encoding(ChunkEncoding(chunk_tokens=10, overlap=7), max_positions=64)


@pytest.mark.parametrize(
    "text", ["x" * (2 * SEGMENT + 5), "word " * SEGMENT, "é🙂" * SEGMENT], ids=["line", "words", "wide"]
)
def test_a_huge_line_is_split_and_nothing_is_lost(text):
    parts = segments(text)
    assert "".join(parts) == text
    assert len(parts) > 1
    assert max(map(len, parts)) <= SEGMENT


def test_a_trained_tokenizer_frames_and_reads_back(tmp_path):
    trained = train_chunk_tokenizer(TEXTS, vocabulary=300)
    trained.tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = open_chunk_tokenizer(tmp_path)
    texts = ["import os", "", "🙂 unseen Wörter", "a\0b"]
    assert [i.tolist() for i in opened.ids(texts)] == [i.tolist() for i in trained.ids(texts)]
    (ids, none, *_) = opened.ids(texts)
    assert not len(none)
    assert opened.framed(ids).tolist() == [opened.cls, *ids.tolist(), opened.sep]
    assert len({opened.cls, opened.sep, opened.pad}) == 3


def test_limits_that_a_tokenizer_file_sets_are_lifted(tmp_path):
    trained = train_chunk_tokenizer(TEXTS, vocabulary=300)
    trained.tokenizer.enable_truncation(4)  # as the file of MiniLM has it
    trained.tokenizer.enable_padding(length=8)
    trained.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (ids,) = open_chunk_tokenizer(tmp_path).ids(["import os " * 20])
    assert len(ids) == 40


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match="tokenizer"):
        open_chunk_tokenizer(tmp_path)
