"""Tokenise a corpus once: documents become memory-mapped shards in the cache.

The tokens depend on the corpus's content and the tokenizer, which key the cache. Sequence length, batch, seed
and the number of processes do not matter, so every run on the same text shares one copy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from meshwright.errors import InputError
from meshwright.files import sync
from meshwright.json_values import load_json
from meshwright.training.data.cache import build_once
from meshwright.training.data.documents import TextDocument
from meshwright.training.data.megatron import IndexedWriter, token_type
from meshwright.training.data.records import RecordCounts
from meshwright.training.data.source import DocumentSource
from meshwright.training.data.store import TRAINED_SUFFIX, TokenStore, open_store
from meshwright.training.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FORMAT = 4  # raised when the same text would become other tokens, or other files
COUNTS = "records.json"
SHARD_TOKENS = 1 << 29
_BATCH_CHARACTERS = 2 << 20  # tokenised at once: enough for all cores, little memory
_PART_CHARACTERS = 1 << 20  # a longer document is tokenised in parts
_LONGEST_MASKED = 1 << 24  # characters of a document with a mask, which is tokenised as a whole
_CUTS = re.compile(r"(?<=\n)(?=\S)"), re.compile(r"(?<=\S)(?= \S)")


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
    build = partial(_write, source, tokenizer, report=report, shard_tokens=shard_tokens)
    names = {"source_name": source.name, "tokenizer_name": tokenizer.name}
    build_once(folder, build, about=about | names, continues=True)
    counts = load_json(folder / COUNTS)
    return open_store(sorted(file.with_suffix("") for file in folder.glob("*.idx")), counts=counts)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A document, or what of a long one is tokenised at once."""

    document: TextDocument
    text: str
    is_first: bool = True
    is_last: bool = True


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """One part as tokens; `trained_N` is None where all of them are trained on."""

    ids_N: np.ndarray
    trained_N: np.ndarray | None
    continues: bool  # the document of the tokens before it


def _write(
    source: DocumentSource, tokenizer: Tokenizer, folder: Path, *, report: Report | None, shard_tokens: int
) -> None:
    """Write the shards that `folder` lacks: those of an interrupted call stay, and their documents are passed over."""
    done_bytes = 0
    counts = RecordCounts()
    documents = (d for d in source.documents(chat=tokenizer.chat, counts=counts) if d.text)
    with _ShardWriter(folder, vocab=tokenizer.vocab, shard_tokens=shard_tokens) as shards:
        for document in islice(documents, shards.num_documents):
            done_bytes += len(document.text.encode())
        for batch in _batches(_parts(documents)):
            for tokens in _encode(batch, tokenizer):
                shards.add(tokens)
            done_bytes += sum(len(part.text.encode()) for part in batch)
            if report is not None:
                report(
                    TokenizationProgress(
                        num_documents=shards.num_documents, num_tokens=shards.num_tokens, done_bytes=done_bytes,
                        total_bytes=source.num_bytes,
                    )
                )  # fmt: skip
        if shards.num_documents == 0:
            raise InputError("the data has no text", got=source.name)
    (folder / COUNTS).write_text(json.dumps(counts.as_json()) + "\n", encoding="utf-8")


class _ShardWriter:
    """Pairs of token files of about `shard_tokens`; beside a pair its mask, where some token is not trained on.

    An interruption leaves whole documents; a kill leaves the shards before the open one.
    """

    def __init__(self, folder: Path, *, vocab: int, shard_tokens: int) -> None:
        self._folder, self._dtype, self._shard_tokens = folder, token_type(vocab), shard_tokens
        found = [file.with_suffix("") for file in sorted(folder.glob("shard-*.idx"))]  # written after its tokens
        try:
            store = open_store(found)
        except InputError:  # damaged
            found, store = [], open_store([])
        whole = {p.with_suffix(suffix) for p in found for suffix in (".idx", ".bin", TRAINED_SUFFIX)}
        for file in set(folder.iterdir()) - whole:
            file.unlink()
        self._num_shards, self.num_documents, self.num_tokens = len(found), store.num_documents, store.num_tokens
        if found:
            log.warning("tokenisation continues after %d documents, in %s", self.num_documents, folder)
        self._open()

    def add(self, tokens: _Tokens) -> None:
        """Append a document, to the next shard where this one is full, or more of the last document."""
        held = self._tokens.num_tokens
        if held and held + len(tokens.ids_N) > self._shard_tokens and not tokens.continues:
            self._close()
            self._open()
        self._tokens.add(tokens.ids_N, continues=tokens.continues)
        if tokens.trained_N is None:
            self._mask.write(b"\x01" * len(tokens.ids_N))
        else:
            self._is_masked = True
            self._mask.write(tokens.trained_N.astype(np.uint8).tobytes())
        self.num_documents += not tokens.continues
        self.num_tokens += len(tokens.ids_N)

    def _open(self) -> None:
        prefix = self._folder / f"shard-{self._num_shards:05d}"
        self._num_shards += 1
        self._tokens = IndexedWriter(prefix, dtype=self._dtype)
        self._mask = prefix.with_name(prefix.name + TRAINED_SUFFIX).open("wb")
        self._is_masked = False

    def _close(self) -> None:
        self._mask.close()
        if self._is_masked:
            sync(Path(self._mask.name))
        else:
            Path(self._mask.name).unlink()
        self._tokens.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kept = self._tokens.num_tokens
        if error is not None:  # its last document may be incomplete
            is_open = isinstance(error, KeyboardInterrupt) and not self._mask.closed
            kept = self._tokens.drop_last() if is_open else 0
        if kept:
            self._mask.truncate(kept)
            self._close()
        else:
            self._mask.close()
            Path(self._mask.name).unlink(missing_ok=True)
            self._tokens.discard()


def _batches(parts: Iterator[_Part]) -> Iterator[list[_Part]]:
    """Parts in batches of about `_BATCH_CHARACTERS`."""
    batch, num_characters = [], 0
    for part in parts:
        batch.append(part)
        num_characters += len(part.text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _encode(parts: Sequence[_Part], tokenizer: Tokenizer) -> Iterator[_Tokens]:
    """Encode parts with their start and end tokens; those without a mask are encoded together."""
    encoded = iter(tokenizer.encode([part.text for part in parts if part.document.trained is None]))
    for part in parts:
        if part.document.trained is None:
            yield _framed(next(encoded), None, part, tokenizer)
        else:
            ids_N, stops_N = tokenizer.align(part.text)
            assert part.document.trained is not None
            # A token across a border belongs to the text behind the border.
            is_trained = np.zeros(len(part.document.text) + 1, dtype=bool)
            for start, stop in part.document.trained:
                is_trained[start + 1 : stop + 1] = True
            yield _framed(ids_N, is_trained[stops_N], part, tokenizer)


def _framed(ids_N: np.ndarray, trained_N: np.ndarray | None, part: _Part, tokenizer: Tokenizer) -> _Tokens:
    """The part, between the document's start and end tokens. An answer's end is trained on where it ends the text.

    A conversation has the marks that its template writes, and no others.
    """
    if not part.document.is_rendered:
        before = [tokenizer.start] if part.is_first and tokenizer.start is not None else []
        after = [tokenizer.end] if part.is_last else []
        ids_N = np.concatenate([np.array(before, np.int64), ids_N, np.array(after, np.int64)])
        if trained_N is not None:
            last = bool(len(trained_N)) and bool(trained_N[-1])
            trained_N = np.concatenate([np.zeros(len(before), bool), trained_N, np.full(len(after), last)])
    return _Tokens(ids_N=ids_N, trained_N=trained_N, continues=not part.is_first)


def _parts(documents: Iterable[TextDocument]) -> Iterator[_Part]:
    """Split long texts, where there is one, before a line that begins with a character, else before a word.

    >>> [part.text for part in _parts([TextDocument(text="short"), TextDocument(text="")])]
    ['short']
    """
    for document in documents:
        text, start = document.text, 0
        if document.trained is not None and len(text) > _LONGEST_MASKED:
            raise InputError(
                "a document of which a part is trained on is too long", got=f"{len(text):,} characters",
                allowed=f"<= {_LONGEST_MASKED:,}",
            )  # fmt: skip
        while len(text) - start > _PART_CHARACTERS and document.trained is None:
            least = start + _PART_CHARACTERS
            cuts = (cut.search(text, least, least + _PART_CHARACTERS) for cut in _CUTS)
            stop = next((cut.start() for cut in cuts if cut), min(len(text), least + _PART_CHARACTERS))
            if stop == len(text):
                break
            yield _Part(document=document, text=text[start:stop], is_first=start == 0, is_last=False)
            start = stop
        if text:
            yield _Part(document=document, text=text[start:], is_first=start == 0)
