"""Request of `bench ingest`, and all that can be refused before a record is written: encoder, tokenizer, documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.bench.ingest.choices import IndexChoice
from meshwright.bench.ingest.chunks import (
    NUM_SPECIAL,
    ChunkTokenizer,
    check_encoding,
    open_chunk_tokenizer,
    train_chunk_tokenizer,
    windows,
)
from meshwright.bench.ingest.documents import Document, DocumentTally, IngestSource, SkippedDocumentError, SkipReason
from meshwright.bench.ingest.encoder import EncoderWeights, check_vocabulary, load_weights, random_weights
from meshwright.bench.ingest.indexes import require
from meshwright.errors import InputError, MissingDependencyError
from meshwright.inference.ingestion import MINILM_L6
from meshwright.records.ingest import ChunkEncoding, IngestMode, IngestRow

TRAINING_TEXTS = 512  # documents, of which the tokenizer's trainer takes 4 million characters


@dataclass(frozen=True, kw_only=True)
class IngestRequest:
    """Request of one `bench ingest`."""

    source: IngestSource
    encoder: Path | None = None  # folder; None: random weights of MiniLM-L6
    encoder_name: str = ""
    tokenizer: Path | None = None  # None: that of the encoder's folder, or one trained on the documents
    encodings: tuple[ChunkEncoding, ...] = (ChunkEncoding(),)
    modes: tuple[IngestMode, ...] = tuple(IngestMode)
    indexes: tuple[IndexChoice, ...]
    num_chunks: int | None = 1024  # about; None: all
    num_vectors: int | None = None  # of the comparison of indexes; None: as many as chunks
    k: int = 10
    num_queries: int = 200
    query_tokens: int = 16
    query_batches: tuple[int, ...] = (1, 32)
    query_threads: tuple[int, ...] = (1,)
    threads: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    repeats: int = 1
    seed: int = 0


class IngestWatch:
    """Receiver of progress; this one shows none."""

    def begin(self, what: str, total: int | None) -> None: ...
    def advance(self, amount: int) -> None: ...
    def end(self, row: IngestRow | None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class PreparedIngest:
    """Encoder, tokenizer and chosen documents: everything that can be refused before a record is written."""

    weights: EncoderWeights
    tokenizer: ChunkTokenizer
    documents: Sequence[Document]
    num_chunks: Mapping[tuple[int, int], int]  # by tokens of a chunk and overlap
    tally: DocumentTally
    num_tried: int
    num_tokens: int

    def facts(self, source: IngestSource) -> dict[str, Any]:
        """Keys of the sidecar."""
        tally, shape = self.tally, self.weights.shape
        return {
            "documents": {
                "source": source.name, "num_found": len(source.documents), "num_tried": self.num_tried,
                "num_used": tally.num_used, "num_bytes": tally.num_bytes, "num_tokens": self.num_tokens,
                "sha256": tally.sha256, "skipped": tally.reasons,
            },
            "encoder": {
                "origin": self.weights.origin, "is_random": self.weights.is_random,
                "parameters": shape.num_parameters, "layers": shape.num_layers, "hidden": shape.hidden,
                "heads": shape.num_heads, "ffn": shape.ffn, "tokenizer": self.tokenizer.name,
            },
        }  # fmt: skip


def prepare(request: IngestRequest, *, watch: IngestWatch) -> PreparedIngest:
    """Load the encoder and choose documents. Raises InputError or MissingDependencyError."""
    torch.set_num_threads(request.threads)
    for kind in ("flat", *(choice.kind for choice in request.indexes)):
        require(kind)
    weights = _weights(request)
    for encoding in request.encodings:
        check_encoding(encoding, max_positions=weights.shape.max_positions)
    if request.query_tokens + NUM_SPECIAL > weights.shape.max_positions:
        raise InputError(
            "--query-tokens does not fit the encoder", got=request.query_tokens,
            allowed=f"at most {weights.shape.max_positions - NUM_SPECIAL}",
        )  # fmt: skip
    tokenizer = _tokenizer(request, weights)
    check_vocabulary(weights, tokenizer)
    found = _chosen(request, weights, tokenizer, watch)
    if not found.tally.num_used:
        reasons = ", ".join(f"{count} {reason}" for reason, count in found.tally.reasons.items())
        raise InputError("no document can be ingested", got=reasons or "no file", allowed="text in UTF-8")
    return found


def _weights(request: IngestRequest) -> EncoderWeights:
    if request.encoder is None:
        return random_weights(MINILM_L6, seed=request.seed)
    return load_weights(request.encoder, name=request.encoder_name or str(request.encoder))


def _tokenizer(request: IngestRequest, weights: EncoderWeights) -> ChunkTokenizer:
    folder = request.tokenizer or request.encoder
    if folder is not None:
        return open_chunk_tokenizer(folder)
    texts = _texts(request.source.documents[:TRAINING_TEXTS])
    return train_chunk_tokenizer(texts, vocabulary=weights.shape.vocabulary)


def _texts(documents: Sequence[Document]) -> Iterator[str]:
    for document in documents:
        with suppress(SkippedDocumentError):
            yield document.read()


def _chosen(
    request: IngestRequest, weights: EncoderWeights, tokenizer: ChunkTokenizer, watch: IngestWatch
) -> PreparedIngest:
    """Choose documents until they have as many chunks as asked for; the others are not ingested."""
    tally, used = DocumentTally(), []
    geometries = dict.fromkeys((e.chunk_tokens, e.overlap) for e in request.encodings)
    counts = dict.fromkeys(geometries, 0)
    first = next(iter(geometries))
    num_tried = num_tokens = 0
    watch.begin("choosing documents", request.num_chunks)
    for document in request.source.documents:
        if request.num_chunks is not None and counts[first] >= request.num_chunks:
            break
        num_tried += 1
        try:
            text = document.read()
            (ids,) = tokenizer.ids([text])
            if not len(ids):
                raise SkippedDocumentError(SkipReason.NO_TOKENS)
        except SkippedDocumentError as skipped:
            tally.skipped[skipped.reason] += 1
            continue
        tally.add(text)
        used.append(document)
        num_tokens += len(ids)
        before = counts[first]
        for chunk_tokens, overlap in geometries:
            encoding = ChunkEncoding(chunk_tokens=chunk_tokens, overlap=overlap)
            counts[chunk_tokens, overlap] += sum(1 for _ in windows(ids, encoding))
        watch.advance(counts[first] - before)
    watch.end(None)
    return PreparedIngest(
        weights=weights, tokenizer=tokenizer, documents=used, num_chunks=counts, tally=tally, num_tried=num_tried,
        num_tokens=num_tokens,
    )  # fmt: skip


def named_device(name: str) -> torch.device:
    """The device called `cpu` or `cuda`. Raises MissingDependencyError if it is absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise MissingDependencyError(
            "--device cuda: PyTorch finds no GPU here", hint="a GPU, its driver and a build of PyTorch for it"
        )
    return torch.device(name)


def cpu_threads() -> int:
    """Threads that PyTorch uses on the CPU."""
    return torch.get_num_threads()
