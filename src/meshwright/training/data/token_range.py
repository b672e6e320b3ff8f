"""Smallest and largest token of token files, and the refusal of tokens that a model does not have."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from meshwright.errors import InputError
from meshwright.training.data.cache import REMEMBERED_BYTES, memory_of, recalled, remember
from meshwright.training.data.megatron import IndexedTokens
from meshwright.training.data.store import TokenStore

_BLOCK_TOKENS = 1 << 24


def require_vocab(store: TokenStore, *, vocab: int, cache: Path) -> None:
    """Raise InputError if a token of `store` is not in 0 to `vocab` - 1. Ranges of large files are kept in `cache`."""
    for shard in store.shards:
        smallest, largest = _range_of(shard.tokens, cache)
        if smallest < 0 or largest >= vocab:
            raise InputError(
                f"{_token_file(shard.tokens)} has a token that is not in the model's vocabulary",
                got=smallest if smallest < 0 else largest, allowed=f"0 to {vocab - 1}",
                hint="the tokenizer (or the one that made the token files) does not belong to this model",
            )  # fmt: skip


def _range_of(tokens: IndexedTokens, cache: Path) -> tuple[int, int]:
    """Return the smallest and the largest token; a large file is read again only if size or time changes."""
    if _token_file(tokens).stat().st_size < REMEMBERED_BYTES:
        return _measure(tokens.tokens_N)
    known = _remembered(tokens, cache)
    if known is not None:
        return known
    measured = _measure(tokens.tokens_N)
    with suppress(OSError):  # a cache that cannot be written costs another reading
        remember(*_memory_of(tokens, cache), measured)
    return measured


def is_remembered(store: TokenStore, *, cache: Path) -> bool:
    """Return True if `require_vocab` would read no large file of `store`."""
    large = [shard.tokens for shard in store.shards if _token_file(shard.tokens).stat().st_size >= REMEMBERED_BYTES]
    return all(_remembered(tokens, cache) is not None for tokens in large)


def _remembered(tokens: IndexedTokens, cache: Path) -> tuple[int, int] | None:
    known = recalled(*_memory_of(tokens, cache))
    return (int(known[0]), int(known[1])) if known is not None and len(known) == 2 else None


def _memory_of(tokens: IndexedTokens, cache: Path) -> tuple[Path, str]:
    file = _token_file(tokens)
    fact = file.stat()
    return memory_of(file, cache / "token-ranges"), f"{fact.st_size} {fact.st_mtime_ns} {tokens.tokens_N.dtype.str}"


def _measure(tokens_N: np.ndarray) -> tuple[int, int]:
    blocks = [tokens_N[at : at + _BLOCK_TOKENS] for at in range(0, len(tokens_N), _BLOCK_TOKENS)]
    return min(int(block.min()) for block in blocks), max(int(block.max()) for block in blocks)


def _token_file(tokens: IndexedTokens) -> Path:
    return tokens.prefix.with_name(tokens.prefix.name + ".bin")
