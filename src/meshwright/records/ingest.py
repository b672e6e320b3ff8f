"""Records of retrieval ingestion: three CSV files and a sidecar in one folder.

passes.csv    one line per ingestion of all documents: seconds of each stage, time to searchable
builds.csv    one line per index that was built from the same vectors
searches.csv  one line per index, search parameters, batch and threads: recall, latencies, queries/s
ingest.json   sidecar: documents, encoder, device, software, command
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshwright.records.fields import Fields
from meshwright.records.files import Recorder, RowTable, SidecarFields, read_sidecar, unfinished

SCHEMA = "meshwright bench ingest 1"
SIDECAR_NAME = "ingest.json"
MADE_BY = "meshwright bench ingest"


class IngestMode(StrEnum):
    """Order of the stages."""

    SEQUENTIAL = "sequential"  # one stage at a time: they alternate, batch by batch
    PIPELINED = "pipelined"  # a thread for each stage: they overlap


class BatchOrder(StrEnum):
    """Order in which chunks are put into batches of the encoder."""

    LENGTH = "length"  # sorted by length within a window of batches: little padding
    ARRIVAL = "arrival"


@dataclass(frozen=True, kw_only=True)
class ChunkEncoding:
    """Chunks and batches of one ingestion. Tokens of a chunk include its two special tokens."""

    chunk_tokens: int = 256
    overlap: int = 32  # tokens that a chunk has in common with the one before
    batch: int = 32  # chunks
    precision: str = "fp32"
    order: BatchOrder = BatchOrder.LENGTH

    @property
    def name(self) -> str:
        """Text in tables.

        >>> ChunkEncoding().name
        '256 tokens, overlap 32, batch 32, fp32, by length'
        """
        return (
            f"{self.chunk_tokens} tokens, overlap {self.overlap}, batch {self.batch}, {self.precision}, by {self.order}"
        )


@dataclass(frozen=True, kw_only=True)
class IngestPass:
    """One ingestion of all documents: one line of `passes.csv`. Seconds of a stage are those in which it worked."""

    chunk_tokens: int
    overlap: int
    batch: int
    precision: str
    order: BatchOrder
    mode: IngestMode
    index: str
    repeat: int  # the first is 1
    started: str  # ISO 8601, UTC
    interrupted: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0  # of all threads of the process
    num_documents: int = 0
    num_bytes: int = 0
    num_chunks: int = 0
    num_tokens: int = 0  # of chunks, special tokens included
    num_computed_tokens: int = 0  # with the padding of batches
    read_s: float = 0.0
    tokenize_s: float = 0.0
    encode_s: float = 0.0
    index_s: float = 0.0
    first_searchable_s: float | None = None  # from the start to the end of the first addition
    last_searchable_s: float | None = None
    peak_resident_bytes: int = 0  # of the process, at the end of a batch
    peak_device_bytes: int | None = None

    @property
    def encoding(self) -> ChunkEncoding:
        return ChunkEncoding(**{f.name: getattr(self, f.name) for f in fields(ChunkEncoding)})

    @property
    def stage_s(self) -> dict[str, float]:
        """Seconds in which each stage worked."""
        return {stage: getattr(self, f"{stage}_s") for stage in STAGES}

    @property
    def padding_ratio(self) -> float:
        """Share of the computed tokens that are padding."""
        return 1 - self.num_tokens / self.num_computed_tokens if self.num_computed_tokens else 0.0


STAGES = ("read", "tokenize", "encode", "index")


@dataclass(frozen=True, kw_only=True)
class IndexBuild:
    """One index built from all vectors at once: one line of `builds.csv`."""

    index: str
    build: str  # parameters
    repeat: int
    started: str
    num_vectors: int
    num_synthetic: int = 0  # of these, vectors that no chunk has
    dim: int
    threads: int
    build_s: float | None = None
    file_bytes: int | None = None
    resident_growth_bytes: int | None = None
    refusal: str = ""  # reason why it was not built


@dataclass(frozen=True, kw_only=True)
class IndexSearch:
    """One way of searching one index: one line of `searches.csv`."""

    index: str
    build: str
    search: str  # parameters
    repeat: int
    k: int  # neighbours asked for; at most the number of vectors
    batch: int  # queries of one call
    threads: int
    num_vectors: int
    num_queries: int
    num_calls: int = 0
    recall: float | None = None  # against the exact index; equal similarities count as equal
    own_chunk_ratio: float | None = None  # of the queries: their own chunk is among the k
    p50_s: float | None = None  # of one call
    p90_s: float | None = None
    p99_s: float | None = None
    queries_per_s: float | None = None
    refusal: str = ""


IngestRow = IngestPass | IndexBuild | IndexSearch
TABLES: dict[type[Any], RowTable[Any]] = {
    kind: RowTable(kind=kind, name=name, what="ingest records", made_by=MADE_BY)
    for kind, name in ((IngestPass, "passes.csv"), (IndexBuild, "builds.csv"), (IndexSearch, "searches.csv"))
}


@dataclass(frozen=True, kw_only=True)
class IngestRecords:
    """Content of one folder of `bench ingest`."""

    folder: Path
    sidecar: Mapping[str, Any]
    passes: tuple[IngestPass, ...]
    builds: tuple[IndexBuild, ...]
    searches: tuple[IndexSearch, ...]


class IngestRecorder(Recorder):
    """Writer of the files in `folder`. Raises InputError if it holds records already."""

    def __init__(self, folder: Path, *, sidecar: Mapping[str, Any]) -> None:
        super().__init__(folder, name=SIDECAR_NAME, sidecar={**unfinished(SCHEMA), **sidecar})
        self.rows: list[IngestRow] = []
        self.begin(*TABLES.values())

    def append(self, row: IngestRow) -> None:
        """Add one line; it is in its file when this returns."""
        table = TABLES[type(row)]
        table.append(self.folder / table.name, row)
        self.rows.append(row)

    @property
    def records(self) -> IngestRecords:
        """Rows and sidecar so far."""
        return _records(self.folder, self.sidecar, lambda kind: [row for row in self.rows if isinstance(row, kind)])


def _records(folder: Path, sidecar: Mapping[str, Any], rows: Callable[[type[Any]], Iterable[Any]]) -> IngestRecords:
    names = {"passes": IngestPass, "builds": IndexBuild, "searches": IndexSearch}
    return IngestRecords(folder=folder, sidecar=sidecar, **{name: tuple(rows(kind)) for name, kind in names.items()})


class EncoderFields(Fields):
    """The model that makes vectors."""

    origin: str = ""  # absent: what needs it names it


class DocumentsFields(Fields):
    """The ingested documents."""

    source: str = ""


class IngestSidecar(SidecarFields):
    """Keys of the sidecar of an ingestion."""

    encoder: EncoderFields
    documents: DocumentsFields


def read_ingest(folder: Path) -> IngestRecords:
    """Read the records in `folder`. Raises InputError when they are absent or damaged."""
    keys = ("command", "started", "documents", "encoder")
    sidecar = read_sidecar(folder / SIDECAR_NAME, schema=SCHEMA, keys=keys, made_by=MADE_BY, kind=IngestSidecar)
    whole = bool(sidecar.get("ended"))
    return _records(folder, sidecar, lambda kind: TABLES[kind].read(folder / TABLES[kind].name, whole=whole))
