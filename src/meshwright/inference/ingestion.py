"""Seconds of retrieval ingestion: encode chunks, move the vectors, build the index.

Encoder (BERT, forward; one multiply-add is 2 FLOP), per token of a chunk of s tokens:

    GEMM        2 L (4 h^2 + 2 h f)      projections of attention, both matrices of the feed-forward block
    attention   4 L h s                  scores and their sum over values

Stages that alternate take the sum of their seconds, stages that overlap the largest of them:

    t = E + T + I    or    max(E, T, I)      E encode, T transfer over the host link, I index

Index build of an inverted file (IVF, as in faiss): p passes of k-means and one of assignment over N vectors of d
numbers, b bytes each, and n lists:

    resident    I = (p + 1) 2 N d n / F                  F: FLOP/s of the distances, a GEMM of vectors and centroids
    streamed    T = (p + 1) N d b / B                    B: bytes/s of the host link; every pass reads all vectors again

    alternating over resident    (I + T) / I = 1 + b F / (2 n B)

The ratio depends neither on N nor on d. Vectors that cross the link once, after the encoder, are T = N d b / B.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

DISTANCE_BYTES = 4
"""Bytes of a number of a vector: encoders give fp32."""


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """Shape of a BERT encoder."""

    num_layers: int
    hidden: int
    num_heads: int
    ffn: int
    vocabulary: int
    max_positions: int = 512
    num_types: int = 2

    @property
    def num_parameters(self) -> int:
        """Weights and biases, embeddings included, without a pooler."""
        h, f = self.hidden, self.ffn
        block = 4 * (h * h + h) + (h * f + f) + (f * h + h) + 2 * 2 * h
        return self.num_layers * block + (self.vocabulary + self.max_positions + self.num_types) * h + 2 * h

    @property
    def gemm_flops_per_token(self) -> int:
        """FLOP of all GEMMs of one token.

        >>> MINILM_L6.gemm_flops_per_token
        21233664
        """
        return 2 * self.num_layers * (4 * self.hidden**2 + 2 * self.hidden * self.ffn)

    def attention_flops_per_token(self, length: int) -> int:
        """FLOP of attention of one token in a chunk of `length` tokens."""
        return 4 * self.num_layers * self.hidden * length

    def flops(self, *, num_chunks: int, length: int) -> int:
        """FLOP of `num_chunks` chunks of `length` tokens."""
        return num_chunks * length * (self.gemm_flops_per_token + self.attention_flops_per_token(length))


MINILM_L6 = EncoderShape(num_layers=6, hidden=384, num_heads=12, ffn=1536, vocabulary=30_522)
"""sentence-transformers/all-MiniLM-L6-v2 (its config.json)."""


@dataclass(frozen=True, kw_only=True)
class IngestSystem:
    """Rates of one device that ingests."""

    encode_flops_per_s: float
    distance_flops_per_s: float
    host_bytes_per_s: float  # one direction
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class IngestWork:
    """Chunks to encode and an IVF index to build from their vectors."""

    shape: EncoderShape
    num_chunks: int
    chunk_tokens: int
    num_lists: int
    num_passes: int  # of k-means
    vector_bytes: int = DISTANCE_BYTES

    @property
    def index_bytes(self) -> int:
        """Vectors of the index."""
        return self.num_chunks * self.shape.hidden * self.vector_bytes


@dataclass(frozen=True, kw_only=True)
class IngestSeconds:
    """Seconds of each stage, each running by itself."""

    encode: float
    transfer: float
    index: float

    @property
    def alternating(self) -> float:
        """One stage at a time.

        >>> IngestSeconds(encode=3.0, transfer=1.0, index=2.0).alternating
        6.0
        """
        return self.encode + self.transfer + self.index

    @property
    def overlapped(self) -> float:
        """All stages at the same time: the slowest counts.

        >>> IngestSeconds(encode=3.0, transfer=1.0, index=2.0).overlapped
        3.0
        """
        return max(self.encode, self.transfer, self.index)


def encode_seconds(work: IngestWork, system: IngestSystem) -> float:
    """Seconds of the encoder."""
    return work.shape.flops(num_chunks=work.num_chunks, length=work.chunk_tokens) / system.encode_flops_per_s


def index_seconds(work: IngestWork, system: IngestSystem) -> float:
    """Seconds of the distances of an index build, with vectors in device memory."""
    flops = 2.0 * work.num_chunks * work.shape.hidden * work.num_lists
    return (work.num_passes + 1) * flops / system.distance_flops_per_s


def resident(work: IngestWork, system: IngestSystem) -> IngestSeconds:
    """Stages with encoder and index in device memory: no vector leaves it."""
    return IngestSeconds(encode=encode_seconds(work, system), transfer=0.0, index=index_seconds(work, system))


def streamed(work: IngestWork, system: IngestSystem) -> IngestSeconds:
    """Stages with the vectors in host memory: each pass of the index build reads them over the link."""
    crossings = work.num_passes + 2  # out of the encoder once, then into each pass and the assignment
    return IngestSeconds(
        encode=encode_seconds(work, system),
        transfer=crossings * work.index_bytes / system.host_bytes_per_s,
        index=index_seconds(work, system),
    )


def usual_lists(num_vectors: int, *, factor: int = 4) -> int:
    """Lists of an IVF index: `factor` x sqrt(N). faiss's own guideline is 4 to 16.

    >>> usual_lists(1_000_000)
    4000
    """
    return max(1, round(factor * sqrt(num_vectors)))
