"""Tokens of a document and its chunks, with a fast tokenizer of Hugging Face.

A chunk of S tokens is [CLS], S - 2 tokens of the document, [SEP]. Chunks begin every S - 2 - overlap tokens; the last
one ends with the document. Long documents are tokenized in segments, so that one line of any length has bounded cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, MissingDependencyError
from meshwright.programs import install_command
from meshwright.records.ingest import ChunkEncoding

NUM_SPECIAL = 2
SEGMENT = 2**18
"""Characters that are tokenized at once."""
SEARCHED = 2**12
"""Characters before the end of a segment in which a space is looked for."""
TRAINED_ON = 4 * 2**20  # characters

TokenIds = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class TokenChunk:
    """Token ids of one chunk, special tokens included. `number` counts the chunks of all documents."""

    number: int
    ids: TokenIds
    ends_document: bool = False
    document_bytes: int = 0  # of the document that ends here


@dataclass(frozen=True)
class ChunkTokenizer:
    """A fast tokenizer with its special tokens."""

    tokenizer: Any
    cls: int
    sep: int
    pad: int
    name: str

    def ids(self, texts: Sequence[str]) -> list[TokenIds]:
        """Token ids of each text, without special tokens. All texts are tokenized in one call, on several cores."""
        parts = [segments(text) for text in texts]
        flat = [segment for of_text in parts for segment in of_text]
        found = iter(self.tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        return [np.concatenate([np.asarray(next(found).ids, dtype=np.int32) for _ in of_text]) for of_text in parts]

    def framed(self, ids: TokenIds) -> TokenIds:
        """Token ids between [CLS] and [SEP]."""
        return np.concatenate([[self.cls], ids, [self.sep]]).astype(np.int32)

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)


def segments(text: str) -> list[str]:
    """Parts of at most `SEGMENT` characters that end at a space where there is one near.

    >>> segments("a b")
    ['a b']
    """
    found, start = [], 0
    while len(text) - start > SEGMENT:
        end = start + SEGMENT
        near = max(text.rfind(mark, end - SEARCHED, end) for mark in (" ", "\n"))
        end = near if near > start else end
        found.append(text[start:end])
        start = end
    return [*found, text[start:]]


def windows(ids: TokenIds, encoding: ChunkEncoding) -> Iterator[TokenIds]:
    """Parts of a document's tokens, one for each chunk.

    >>> found = windows(np.arange(10, dtype=np.int32), ChunkEncoding(chunk_tokens=6, overlap=1))
    >>> [part.tolist() for part in found]
    [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    """
    width = encoding.chunk_tokens - NUM_SPECIAL
    for start in range(0, len(ids), width - encoding.overlap):
        yield ids[start : start + width]
        if start + width >= len(ids):
            return


def check_encoding(encoding: ChunkEncoding, *, max_positions: int) -> None:
    """Raise InputError for chunks that the encoder cannot take, or whose overlap leaves nothing new."""
    if not NUM_SPECIAL < encoding.chunk_tokens <= max_positions:
        raise InputError(
            "--chunk-tokens does not fit the encoder", got=encoding.chunk_tokens,
            allowed=f"{NUM_SPECIAL + 1} to {max_positions}, its positions",
        )  # fmt: skip
    most = encoding.chunk_tokens - NUM_SPECIAL - 1
    if not 0 <= encoding.overlap <= most:
        raise InputError(
            "--overlap leaves no new token in a chunk", got=encoding.overlap,
            allowed=f"0 to {most} for chunks of {encoding.chunk_tokens}, two of which are special tokens",
        )  # fmt: skip


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise MissingDependencyError(
            "documents are tokenized with the package tokenizers, which is not installed",
            hint=install_command("ingest"),
        ) from None
    return tokenizers


def open_chunk_tokenizer(path: Path) -> ChunkTokenizer:
    """Open `tokenizer.json`, or the folder that holds it. Raises InputError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        found = _library().Tokenizer.from_file(str(file))
    except MissingDependencyError:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        raise InputError(f"no tokenizer can be read ({error})", got=str(file), allowed="tokenizer.json") from None
    found.no_truncation()
    found.no_padding()
    return _with_special(found, name=path.name)


def _with_special(found: Any, *, name: str) -> ChunkTokenizer:
    """Find [CLS], [SEP] and padding, or the tokens that RoBERTa has instead."""
    ids: list[int] = []
    for names in (("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[PAD]", "<pad>")):
        known = [found.token_to_id(n) for n in names if found.token_to_id(n) is not None]
        if not known:
            raise InputError(f"the tokenizer has no token {names[0]}", got=name, allowed="an encoder's tokenizer")
        ids.append(known[0])
    cls, sep, pad = ids
    return ChunkTokenizer(found, cls, sep, pad, name)


def train_chunk_tokenizer(texts: Iterable[str], *, vocabulary: int) -> ChunkTokenizer:
    """Train WordPiece on a sample of the documents: the default where no real model is there."""
    library = _library()
    found = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    found.normalizer = library.normalizers.BertNormalizer(lowercase=True)
    found.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=vocabulary, show_progress=False, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    )  # fmt: skip
    found.train_from_iterator(_sample(texts), trainer=trainer)
    return _with_special(
        found, name=f"WordPiece, trained on a sample of the documents, {found.get_vocab_size():,} tokens"
    )


def _sample(texts: Iterable[str]) -> Iterator[str]:
    left = TRAINED_ON
    for text in texts:
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)
