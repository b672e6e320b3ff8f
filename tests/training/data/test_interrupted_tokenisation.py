"""An interrupted tokenisation keeps the documents that it has written; the next one begins after them."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from meshwright.errors import InputError, Terminated
from meshwright.training.data import tokenization
from meshwright.training.data.source import DocumentSource, open_source
from meshwright.training.data.store import TokenStore
from meshwright.training.data.tokenization import COUNTS, tokenise
from meshwright.training.data.tokenizer import Aligned, ByteTokenizer


class Interrupted(ByteTokenizer):
    """A tokenizer that is stopped before its call number `after`, and counts characters."""

    def __init__(self, after: int, error: type[BaseException] = Terminated) -> None:
        super().__init__()
        self.left, self.error, self.characters = after, error, 0

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        self._count(sum(map(len, texts)))
        return super().encode(texts)

    def align(self, text: str) -> Aligned:
        self._count(len(text))
        return super().align(text)

    def _count(self, characters: int) -> None:
        if self.left == 0:
            raise self.error("stopped")
        self.left -= 1
        self.characters += characters


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DocumentSource:
    """Texts of several parts, conversations with a mask, and records without text."""
    chance = random.Random(3)
    monkeypatch.setattr(tokenization, "_BATCH_CHARACTERS", 200)
    monkeypatch.setattr(tokenization, "_PART_CHARACTERS", 100)
    lines = []
    for n in range(60):
        words = "\n".join(f"word {n} {i}" for i in range(chance.choice([1, 3, 30])))
        prompt = {"prompt": words, "completion": f"answer {n}"}
        lines.append(json.dumps(prompt if n % 3 else {"text": words if n % 5 else ""}))
    for n, kind in enumerate(("text", "prompt")):
        chosen = [line for line in lines if f'"{kind}"' in line]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{n}.jsonl").write_text("\n".join(chosen))
    found = open_source(str(tmp_path / "data"))
    assert isinstance(found, DocumentSource)
    return found


def content(store: TokenStore) -> tuple[object, ...]:
    """Tokens, mask and documents of a store, without the borders of its shards."""
    end = store.num_tokens
    starts = [store.start_of(d) for d in range(store.num_documents)]
    return store.tokens(0, end).tolist(), store.trained(0, end).tolist(), starts, store.counts


def partial(cache: Path) -> Path:
    (folder,) = (cache / "tokens").glob(".*.partial")
    return folder


@pytest.mark.parametrize("shard_tokens", [tokenization.SHARD_TOKENS, 700])
def test_documents_before_an_interruption_stay(tmp_path, source, shard_tokens, caplog):
    whole = content(tokenise(source, ByteTokenizer(), cache=tmp_path / "whole", shard_tokens=shard_tokens))
    complete = Interrupted(-1)
    tokenise(source, complete, cache=tmp_path / "counted", shard_tokens=shard_tokens)
    num_calls = -1 - complete.left
    assert num_calls > 30
    for after in (0, 1, num_calls // 3, num_calls // 2, num_calls - 1):
        cache, first, last = tmp_path / f"{after}", Interrupted(after), Interrupted(-1)
        with pytest.raises(Terminated):
            tokenise(source, first, cache=cache, shard_tokens=shard_tokens)
        assert content(tokenise(source, last, cache=cache, shard_tokens=shard_tokens)) == whole
        longest = max(len(d.text) for d in source.documents()) + 400  # the interrupted document, and a batch
        assert first.characters + last.characters <= complete.characters + longest
        assert not list((cache / "tokens").glob(".*.partial"))
    assert "continues after" in caplog.text


def test_many_interruptions_are_one_tokenisation(tmp_path, source):
    whole = content(tokenise(source, ByteTokenizer(), cache=tmp_path / "whole"))
    for attempt in range(50):
        try:
            store = tokenise(source, Interrupted(9), cache=tmp_path / "cut")
        except Terminated:
            continue
        assert attempt > 3
        assert content(store) == whole
        return
    pytest.fail("no attempt goes on where the former was interrupted")


def _die(source: DocumentSource, cache: Path) -> None:
    tokenise(source, ByteTokenizer(), cache=cache, shard_tokens=700, report=_end_after(2000))


def _end_after(num_tokens: int):
    return lambda progress: os._exit(9) if progress.num_tokens > num_tokens else None


def killed(source: DocumentSource, cache: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_die, args=(source, cache))
    process.start()
    process.join()
    assert process.exitcode == 9


def test_a_kill_leaves_the_shards_before_the_open_one(tmp_path, source):
    whole = content(tokenise(source, ByteTokenizer(), cache=tmp_path / "whole", shard_tokens=700))
    killed(source, tmp_path / "cut")
    assert len(list(partial(tmp_path / "cut").glob("*.idx"))) >= 2
    (partial(tmp_path / "cut") / "manifest.json").write_text("{}")  # as a process leaves it that dies before its rename
    (partial(tmp_path / "cut") / COUNTS).write_text("{}")
    last, complete = Interrupted(-1), Interrupted(-1)
    assert content(tokenise(source, last, cache=tmp_path / "cut", shard_tokens=700)) == whole
    tokenise(source, complete, cache=tmp_path / "counted", shard_tokens=700)
    assert last.characters < complete.characters - 700


def test_damaged_shards_of_a_killed_process_are_written_again(tmp_path, source):
    whole = content(tokenise(source, ByteTokenizer(), cache=tmp_path / "whole", shard_tokens=700))
    killed(source, tmp_path / "cut")
    with (partial(tmp_path / "cut") / "shard-00000.bin").open("ab") as stream:
        stream.write(b"\x00\x00")
    assert content(tokenise(source, ByteTokenizer(), cache=tmp_path / "cut", shard_tokens=700)) == whole


def test_bad_input_leaves_nothing(tmp_path, source):
    with pytest.raises(InputError, match="stopped"):
        tokenise(source, Interrupted(20, InputError), cache=tmp_path / "c", shard_tokens=700)
    assert [f.name for f in (tmp_path / "c" / "tokens").iterdir() if f.suffix != ".lock"] == []


def test_other_text_has_other_tokens(tmp_path, source):
    """Documents of an interrupted tokenisation stay for the same text alone."""
    with pytest.raises(Terminated):
        tokenise(source, Interrupted(20), cache=tmp_path / "c")
    file = tmp_path / "data" / "0.jsonl"
    file.write_text(file.read_text().replace("word", "term"))
    other = open_source(str(tmp_path / "data"))
    assert isinstance(other, DocumentSource)
    expected = content(tokenise(other, ByteTokenizer(), cache=tmp_path / "whole"))
    assert content(tokenise(other, ByteTokenizer(), cache=tmp_path / "c")) == expected
