"""The published speed-up of an index build with index and encoder in device memory, computed.

The document (Signal65, June 2025) names neither encoder, vectors, index nor the other GPU. Assumed: MiniLM-L6's 384
numbers in fp32, distances in bf16, an index of the geometric mean of both memories, IVF with 8 sqrt(N) lists and 25
passes of k-means (faiss's own default), stages that alternate. The interval spans what is not stated:

    high   4 sqrt(N) lists, the low end of faiss's guideline; an index as large as the smaller memory
    low    16 sqrt(N) lists; an index as large as the larger memory; transfers overlap with distances
"""

from __future__ import annotations

from math import sqrt

from meshwright.catalog import lookup as catalog
from meshwright.catalog.lookup import Claim
from meshwright.cost.rates import system_rates
from meshwright.inference.ingestion import MINILM_L6, IngestSystem, IngestWork, resident, streamed, usual_lists
from meshwright.planner.claims import ClaimPrediction
from meshwright.specs.estimate import Estimate, Tier
from meshwright.specs.hardware import Stack
from meshwright.specs.precision import PRECISIONS

SMALLER = "b200"
LINK_RATIO = 0.85  # of the host link's nominal rate that large copies reach. Assumed
KMEANS_PASSES = 25  # niter of faiss's Clustering
CHUNK_TOKENS = 256
MEMORY_RATIO = 0.9


def ingest_system(accelerator: str) -> IngestSystem:
    """Rates of a device: its 16-bit GEMMs as calibrated for training, and its host link."""
    place = catalog.cluster(f"{accelerator}-1x1")
    device = place.accelerator
    ratio = float(system_rates(place, PRECISIONS["bf16"], Stack(framework="nemo")).device.gemm_ratio)
    gemm = device.peak_flops_per_s["bf16"] * ratio
    return IngestSystem(
        encode_flops_per_s=gemm, distance_flops_per_s=gemm,
        host_bytes_per_s=device.host_bytes_per_s * LINK_RATIO, memory_bytes=device.memory_bytes * MEMORY_RATIO,
    )  # fmt: skip


def index_of(size_bytes: float, *, lists_factor: int) -> IngestWork:
    """An index of `size_bytes` with `lists_factor` x sqrt(N) lists."""
    num = round(size_bytes / (MINILM_L6.hidden * 4))
    return IngestWork(
        shape=MINILM_L6, num_chunks=num, chunk_tokens=CHUNK_TOKENS, num_lists=usual_lists(num, factor=lists_factor),
        num_passes=KMEANS_PASSES,
    )  # fmt: skip


def build_ratios(work: IngestWork, system: IngestSystem) -> tuple[float, float]:
    """Index build with streamed over resident vectors: with alternating stages, and with overlapped ones."""
    index, transfer = resident(work, system).index, streamed(work, system).transfer
    return (transfer + index) / index, max(transfer, index) / index


def predict_index_build(found: Claim) -> ClaimPrediction:
    """Index-build time of a GPU that streams the vectors over that of one that holds them, on the claim's device."""
    larger, smaller = ingest_system(found.accelerator.lower()), ingest_system(SMALLER)
    work = index_of(sqrt(smaller.memory_bytes * larger.memory_bytes), lists_factor=8)
    alternating, overlapped = build_ratios(work, larger)
    high, _ = build_ratios(index_of(smaller.memory_bytes, lists_factor=4), larger)
    _, low = build_ratios(index_of(larger.memory_bytes, lists_factor=16), larger)
    held, moved = resident(work, larger), streamed(work, larger)
    once = work.index_bytes / larger.host_bytes_per_s
    value = Estimate(value=alternating, low=low, high=high, unit=found.unit, tier=Tier.GUESSED)
    return ClaimPrediction(
        claim=found,
        value=value,
        plans=(
            f"{work.num_chunks / 1e6:.0f} million vectors, {work.index_bytes / 1e9:.0f} GB, {work.num_lists:,} lists",
            f"seconds on {found.accelerator}: encode {held.encode:.0f}, distances {held.index:.0f}, "
            f"transfers {moved.transfer:.0f}",
            f"index build, stages alternate: {alternating:.2f}; overlap: {overlapped:.2f}",
            f"with the encoder, stages alternate: {moved.alternating / held.alternating:.2f}; "
            f"overlap: {moved.overlapped / held.overlapped:.2f}",
            f"vectors that cross the link once, after the encoder: {1 + once / held.alternating:.3f}",
        ),
    )
