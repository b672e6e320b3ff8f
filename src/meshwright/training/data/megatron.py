"""Megatron's indexed token files: `NAME.bin` holds tokens end to end, `NAME.idx` says where sequences begin.

    .idx   bytes   content (little endian)
           9       b"MMIDIDX\\0\\0"
           8       version, 1
           1       token type: see TOKEN_TYPES
           8       S, number of sequences
           8       D, number of document marks
           4 S     tokens of each sequence, int32
           8 S     byte at which each sequence begins in .bin, int64
           8 D     document marks, int64: 0, then the sequence after each document's last one
           S       a mode per sequence, int8, in multimodal data only: not used here

Source: Megatron-Core 0.16, megatron/core/datasets/indexed_dataset.py. A document here is a Megatron document: usually
one sequence, sometimes several.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from meshwright.errors import InputError
from meshwright.files import sync, write_atomically

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_LARGEST_UINT16_VOCAB = 65_500  # Megatron's own bound, a little under 2^16
_CHECK_ROWS = 1 << 22  # rows of the index that are checked at a time


def token_type(vocab: int) -> type[np.integer]:
    """The narrowest type that Megatron would use for a vocabulary.

    >>> token_type(50_257).__name__, token_type(128_256).__name__
    ('uint16', 'int32')
    """
    return np.uint16 if vocab < _LARGEST_UINT16_VOCAB else np.int32


class IndexedWriter:
    """Writes `NAME.bin` document by document, and `NAME.idx` at the end. Not atomic: `cache.build_once` is."""

    def __init__(self, prefix: Path, *, dtype: type[np.integer]) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self._lengths: list[int] = []
        self._num_tokens = 0
        self._tokens: BinaryIO = prefix.with_name(prefix.name + ".bin").open("wb")

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self._num_tokens

    def add(self, tokens_N: np.ndarray, *, continues: bool = False) -> None:
        """Append one document, or more of the last one. Raises InputError where the tokens do not fit the file."""
        limits = np.iinfo(self.dtype)
        if tokens_N.size and not limits.min <= int(tokens_N.min()) <= int(tokens_N.max()) <= limits.max:
            raise InputError("a token does not fit the file's type", got=int(tokens_N.max()), allowed=self.dtype.name)
        self._tokens.write(np.ascontiguousarray(tokens_N, dtype=self.dtype.newbyteorder("<")).tobytes())
        length = len(tokens_N) + (self._lengths.pop() if continues else 0)
        if length > np.iinfo(np.int32).max:  # what the index can say
            raise InputError("a document has too many tokens", got=length, allowed="< 2^31")
        self._lengths.append(length)
        self._num_tokens += len(tokens_N)

    def close(self) -> None:
        """Write the index, when the tokens are on the disk."""
        lengths_S = np.asarray(self._lengths, dtype=np.int64)
        ends_S = np.cumsum(lengths_S) * self.dtype.itemsize
        with self._tokens:
            self._tokens.truncate(int(ends_S[-1]) if len(ends_S) else 0)
        sync(Path(self._tokens.name))
        code = next(code for code, kind in TOKEN_TYPES.items() if np.dtype(kind) == self.dtype)
        index = HEADER.pack(MAGIC, 1, code, len(lengths_S), len(lengths_S) + 1)
        index += lengths_S.astype("<i4").tobytes() + np.concatenate([[0], ends_S])[:-1].astype("<i8").tobytes()
        index += np.arange(len(lengths_S) + 1, dtype="<i8").tobytes()
        write_atomically(self.prefix.with_name(self.prefix.name + ".idx"), index)

    def drop_last(self) -> int:
        """Leave out the last document, which may be incomplete, and return the number of tokens before it."""
        del self._lengths[-1:]
        return sum(self._lengths)

    def discard(self) -> None:
        """Remove the tokens."""
        self._tokens.close()
        Path(self._tokens.name).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.discard()


def write_indexed(prefix: Path, documents: Iterable[np.ndarray], *, dtype: type[np.integer]) -> None:
    """Write `documents`, each an array of tokens, as `prefix.bin` and `prefix.idx`."""
    with IndexedWriter(prefix, dtype=dtype) as writer:
        for tokens_N in documents:
            writer.add(tokens_N)


@dataclass(frozen=True, kw_only=True)
class IndexedTokens:
    """One `.bin`/`.idx` pair, memory-mapped. Positions are in tokens from the start of `.bin`."""

    prefix: Path
    tokens_N: np.ndarray = field(repr=False)
    starts_D: np.ndarray = field(repr=False)  # first token of each document, in tokens or bytes: see `unit`
    unit: int  # bytes per token where `starts_D` is in bytes, else 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the file."""
        return len(self.tokens_N)

    @property
    def num_documents(self) -> int:
        """Documents of the file."""
        return len(self.starts_D)

    def start_of(self, document: int) -> int:
        """First token of a document; the end of the file for the document after the last one."""
        return self.num_tokens if document == self.num_documents else int(self.starts_D[document]) // self.unit

    def document_at(self, position: int) -> int:
        """The document that holds a token."""
        return int(np.searchsorted(self.starts_D, position * self.unit, side="right")) - 1

    def starts_between(self, start: int, stop: int) -> np.ndarray:
        """First tokens of the documents that begin after `start` and before `stop`."""
        first = int(np.searchsorted(self.starts_D, start * self.unit, side="right"))
        last = int(np.searchsorted(self.starts_D, stop * self.unit, side="left"))
        return np.asarray(self.starts_D[first:last], dtype=np.int64) // self.unit


def open_indexed(prefix: Path) -> IndexedTokens:
    """Map a pair of files. Raises InputError when one is missing, truncated, or they do not fit each other."""
    index_file, token_file = (prefix.with_name(prefix.name + suffix) for suffix in (".idx", ".bin"))
    try:
        num_index_bytes, num_token_bytes = index_file.stat().st_size, token_file.stat().st_size
        with index_file.open("rb") as stream:
            header = stream.read(HEADER.size)
    except OSError as error:
        raise InputError(f"cannot read tokens: {error.strerror}", got=str(error.filename)) from error
    if len(header) < HEADER.size or header[:9] != MAGIC:
        raise InputError("not an index of tokens", got=str(index_file), allowed="a file that begins with MMIDIDX")
    _, version, code, num_sequences, num_marks = HEADER.unpack(header)
    if version != 1 or code not in TOKEN_TYPES:
        raise InputError(f"{index_file}: version and token type", got=f"{version} and {code}", allowed="1 and 1-5 or 8")
    dtype = np.dtype(TOKEN_TYPES[code]).newbyteorder("<")
    needed_bytes = HEADER.size + 12 * num_sequences + 8 * num_marks
    if num_index_bytes < needed_bytes:
        raise InputError(f"{index_file} is truncated", got=f"{num_index_bytes} bytes", allowed=f"{needed_bytes}")
    if num_sequences == 0 or num_marks < 2 or num_token_bytes == 0:
        raise InputError("a token file without documents", got=str(index_file))
    at = HEADER.size
    lengths_S = np.memmap(index_file, "<i4", "r", at, (num_sequences,))
    pointers_S = np.memmap(index_file, "<i8", "r", at + 4 * num_sequences, (num_sequences,))
    marks_D = np.memmap(index_file, "<i8", "r", at + 12 * num_sequences, (num_marks,))
    _check(index_file, lengths_S, pointers_S, marks_D, num_token_bytes, dtype.itemsize)
    tokens_N = np.memmap(token_file, dtype, "r")
    if np.array_equal(marks_D, np.arange(num_sequences + 1)):  # one sequence a document: pointers say it all
        return IndexedTokens(prefix=prefix, tokens_N=tokens_N, starts_D=pointers_S, unit=dtype.itemsize)
    starts_D = np.asarray(pointers_S[np.unique(marks_D[marks_D < num_sequences])]) // dtype.itemsize
    return IndexedTokens(prefix=prefix, tokens_N=tokens_N, starts_D=starts_D, unit=1)


def _check(
    file: Path, lengths_S: np.ndarray, pointers_S: np.ndarray, marks_D: np.ndarray, num_token_bytes: int, width: int
) -> None:
    """Sequences follow each other without gaps and end where `.bin` ends; documents begin at sequences."""
    expected = 0
    for row in range(0, len(lengths_S), _CHECK_ROWS):
        lengths_N = np.asarray(lengths_S[row : row + _CHECK_ROWS], dtype=np.int64)
        ends_N = expected + np.cumsum(lengths_N) * width
        pointers_N = np.asarray(pointers_S[row : row + _CHECK_ROWS])
        if (lengths_N < 0).any() or pointers_N[0] != expected or (pointers_N[1:] != ends_N[:-1]).any():
            raise InputError(f"{file}: sequences do not follow each other", hint="write the pair of files again")
        expected = int(ends_N[-1])
    if expected != num_token_bytes:
        raise InputError(
            f"{file} does not belong to its .bin, or one is truncated", got=f"{num_token_bytes} bytes",
            allowed=f"{expected}",
        )  # fmt: skip
    marks_D = np.asarray(marks_D)
    if marks_D[0] != 0 or marks_D[-1] != len(lengths_S) or (np.diff(marks_D) < 0).any():
        raise InputError(f"{file}: document marks do not cover the sequences")
