"""`meshwright bench ingest`: options and help."""

from __future__ import annotations

from meshwright.cli.options import html_option, json_option
from meshwright.cli.verbs import verb


@verb(
    "ingest",
    question="meshwright.api.bench_ingest:bench_ingest",
    body="meshwright.cli.bench_ingest:run",
    examples=[
        "meshwright bench ingest --html ingest.html",
        "meshwright bench ingest documents/ --pattern '*.md' --chunks all --repeats 6",
        "meshwright bench ingest corpus.jsonl --text-key body --encoder sentence-transformers/all-MiniLM-L6-v2",
        "meshwright bench ingest --chunk-tokens 128,256 --batch 8,32 --precision fp32,bf16 --order length,arrival",
        "meshwright bench ingest --index usearch:dtype=f32/f16/i8,ef=32/64/128 --index faiss-ivf:probe=4/16 "
        "--vectors 100000",
        "meshwright bench ingest --device cuda --precision bf16 --batch 256,1024 --chunks all",
    ],
)
@html_option
@json_option
def command() -> None:
    """Measure retrieval ingestion: documents to an index that answers queries.

    Reads text, splits it into chunks by tokens, encodes them with a sentence encoder, builds an index and searches
    it. Reports rates of each stage, stages one at a time against overlapped, the time until chunks can be searched,
    recall against the exact index, latency and rate of searches, and memory.

    SOURCE is a folder, a JSONL file or a text file; without it, the source of Python's standard library is read. Each
    measurement is recorded when it ends, and Ctrl-C keeps what was measured. Exits with 1 without any measurement.
    """
