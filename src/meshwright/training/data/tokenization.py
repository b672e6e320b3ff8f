"""Tokenise a corpus once: documents become memory-mapped shards in the cache.

The tokens depend on the corpus's content and the tokenizer, which key the cache. Sequence length, batch, seed
and the number of processes do not matter, so every run on the same text shares one copy.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from meshwright.errors import InputError
from meshwright.json_values import load_json
from meshwright.training.data.cache import build_once
from meshwright.training.data.documents import TextDocument
from meshwright.training.data.megatron import IndexedWriter, token_type
from meshwright.training.data.records import RecordCounts
from meshwright.training.data.source import DocumentSource
from meshwright.training.data.store import TRAINED_SUFFIX, TokenStore, open_store
from meshwright.training.data.tokenizer import Tokenizer

FORMAT = 2  # raised when the same text would become other tokens, or other files
COUNTS = "records.json"
SHARD_TOKENS = 1 << 29
_BATCH_CHARACTERS = 2 << 20  # tokenised at once: enough for all cores, little memory
_PART_CHARACTERS = 1 << 20  # a longer document is tokenised in parts
_LINE_START = re.compile(r"(?<=\n)(?=\S)")


@dataclass(frozen=True, kw_only=True)
class TokenizationProgress:
    """Progress of tokenisation."""

    num_documents: int
    num_tokens: int
    done_bytes: int  # of text
    total_bytes: int | None  # of the files: more than their text for JSONL, less for .gz and Parquet


Report = Callable[[TokenizationProgress], None]


def tokenise(
    source: DocumentSource,
    tokenizer: Tokenizer,
    *,
    cache: Path,
    report: Report | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> TokenStore:
    """The tokens of `source`, from the cache, or tokenised now and cached.

    Raises InputError when the corpus has no text or cannot be read.
    """
    about = {"format": FORMAT, "source": source.fingerprint, "tokenizer": tokenizer.fingerprint}
    if shard_tokens != SHARD_TOKENS:
        about["shard_tokens"] = shard_tokens
    key = hashlib.blake2b(json.dumps(about).encode(), digest_size=16).hexdigest()
    folder = cache / "tokens" / key

    def build(partial: Path) -> None:
        _write(source, tokenizer, partial, report=report, shard_tokens=shard_tokens)

    names = {"source_name": source.name, "tokenizer_name": tokenizer.name}
    build_once(folder, build, about=about | names)
    counts = load_json(folder / COUNTS)
    return open_store(sorted(file.with_suffix("") for file in folder.glob("*.idx")), counts=counts)


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """One document as tokens; `trained_N` is None where all of them are trained on."""

    ids_N: np.ndarray
    trained_N: np.ndarray | None


def _write(
    source: DocumentSource, tokenizer: Tokenizer, folder: Path, *, report: Report | None, shard_tokens: int
) -> None:
    num_documents = num_tokens = done_bytes = 0
    counts = RecordCounts()
    with _ShardWriter(folder, vocab=tokenizer.vocab, shard_tokens=shard_tokens) as shards:
        for batch in _batches(source.documents(chat=tokenizer.chat, counts=counts)):
            for document in _encode(batch, tokenizer):
                shards.add(document)
                num_tokens += len(document.ids_N)
            num_documents += len(batch)
            done_bytes += sum(len(document.text.encode()) for document in batch)
            if report is not None:
                report(
                    TokenizationProgress(
                        num_documents=num_documents, num_tokens=num_tokens, done_bytes=done_bytes,
                        total_bytes=source.num_bytes,
                    )
                )  # fmt: skip
    if num_documents == 0:
        raise InputError("the data has no text", got=source.name)
    (folder / COUNTS).write_text(json.dumps(counts.as_json()) + "\n", encoding="utf-8")


class _ShardWriter:
    """Pairs of token files of about `shard_tokens`; beside a pair its mask, where some token is not trained on."""

    def __init__(self, folder: Path, *, vocab: int, shard_tokens: int) -> None:
        self._folder, self._dtype, self._shard_tokens = folder, token_type(vocab), shard_tokens
        self._num_shards = 0
        self._open()

    def add(self, document: _Tokens) -> None:
        """Append a document, to the next shard where this one is full."""
        if self._tokens.num_tokens and self._tokens.num_tokens + len(document.ids_N) > self._shard_tokens:
            self._close(is_whole=True)
            self._open()
        self._tokens.add(document.ids_N)
        if document.trained_N is None:
            self._mask.write(b"\x01" * len(document.ids_N))
        else:
            self._is_masked = True
            self._mask.write(document.trained_N.astype(np.uint8).tobytes())

    def _open(self) -> None:
        prefix = self._folder / f"shard-{self._num_shards:05d}"
        self._num_shards += 1
        self._tokens = IndexedWriter(prefix, dtype=self._dtype)
        self._mask = prefix.with_name(prefix.name + TRAINED_SUFFIX).open("wb")
        self._is_masked = False

    def _close(self, *, is_whole: bool) -> None:
        self._mask.close()
        if not self._is_masked:
            Path(self._mask.name).unlink()
        self._tokens.close(is_whole=is_whole)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(is_whole=error is None)


def _batches(documents: Iterator[TextDocument]) -> Iterator[list[TextDocument]]:
    """Documents that are not empty, in batches of about `_BATCH_CHARACTERS`."""
    batch, num_characters = [], 0
    for document in documents:
        if not document.text:
            continue
        batch.append(document)
        num_characters += len(document.text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _encode(documents: Sequence[TextDocument], tokenizer: Tokenizer) -> Iterator[_Tokens]:
    """Encode documents with their start and end tokens; documents without a mask are encoded together."""
    parts = [_parts(d.text) if d.trained is None else [] for d in documents]
    encoded = iter(tokenizer.encode([part for of_document in parts for part in of_document]))
    for document, of_document in zip(documents, parts, strict=True):
        if document.trained is None:
            ids_N = np.concatenate([next(encoded) for _ in of_document])
            yield _framed(ids_N, None, document, tokenizer)
        else:
            ids_N, stops_N = tokenizer.align(document.text)
            yield _framed(ids_N, _trained(stops_N, document), document, tokenizer)


def _trained(stops_N: np.ndarray, document: TextDocument) -> np.ndarray:
    """Tokens whose last character is trained on: a token across a border belongs to the text behind the border."""
    assert document.trained is not None
    is_trained = np.zeros(len(document.text) + 1, dtype=bool)
    for start, stop in document.trained:
        is_trained[start + 1 : stop + 1] = True
    return is_trained[stops_N]


def _framed(ids_N: np.ndarray, trained_N: np.ndarray | None, document: TextDocument, tokenizer: Tokenizer) -> _Tokens:
    """The document between its start and end tokens. An answer's end is trained on where the answer ends the text.

    A conversation has the marks that its template writes, and no others.
    """
    if document.is_rendered:
        return _Tokens(ids_N=ids_N, trained_N=trained_N)
    before = [] if tokenizer.start is None else [tokenizer.start]
    framed_N = np.concatenate([np.array(before, np.int64), ids_N, np.array([tokenizer.end], np.int64)])
    if trained_N is None:
        return _Tokens(ids_N=framed_N, trained_N=None)
    last = bool(len(trained_N)) and bool(trained_N[-1])
    mask_N = np.concatenate([np.zeros(len(before), bool), trained_N, np.array([last])])
    return _Tokens(ids_N=framed_N, trained_N=mask_N)


def _parts(text: str) -> list[str]:
    """Split a long text before lines that begin with a character: no word or run of white space is split.

    >>> _parts("short")
    ['short']
    """
    parts, start = [], 0
    while len(text) - start > _PART_CHARACTERS:
        cut = _LINE_START.search(text, start + _PART_CHARACTERS)
        if cut is None:
            break
        parts.append(text[start : cut.start()])
        start = cut.start()
    return [*parts, text[start:]]
