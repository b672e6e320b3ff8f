"""`bench ingest`: all encodings, modes, indexes and repeats, each recorded when it ends.

(prepare)                     documents were read once: files are in the page cache
for each repeat:              a drift of the machine affects all alike
    for each encoding:            rates of the encoder's GEMMs
        for each mode:                one ingestion                  ->  passes.csv
for each repeat:
    for each index:               one build, its searches            ->  builds.csv, searches.csv

Indexes are compared on the vectors of the first encoding. The bound of an encoder's rate is its FLOPs at the rate that
its own GEMMs reach: attention's FLOPs count at the same rate, and norms, activations and the embedding take no time.
The encoder's share of the bound shows how much the ignored work costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.bench.harness import measure
from meshwright.bench.ingest.chunks import TokenChunk
from meshwright.bench.ingest.comparison import compare_indexes, comparison
from meshwright.bench.ingest.encoder import DTYPES, ChunkEncoder, placed
from meshwright.bench.ingest.indexes import Vectors
from meshwright.bench.ingest.passes import PassInput, PassInterruptedError, run_pass
from meshwright.bench.ingest.prepare import IngestRequest, IngestWatch, PreparedIngest
from meshwright.errors import InfeasibleError
from meshwright.inference.ingestion import EncoderShape
from meshwright.records.files import now
from meshwright.records.ingest import ChunkEncoding, IngestMode, IngestRecorder, IngestRow
from meshwright.training import device as devices
from meshwright.training.telemetry import git_commit, software_facts

BUDGET_S = 0.2  # of one GEMM


def encoder_bound(
    shape: EncoderShape, *, batch: int, length: int, precision: str, device: torch.device
) -> dict[str, float]:
    """Rates of the GEMMs of one layer with `batch` x `length` tokens, and the bound of tokens/s."""
    h, f, tokens = shape.hidden, shape.ffn, batch * length
    seconds = flops = 0.0
    for n, k, count in ((h, h, 4), (f, h, 1), (h, f, 1)):
        seconds += count * _gemm_s(tokens, n, k, DTYPES[precision], device)
        flops += count * 2.0 * tokens * n * k
    rate = flops / seconds
    per_token = shape.gemm_flops_per_token + shape.attention_flops_per_token(length)
    return {"gemm_flops_per_s": rate, "flops_per_token": per_token, "tokens_per_s": rate / per_token}


def _gemm_s(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    run: Callable[[], object] = lambda: torch.mm(a, b.T, out=out)  # noqa: E731
    with torch.inference_mode():
        return min(measure(run, synchronize=lambda: devices.synchronize(device), budget_s=BUDGET_S).seconds)


FIDELITY_CHUNKS = 256


@dataclass(kw_only=True)
class _Bench:
    request: IngestRequest
    ready: PreparedIngest
    recorder: IngestRecorder
    watch: IngestWatch
    encoders: dict[str, ChunkEncoder] = field(default_factory=dict)
    reference: tuple[ChunkEncoding, list[TokenChunk], Vectors] | None = None
    fidelity: dict[str, float] = field(default_factory=dict)
    bounds: dict[tuple[str, int, int], dict[str, float]] = field(default_factory=dict)

    def encoder(self, precision: str) -> ChunkEncoder:
        """The encoder in one number format; copies are kept."""
        if precision not in self.encoders:
            self.encoders[precision] = placed(
                self.ready.weights, pad=self.ready.tokenizer.pad, precision=precision, device=self.request.device
            )
        return self.encoders[precision]

    def record(self, row: IngestRow) -> None:
        self.recorder.append(row)
        self.watch.end(row)


def run_ingest(request: IngestRequest, ready: PreparedIngest, *, recorder: IngestRecorder, watch: IngestWatch) -> None:
    """Measure all passes of `request`. Raises KeyboardInterrupt after the interrupted pass was recorded."""
    bench = _Bench(request=request, ready=ready, recorder=recorder, watch=watch)
    for repeat in range(1, request.repeats + 1):
        for encoding in request.encodings:
            _bound(bench, encoding)
            for mode in request.modes:
                _pass(bench, encoding, mode, repeat)
    assert bench.reference is not None
    encoding, chunks, vectors = bench.reference
    compared = comparison(
        request, bench.encoder(encoding.precision), chunks, vectors, has_meaning=not ready.weights.is_random,
        recorder=recorder, watch=watch,
    )  # fmt: skip
    compare_indexes(compared)


def _bound(bench: _Bench, encoding: ChunkEncoding) -> None:
    """Measure the encoder's GEMMs before a pass. The best of all measurements counts: other programs only slow it."""
    key = (encoding.precision, encoding.batch, encoding.chunk_tokens)
    bench.watch.begin(f"GEMMs of {encoding.name}", None)
    found = encoder_bound(
        bench.ready.weights.shape, batch=encoding.batch, length=encoding.chunk_tokens, precision=encoding.precision,
        device=bench.request.device,
    )  # fmt: skip
    bench.watch.end(None)
    if key not in bench.bounds or found["tokens_per_s"] > bench.bounds[key]["tokens_per_s"]:
        bench.bounds[key] = found
    names = ("precision", "batch", "chunk_tokens")
    rows = [{**dict(zip(names, key, strict=True)), **bound} for key, bound in bench.bounds.items()]
    bench.recorder.save(bounds=rows)


def _pass(bench: _Bench, encoding: ChunkEncoding, mode: IngestMode, repeat: int) -> None:
    """One ingestion."""
    request = bench.request
    encoder = bench.encoder(encoding.precision)
    expected = bench.ready.num_chunks[encoding.chunk_tokens, encoding.overlap]
    bench.watch.begin(f"{encoding.name}, {mode}, repeat {repeat}", expected)
    encoder.encode([np.full(encoding.chunk_tokens, bench.ready.tokenizer.pad, dtype=np.int32)] * encoding.batch)
    is_gpu = request.device.type == "cuda"
    asked = PassInput(
        documents=bench.ready.documents, tokenizer=bench.ready.tokenizer, encoder=encoder, encoding=encoding, mode=mode,
        index=request.indexes[0], dim=bench.ready.weights.shape.hidden, num_chunks=expected, threads=request.threads,
        repeat=repeat, reset_device=lambda: devices.release_memory(request.device),
        device_bytes=lambda: devices.peak_memory_bytes(request.device) if is_gpu else None,
    )  # fmt: skip
    try:
        row, output = run_pass(asked, advance=bench.watch.advance)
    except PassInterruptedError as stopped:
        bench.record(stopped.row)
        raise stopped.by from None
    bench.record(row)
    if row.num_chunks != expected:
        raise InfeasibleError(
            f"{row.num_chunks} chunks were ingested, {expected} before: the documents changed meanwhile"
        )
    _keep(bench, encoding, *output.ordered)


def _keep(bench: _Bench, encoding: ChunkEncoding, chunks: list[TokenChunk], vectors: Vectors) -> None:
    """Keep the vectors of the first pass; compare vectors in other number formats with them."""
    if bench.reference is None:
        bench.reference = (encoding, chunks, vectors)
        return
    first, _, expected = bench.reference
    same = (encoding.chunk_tokens, encoding.overlap) == (first.chunk_tokens, first.overlap)
    if same and encoding.precision != first.precision and encoding.precision not in bench.fidelity:
        cosines = np.einsum("nd,nd->n", vectors[:FIDELITY_CHUNKS], expected[:FIDELITY_CHUNKS])
        bench.fidelity[encoding.precision] = float(cosines.min())
        bench.recorder.save(least_cosine={"to": first.precision, **bench.fidelity})


def facts(request: IngestRequest, ready: PreparedIngest, *, command: Sequence[str]) -> dict[str, Any]:
    """Origin of the records, without the name of a host or user."""
    device = request.device
    return {
        "device": {
            "type": device.type, "name": devices.device_name(device), "memory_bytes": devices.memory_bytes(device),
            "threads": request.threads,
        },
        "software": software_facts("usearch", "hnswlib", "faiss-cpu"),
        "command": list(command), "started": now(), "git_commit": git_commit(Path.cwd()),
        **ready.facts(request.source), "seed": request.seed, "repeats": request.repeats,
    }  # fmt: skip
