"""Token files and the cache: Megatron's format, damage, killed and concurrent builders."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import struct
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from meshwright.errors import InputError
from meshwright.files import default_cache
from meshwright.training.data import cache
from meshwright.training.data.cache import build_once, find_fault, remembered_digest
from meshwright.training.data.megatron import open_indexed, write_indexed
from meshwright.training.data.source import DocumentSource, open_source
from meshwright.training.data.store import open_store
from meshwright.training.data.tokenization import tokenise
from meshwright.training.data.tokenizer import ByteTokenizer

DOCUMENTS = [np.arange(5), np.array([7]), np.arange(100, 120)]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_what_is_written_is_read(tmp_path: Path, dtype: type[np.integer]) -> None:
    write_indexed(tmp_path / "x", DOCUMENTS, dtype=dtype)
    tokens = open_indexed(tmp_path / "x")
    assert (tokens.num_tokens, tokens.num_documents) == (26, 3)
    assert np.array_equal(tokens.tokens_N, np.concatenate(DOCUMENTS))
    assert [tokens.start_of(d) for d in range(4)] == [0, 5, 6, 26]
    assert [tokens.document_at(p) for p in (0, 4, 5, 6, 25)] == [0, 0, 1, 2, 2]
    assert tokens.starts_between(0, 7).tolist() == [5, 6]
    assert tokens.starts_between(5, 6).tolist() == []


def test_the_bytes_of_an_index_are_those_of_megatron(tmp_path: Path) -> None:
    write_indexed(tmp_path / "x", [np.array([1, 2]), np.array([3])], dtype=np.uint16)
    expected = (
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
        + struct.pack("<2i", 2, 1) + struct.pack("<2q", 0, 4) + struct.pack("<3q", 0, 1, 2)
    )  # fmt: skip
    assert (tmp_path / "x.idx").read_bytes() == expected
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<3H", 1, 2, 3)


def test_documents_of_several_sequences_are_one_document(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(struct.pack("<7i", *range(7)))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 3)
    index += struct.pack("<3i", 2, 3, 2) + struct.pack("<3q", 0, 8, 20) + struct.pack("<3q", 0, 2, 3)
    (tmp_path / "m.idx").write_bytes(index + b"\x00\x00\x00")  # with the modes of multimodal data
    tokens = open_indexed(tmp_path / "m")
    assert tokens.num_documents == 2
    assert [tokens.start_of(d) for d in range(3)] == [0, 5, 7]


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
@pytest.mark.when_touched  # our own reader reads the same files below
def test_megatron_core_reads_what_we_write_and_we_what_it_writes(tmp_path: Path) -> None:
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    write_indexed(tmp_path / "x", DOCUMENTS, dtype=np.uint16)
    dataset = megatron.IndexedDataset(str(tmp_path / "x"))
    assert all(np.array_equal(dataset[i], d) for i, d in enumerate(DOCUMENTS))
    import torch

    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "y.bin"), dtype=np.int32)
    builder.add_document(torch.arange(5), [2, 3])
    builder.add_document(torch.arange(4), [4])
    builder.finalize(str(tmp_path / "y.idx"))
    tokens = open_indexed(tmp_path / "y")
    assert [tokens.start_of(d) for d in range(3)] == [0, 5, 9]
    assert tokens.tokens_N.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]


def _swap(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize(
    ("suffix", "damage", "message"),
    [
        (".idx", lambda b: b[:20], "not an index"),
        (".idx", lambda b: b"X" + b[1:], "not an index"),
        (".idx", lambda b: _swap(b, 9, b"\x02"), "version"),
        (".idx", lambda b: _swap(b, 17, b"\x07"), "version and token type"),
        (".idx", lambda b: b[:-1], "truncated"),
        (".idx", lambda b: _swap(b, 34, b"\x06"), "do not follow"),
        (".idx", lambda b: b[:-8] + b"\xff" * 8, "document marks"),
        (".bin", lambda b: b[:-1], "does not belong"),
        (".bin", lambda b: b + b"\x00", "does not belong"),
        (".bin", lambda b: b"", "without documents"),
    ],
)
def test_damaged_token_files_are_bad_input(tmp_path: Path, suffix: str, damage: object, message: str) -> None:
    write_indexed(tmp_path / "x", DOCUMENTS, dtype=np.uint16)
    file = (tmp_path / "x").with_suffix(suffix)
    file.write_bytes(damage(file.read_bytes()))  # pyright: ignore[reportCallIssue]
    with pytest.raises(InputError, match=message):
        open_indexed(tmp_path / "x")


def test_missing_files_tokens_too_large_and_wrong_masks_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read tokens"):
        open_indexed(tmp_path / "none")
    with pytest.raises(InputError, match="does not fit"):
        write_indexed(tmp_path / "x", [np.array([70_000])], dtype=np.uint16)
    write_indexed(tmp_path / "y", DOCUMENTS, dtype=np.uint16)
    (tmp_path / "y.trained").write_bytes(b"\x01")
    with pytest.raises(InputError, match="not the mask"):
        open_store([tmp_path / "y"])


@pytest.fixture
def source(tmp_path: Path) -> DocumentSource:
    (tmp_path / "text").mkdir()
    for n in range(6):
        (tmp_path / "text" / f"{n}.txt").write_text(f"document {n}\n" * (n + 1))
    found = open_source(str(tmp_path / "text"))
    assert isinstance(found, DocumentSource)
    return found


def token_folder(home: Path) -> Path:
    (folder,) = (f for f in (home / "tokens").iterdir() if f.is_dir())
    return folder


def test_text_is_tokenised_once_and_shards_change_nothing(tmp_path: Path, source: DocumentSource) -> None:
    seen = []
    store = tokenise(source, ByteTokenizer(), cache=tmp_path / "c", report=seen.append)
    assert store.num_documents == seen[-1].num_documents == 6
    assert seen[-1].done_bytes == seen[-1].total_bytes == source.num_bytes
    assert tokenise(source, ByteTokenizer(), cache=tmp_path / "c", report=seen.append).num_tokens == store.num_tokens
    assert len(seen) == 1  # nothing was tokenised the second time
    sharded = tokenise(source, ByteTokenizer(), cache=tmp_path / "c", shard_tokens=40)
    assert len(sharded.shards) > 2
    assert np.array_equal(sharded.tokens(0, sharded.num_tokens), store.tokens(0, store.num_tokens))
    assert not sharded.is_masked


def test_other_text_has_another_key_and_moved_text_the_same(tmp_path: Path, source: DocumentSource) -> None:
    before = source.fingerprint
    moved = (tmp_path / "text").rename(tmp_path / "elsewhere")
    assert isinstance(again := open_source(str(moved)), DocumentSource)
    assert again.fingerprint == before
    (moved / "3.txt").write_text("changed")
    assert isinstance(changed := open_source(str(moved)), DocumentSource)
    assert changed.fingerprint != before


def test_a_large_file_is_read_again_only_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "REMEMBERED_BYTES", 4)
    file, read = tmp_path / "large.txt", []
    digest_of = cache.digest_of
    monkeypatch.setattr(cache, "digest_of", lambda f: read.append(f) or digest_of(f))
    file.write_text("large")
    first = [remembered_digest(file, cache=tmp_path / "c") for _ in range(3)]
    assert len(read) == 1
    file.write_text("changed")
    assert remembered_digest(file, cache=tmp_path / "c") not in first
    assert len(read) == 2


@pytest.mark.parametrize("damage", ["truncated", "altered", "missing", "manifest"])
def test_a_damaged_cache_is_refused_and_built_again(tmp_path: Path, source: DocumentSource, damage: str) -> None:
    store = tokenise(source, ByteTokenizer(), cache=tmp_path / "c")
    expected = store.tokens(0, store.num_tokens)
    folder = token_folder(tmp_path / "c")
    file = folder / "shard-00000.bin"
    data = file.read_bytes()
    match damage:
        case "truncated":
            file.write_bytes(data[:-2])
        case "altered":
            file.write_bytes(data[:-2] + b"\x01\x00")
        case "missing":
            file.unlink()
        case _:
            (folder / "manifest.json").write_text("{")
    assert find_fault(folder) is not None
    store = tokenise(source, ByteTokenizer(), cache=tmp_path / "c")
    assert np.array_equal(store.tokens(0, store.num_tokens), expected)
    assert find_fault(folder) is None


def _build_slowly(folder: Path, started: Path) -> None:
    def build(partial: Path) -> None:
        (partial / "data").write_text("half")
        started.touch()
        time.sleep(60)

    build_once(folder, build, about={})


def test_a_killed_builder_leaves_nothing_that_opens(tmp_path: Path) -> None:
    folder, started = tmp_path / "made", tmp_path / "started"
    process = multiprocessing.get_context("fork").Process(target=_build_slowly, args=(folder, started))
    process.start()
    while not started.exists():
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not folder.exists()
    build_once(folder, lambda partial: (partial / "data").write_text("whole") and None, about={"kind": "test"})
    assert [f.name for f in sorted(folder.iterdir())] == ["data", "manifest.json"]
    assert (folder / "data").read_text() == "whole"
    assert json.loads((folder / "manifest.json").read_text())["about"] == {"kind": "test"}


def _build_counting(folder: Path, log: Path) -> None:
    def build(partial: Path) -> None:
        with log.open("a") as stream:
            stream.write("built\n")
        time.sleep(0.2)
        (partial / "data").write_text("x")

    build_once(folder, build, about={})


def test_several_processes_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    folder, log = tmp_path / "made", tmp_path / "log"
    processes = [context.Process(target=_build_counting, args=(folder, log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert log.read_text() == "built\n"


def test_an_error_while_building_leaves_nothing(tmp_path: Path) -> None:
    def fail(partial: Path) -> None:
        (partial / "data").write_text("x")
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        build_once(tmp_path / "made", fail, about={})
    assert [f.name for f in tmp_path.iterdir()] == [".made.lock"]


def test_a_cache_that_cannot_be_written_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot build data in the cache"):
        build_once(tmp_path / "file" / "made", lambda _: None, about={})

    def fill_the_disk(partial: Path) -> None:
        (partial / "data").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(InputError, match=r"No space left(.|\n)*MESHWRIGHT_CACHE"):
        build_once(tmp_path / "made", fill_the_disk, about={})
    assert not list(tmp_path.glob("*made*/*"))
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
