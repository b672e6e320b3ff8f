"""One ingestion: read, tokenize, encode, index. Stages alternate, or overlap in a thread each.

    documents -> [read] -> texts -> [tokenize] -> batches of chunks -> [encode] -> vectors -> [index]

Both ways run the same stages on the same input in the same order, so that only their overlap differs. A
stage's seconds exclude waiting for a neighbour. Overlapping stages share the cores, and the sum of their
seconds may exceed the sum of alternating stages.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from meshwright.bench.ingest.chunks import ChunkTokenizer, TokenChunk, windows
from meshwright.bench.ingest.documents import Document, SkippedDocumentError
from meshwright.bench.ingest.indexes import VectorIndex, Vectors
from meshwright.records.ingest import BatchOrder, ChunkEncoding

GROUP = 8
"""Documents that are read at once."""
WINDOW = 16
"""Batches among whose chunks lengths are sorted."""
AHEAD = 4
"""Results that a stage may be ahead of the next one."""
POLL_S = 0.05


class Encoder(Protocol):
    """Maker of vectors from token ids."""

    def encode(self, ids: Sequence[Any]) -> Vectors: ...


class IngestStage(Protocol):
    """One stage: `process` returns results of one input, `finish` the remaining results when the input ends."""

    seconds: float

    def process(self, item: Any) -> list[Any]: ...
    def finish(self) -> list[Any]: ...


@dataclass
class ReadStage:
    """Files to texts."""

    seconds: float = 0.0

    def process(self, item: Sequence[Document]) -> list[Any]:
        texts = []
        for document in item:
            try:
                texts.append(document.read())
            except SkippedDocumentError:  # changed since the documents were chosen
                continue
        return [texts]

    def finish(self) -> list[Any]:
        return []


@dataclass
class TokenizeStage:
    """Texts to batches of chunks."""

    tokenizer: ChunkTokenizer
    encoding: ChunkEncoding
    seconds: float = 0.0
    waiting: list[TokenChunk] = field(default_factory=list)
    num_chunks: int = 0

    def process(self, item: Sequence[str]) -> list[Any]:
        for text, ids in zip(item, self.tokenizer.ids(item), strict=True):
            parts = list(windows(ids, self.encoding))
            for number, part in enumerate(parts, start=1):
                is_last = number == len(parts)
                self.waiting.append(
                    TokenChunk(
                        number=self.num_chunks, ids=self.tokenizer.framed(part), ends_document=is_last,
                        document_bytes=len(text.encode("utf-8", errors="replace")) if is_last else 0,
                    )
                )  # fmt: skip
                self.num_chunks += 1
        window = self.encoding.batch * (WINDOW if self.encoding.order is BatchOrder.LENGTH else 1)
        whole = len(self.waiting) - len(self.waiting) % window
        ready, self.waiting = self.waiting[:whole], self.waiting[whole:]
        return [b for start in range(0, whole, window) for b in self._batches(ready[start : start + window])]

    def finish(self) -> list[Any]:
        ready, self.waiting = self.waiting, []
        return self._batches(ready)

    def _batches(self, chunks: list[TokenChunk]) -> list[list[TokenChunk]]:
        if self.encoding.order is BatchOrder.LENGTH:
            chunks = sorted(chunks, key=lambda chunk: -len(chunk.ids))
        size = self.encoding.batch
        return [chunks[start : start + size] for start in range(0, len(chunks), size)]


@dataclass
class EncodeStage:
    """Batches of chunks to vectors."""

    encoder: Encoder
    seconds: float = 0.0

    def process(self, item: list[TokenChunk]) -> list[Any]:
        return [(item, self.encoder.encode([chunk.ids for chunk in item]))]

    def finish(self) -> list[Any]:
        return []


@dataclass
class IndexStage:
    """Add vectors to the index. An index that needs training takes all vectors at the end."""

    index: VectorIndex
    seconds: float = 0.0
    waiting: list[Vectors] = field(default_factory=list)

    def process(self, item: tuple[list[TokenChunk], Vectors]) -> list[Any]:
        chunks, vectors = item
        if self.index.needs_training:
            self.waiting.append(vectors)
            return [(chunks, vectors, False)]
        self.index.add(vectors)
        return [(chunks, vectors, True)]

    def finish(self) -> list[Any]:
        if not self.waiting:
            return []
        vectors = np.concatenate(self.waiting)
        self.index.train(vectors)
        self.index.add(vectors)
        return [([], vectors[:0], True)]


Sink = Callable[[list[TokenChunk], Vectors, bool], None]
"""Receives chunks with their vectors, and whether everything so far can be searched."""


def groups_of(documents: Sequence[Document]) -> list[Sequence[Document]]:
    """Documents as the first stage takes them."""
    return [documents[start : start + GROUP] for start in range(0, len(documents), GROUP)]


def _timed(stage: IngestStage, run: Callable[[], list[Any]]) -> list[Any]:
    start_s = time.perf_counter()
    try:
        return run()
    finally:
        stage.seconds += time.perf_counter() - start_s


def run_alternating(stages: Sequence[IngestStage], items: Iterable[Any], sink: Sink) -> None:
    """One stage at a time: each result goes through all later stages before the next is made."""

    def push(item: Any, place: int) -> None:
        if place == len(stages):
            sink(*item)
            return
        for made in _timed(stages[place], lambda: stages[place].process(item)):
            push(made, place + 1)

    for item in items:
        push(item, 0)
    for place, stage in enumerate(stages):
        for made in _timed(stage, stage.finish):
            push(made, place + 1)


_END = object()


class _Overlap:
    """Threads of all stages, the queues between them, and the first error."""

    def __init__(self, stages: Sequence[IngestStage], items: Iterable[Any]) -> None:
        self.stages, self.items = stages, items
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.queues: list[queue.Queue[Any]] = [queue.Queue(maxsize=AHEAD) for _ in range(len(stages) + 1)]
        self.threads = [threading.Thread(target=self._caught, args=(self._feed,), daemon=True)]
        self.threads += [
            threading.Thread(target=self._caught, args=(lambda place=place: self._work(place),), daemon=True)
            for place in range(len(stages))
        ]

    def put(self, place: int, item: Any) -> bool:
        """Put into a queue; False: the pipeline has stopped."""
        while not self.stop.is_set():
            try:
                self.queues[place].put(item, timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def get(self, place: int) -> Any:
        """Take from a queue; the end if the pipeline has stopped."""
        while not self.stop.is_set():
            try:
                return self.queues[place].get(timeout=POLL_S)
            except queue.Empty:
                continue
        return _END

    def _caught(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.error = self.error or error
            self.stop.set()

    def _feed(self) -> None:
        for item in self.items:
            if not self.put(0, item):
                return
        self.put(0, _END)

    def _work(self, place: int) -> None:
        stage = self.stages[place]
        while (item := self.get(place)) is not _END:
            for made in _timed(stage, lambda item=item: stage.process(item)):
                self.put(place + 1, made)
        if self.stop.is_set():
            return
        for made in _timed(stage, stage.finish):
            self.put(place + 1, made)
        self.put(place + 1, _END)


def run_overlapped(stages: Sequence[IngestStage], items: Iterable[Any], sink: Sink) -> None:
    """A thread for each stage. Raises the first error of a stage; KeyboardInterrupt ends all threads."""
    overlap = _Overlap(stages, items)
    for thread in overlap.threads:
        thread.start()
    try:
        while (made := overlap.get(len(stages))) is not _END:
            sink(*made)
    finally:
        overlap.stop.set()
        for thread in overlap.threads:
            thread.join()
    if overlap.error is not None:
        raise overlap.error
