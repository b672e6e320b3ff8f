"""Tokens of a corpus on disk, as one long line of positions over one or several memory-mapped files.

Beside each pair of token files (see `megatron`) may lie `NAME.trained`: one byte per token, 1 where the loss
counts it. Without this file, the loss counts every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import InputError
from meshwright.training.data.megatron import IndexedTokens, open_indexed

TRAINED_SUFFIX = ".trained"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One pair of files; `trained_N` is None where every token is trained on."""

    tokens: IndexedTokens
    trained_N: np.ndarray | None = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """All shards of a corpus, end to end. Positions and document numbers run over all of them."""

    shards: tuple[Shard, ...]
    first_token: np.ndarray = field(repr=False)  # of each shard, and the total
    first_document: np.ndarray = field(repr=False)
    counts: Mapping[str, Any] | None = None  # of the records they were made from; None: token files

    @property
    def num_tokens(self) -> int:
        """Tokens of the corpus."""
        return int(self.first_token[-1])

    @property
    def num_documents(self) -> int:
        """Documents of the corpus."""
        return int(self.first_document[-1])

    @property
    def is_masked(self) -> bool:
        """True if some token is not trained on."""
        return any(shard.trained_N is not None for shard in self.shards)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens of positions start to stop, int64."""
        parts = [shard.tokens.tokens_N[a:b] for shard, _, a, b in self._ranges(start, stop)]
        return _joined(parts, np.int64)

    def trained(self, start: int, stop: int) -> np.ndarray:
        """The mask of these positions that the loss counts, bool."""
        parts = [
            np.ones(b - a, dtype=bool) if shard.trained_N is None else shard.trained_N[a:b]
            for shard, _, a, b in self._ranges(start, stop)
        ]
        return _joined(parts, np.bool_)

    def starts_between(self, start: int, stop: int) -> np.ndarray:
        """Positions after `start` and before `stop` at which a document begins."""
        parts = []
        for shard, base, a, b in self._ranges(start, stop):
            if base + a > start:  # a shard begins with a document
                parts.append(np.array([base + a]))
            parts.append(base + shard.tokens.starts_between(a, b))
        return _joined(parts, np.int64)

    def start_of(self, document: int) -> int:
        """First position of a document; the number of tokens for the document after the last one."""
        if document == self.num_documents:
            return self.num_tokens
        at = int(np.searchsorted(self.first_document, document, side="right")) - 1
        local = self.shards[at].tokens.start_of(document - int(self.first_document[at]))
        return int(self.first_token[at]) + local

    def document_at(self, position: int) -> int:
        """The document that holds a position."""
        at = int(np.searchsorted(self.first_token, position, side="right")) - 1
        local = self.shards[at].tokens.document_at(position - int(self.first_token[at]))
        return int(self.first_document[at]) + local

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[Shard, int, int, int]]:
        """Shards that hold start to stop: shard, its first position, and the range within it."""
        at = int(np.searchsorted(self.first_token, start, side="right")) - 1
        while start < stop:
            base, end = int(self.first_token[at]), int(self.first_token[at + 1])
            yield self.shards[at], base, start - base, min(stop, end) - base
            start, at = end, at + 1


def open_store(prefixes: list[Path], *, counts: Mapping[str, Any] | None = None) -> TokenStore:
    """Map these files in this order. Raises InputError when one of them cannot be used."""
    shards = tuple(_open_shard(prefix) for prefix in prefixes)
    return TokenStore(
        shards=shards,
        first_token=np.cumsum([0, *(s.tokens.num_tokens for s in shards)]),
        first_document=np.cumsum([0, *(s.tokens.num_documents for s in shards)]),
        counts=counts,
    )


def _open_shard(prefix: Path) -> Shard:
    tokens = open_indexed(prefix)
    file = prefix.with_name(prefix.name + TRAINED_SUFFIX)
    if not file.exists():
        return Shard(tokens=tokens, trained_N=None)
    if file.stat().st_size != tokens.num_tokens:
        raise InputError(
            f"{file} is not the mask of its tokens", got=f"{file.stat().st_size} bytes", allowed=tokens.num_tokens
        )
    return Shard(tokens=tokens, trained_N=np.memmap(file, np.bool_, "r"))


def _joined(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0].astype(dtype)
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
