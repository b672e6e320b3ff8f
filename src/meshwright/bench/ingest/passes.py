"""One measured ingestion of all documents, with its times to searchable and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.bench.ingest.choices import IndexChoice
from meshwright.bench.ingest.chunks import ChunkTokenizer, TokenChunk
from meshwright.bench.ingest.documents import Document
from meshwright.bench.ingest.indexes import VectorIndex, Vectors, make_index
from meshwright.bench.ingest.stages import (
    Encoder,
    EncodeStage,
    IndexStage,
    ReadStage,
    TokenizeStage,
    groups_of,
    run_alternating,
    run_overlapped,
)
from meshwright.records.files import now
from meshwright.records.ingest import ChunkEncoding, IngestMode, IngestPass
from meshwright.training.device import resident_bytes


@dataclass(kw_only=True)
class PassInput:
    """Input of one pass: documents, encoder and index."""

    documents: Sequence[Document]
    tokenizer: ChunkTokenizer
    encoder: Encoder
    encoding: ChunkEncoding
    mode: IngestMode
    index: IndexChoice
    dim: int
    num_chunks: int  # expected
    threads: int
    repeat: int
    reset_device: Callable[[], None] = lambda: None
    device_bytes: Callable[[], int | None] = lambda: None


@dataclass(kw_only=True)
class PassOutput:
    """Vectors and chunks of one pass in the order of their numbers."""

    index: VectorIndex
    chunks: list[TokenChunk] = field(default_factory=list)
    parts: list[Vectors] = field(default_factory=list)

    @property
    def ordered(self) -> tuple[list[TokenChunk], Vectors]:
        """Chunks and their vectors in the order of the documents."""
        order = np.argsort([chunk.number for chunk in self.chunks], kind="stable")
        vectors = np.concatenate(self.parts)
        return [self.chunks[i] for i in order], np.ascontiguousarray(vectors[order])


class PassInterruptedError(Exception):
    """Ctrl-C or SIGTERM in the middle of a pass. `row` counts the chunks ingested until then."""

    def __init__(self, row: IngestPass, *, by: KeyboardInterrupt) -> None:
        super().__init__("interrupted")
        self.row, self.by = row, by


def run_pass(asked: PassInput, *, advance: Callable[[int], None]) -> tuple[IngestPass, PassOutput]:
    """Ingest all documents once. `advance` is called with the number of chunks of each batch.

    Raises PassInterruptedError on Ctrl-C and SIGTERM, and any error of a stage.
    """
    index = make_index(asked.index, dim=asked.dim, num_vectors=asked.num_chunks, threads=asked.threads)
    stages = (
        ReadStage(), TokenizeStage(asked.tokenizer, asked.encoding), EncodeStage(asked.encoder), IndexStage(index),
    )  # fmt: skip
    output = PassOutput(index=index)
    row = _Progress(asked)

    def sink(chunks: list[TokenChunk], vectors: Vectors, is_searchable: bool) -> None:
        row.add(chunks, is_searchable)
        output.chunks += chunks
        output.parts.append(vectors)
        advance(len(chunks))

    asked.reset_device()
    run = run_alternating if asked.mode is IngestMode.SEQUENTIAL else run_overlapped
    row.begin()
    try:
        run(stages, groups_of(asked.documents), sink)
    except KeyboardInterrupt as error:
        raise PassInterruptedError(row.done(stages, interrupted=True), by=error) from None
    return row.done(stages, interrupted=False), output


class _Progress:
    """Counts of a pass while it runs."""

    def __init__(self, asked: PassInput) -> None:
        e, self.asked = asked.encoding, asked
        self.row = IngestPass(
            chunk_tokens=e.chunk_tokens, overlap=e.overlap, batch=e.batch, precision=e.precision, order=e.order,
            mode=asked.mode, index=asked.index.name, repeat=asked.repeat, started=now(),
        )  # fmt: skip
        self.begin()

    def begin(self) -> None:
        """Start the clocks."""
        self.start_s, self.start_cpu_s = time.perf_counter(), time.process_time()

    def add(self, chunks: list[TokenChunk], is_searchable: bool) -> None:
        """Count one batch that has come through all stages."""
        at_s = time.perf_counter() - self.start_s
        row, sizes = self.row, [len(chunk.ids) for chunk in chunks]
        self.row = replace(
            row,
            num_documents=row.num_documents + sum(chunk.ends_document for chunk in chunks),
            num_bytes=row.num_bytes + sum(chunk.document_bytes for chunk in chunks),
            num_chunks=row.num_chunks + len(chunks),
            num_tokens=row.num_tokens + sum(sizes),
            num_computed_tokens=row.num_computed_tokens + len(sizes) * max(sizes, default=0),
            first_searchable_s=row.first_searchable_s or (at_s if is_searchable else None),
            last_searchable_s=at_s if is_searchable else row.last_searchable_s,
            peak_resident_bytes=max(row.peak_resident_bytes, resident_bytes()),
        )

    def done(
        self, stages: Sequence[ReadStage | TokenizeStage | EncodeStage | IndexStage], *, interrupted: bool
    ) -> IngestPass:
        """The line of the records."""
        read_s, tokenize_s, encode_s, index_s = (stage.seconds for stage in stages)
        return replace(
            self.row, wall_s=time.perf_counter() - self.start_s, cpu_s=time.process_time() - self.start_cpu_s,
            interrupted=interrupted,
            read_s=read_s, tokenize_s=tokenize_s, encode_s=encode_s, index_s=index_s,
            peak_device_bytes=self.asked.device_bytes(),
        )  # fmt: skip
