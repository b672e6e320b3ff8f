"""Tensors that our Triton kernels read and write in device memory: one home of these counts. Imports no PyTorch.

`inspection` states the bytes of a launch from them, tests count the loads and stores of Triton's interpreter against
them, and the cost model makes time of them (`cost.elementwise`, `cost.loss`).

    N tokens, D hidden, V vocabulary of a rank, C tokens of a chunk of the loss, e bytes of an element
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.arrays import Array


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Tensors of one size that an operation reads and writes, each counted once, in either pass."""

    forward: int
    backward: int


RMS_NORM = Passes(forward=2, backward=3)
"""x, y; then d y, x, d x."""

ADD_RMS_NORM = Passes(forward=4, backward=4)
"""x, r, their sum s, y; then d y, d s, s, and one gradient for both summands."""

GATED_ACTIVATION = Passes(forward=3, backward=5)
"""gate, up, result; then its gradient, gate, up and their gradients."""

ROTARY = Passes(forward=2, backward=2)
"""Queries and keys before and after, and their gradients."""

ADDITION = Passes(forward=3, backward=0)
"""Sum of two tensors, by PyTorch. Both have the gradient of the sum."""

USED_TWICE = Passes(forward=0, backward=3)
"""A tensor that two operations read has two gradients, which PyTorch adds."""

LOSS_OF_LOGITS = 2
"""Passes over the logits, which their gradient overwrites. A row is read twice, the second time from the cache."""

LOSS_OF_SHARDED_LOGITS = 3
"""Passes over the logits if ranks reduce the statistics of rows between two kernels."""

HIDDEN_GRADIENT_COPY = 2
"""Passes over d h, whose chunks are copied to their place."""

CHUNK_LOGITS = 2**26
"""Logits in memory at once, as numbers: 128 MiB in bf16. PyTorch's gradient of them takes 256 MiB in fp32 more."""


CHUNK_UNIT = 128
"""Tokens: rows of a tile of a GEMM, which 523 rows would fill 4.09 times."""


def chunk_rows(num_tokens: Array, *, vocab: Array, chunk_logits: Array = CHUNK_LOGITS) -> Array:
    """C of the linear cross-entropy: all tokens where they have no more logits, else whole tiles.

    >>> [int(chunk_rows(num_tokens, vocab=128256)) for num_tokens in (523, 524, 8192)]
    [523, 512, 512]
    """
    most = chunk_logits // np.maximum(vocab, 1)
    tiles = np.where(most < CHUNK_UNIT, most, most // CHUNK_UNIT * CHUNK_UNIT)
    return np.maximum(1, np.where(num_tokens <= most, num_tokens, tiles))


AUTOMATIC = 0
"""In place of a number of logits: `automatic_chunk`."""


def automatic_chunk(num_tokens: Array, *, vocab: Array, hidden: Array, element_bytes: Array) -> Array:
    """Logits in memory at once where d W is wanted and kernels need no copies of them.

    All, where they take no more than a chunk and the fp32 sum of d W, which a single chunk does not need. Less memory
    and no sum to move: 8,192 tokens of Llama 3.1 8B are one chunk.

    >>> int(automatic_chunk(8192, vocab=128256, hidden=4096, element_bytes=2)) == 8192 * 128256
    True
    >>> int(automatic_chunk(16384, vocab=128256, hidden=4096, element_bytes=2)) == CHUNK_LOGITS
    True
    """
    logits = num_tokens * vocab
    usual = vocab * chunk_rows(num_tokens, vocab=vocab, chunk_logits=CHUNK_LOGITS)
    is_less = element_bytes * logits <= element_bytes * usual + 4 * vocab * hidden
    return np.where(is_less, np.maximum(logits, CHUNK_LOGITS), CHUNK_LOGITS)


def loss_rows(
    num_tokens: Array, *, said: Array, vocab: Array, hidden: Array, element_bytes: Array, sums: Array
) -> Array:
    """Tokens of a chunk of the loss. `said`: as a plan says it; 0: all, below 0: automatic. `sums`: d W is wanted.

    >>> [int(loss_rows(8192, said=said, vocab=128256, hidden=2048, element_bytes=2, sums=1)) for said in (-1, 0, 1024)]
    [512, 8192, 1024]
    """
    chunk = automatic_chunk(num_tokens, vocab=vocab, hidden=hidden, element_bytes=element_bytes)
    automatic = chunk_rows(num_tokens, vocab=vocab, chunk_logits=np.where(np.asarray(sums) > 0, chunk, CHUNK_LOGITS))
    asked = np.where(np.equal(said, 0), num_tokens, np.minimum(said, num_tokens))
    return np.where(np.asarray(said) < 0, automatic, asked)


def num_chunks(num_tokens: Array, *, rows: Array) -> Array:
    """Chunks of at most `rows` tokens.

    >>> int(num_chunks(8192, rows=512))
    16
    """
    return np.ceil(num_tokens / rows)


def weight_sum_bytes(chunks: Array, *, element_bytes: Array) -> Array:
    """Bytes per value of W that summing d W over chunks moves, besides the write of each chunk's part by its GEMM.

    Each chunk's part is read, and the fp32 sum read and written; the sum is cleared before and rounded at the
    end. A single chunk has no sum.

    >>> float(weight_sum_bytes(16, element_bytes=2))
    170.0
    """
    once = 4 + (4 + element_bytes)
    return np.where(chunks > 1, chunks * (element_bytes + 8) + once, 0.0)


LOOKED_UP_AT_ONCE = 2**24
"""Weights in 4 bits whose values the native engine looks up at once."""

LOOKED_UP_BYTES = 6
"""Bytes that such a weight takes meanwhile: half of an index in 32 bits, and its value in fp32."""


def dequantised_bytes(quantised_bytes: Array, *, element_bytes: Array, in_parts: Array = 0) -> Array:
    """Bytes per weight that making it whole moves: its code and share of scales read, the weight written.

    `in_parts`: 1 where PyTorch looks up weights of 4 bits, which writes and reads what `LOOKED_UP_BYTES` counts too.

    >>> [float(dequantised_bytes(0.5625, element_bytes=2, in_parts=parts)) for parts in (0, 1)]
    [2.5625, 14.5625]
    """
    looked_up = np.where(np.less(quantised_bytes, 1), 2 * LOOKED_UP_BYTES * np.asarray(in_parts), 0)
    return quantised_bytes + element_bytes + looked_up


CAST_BLOCK = 128
"""Values that share a scale in fp32, in each orientation of a cast."""


def cast_bytes(*, num_read: int, num_cast: Array, amax: Array = 0) -> Array:
    """Bytes per value of a kernel that reads 16-bit tensors and writes 8-bit results in both orientations.

    `amax`: 1 if a pass over the inputs finds the scales before. `num_read` and `num_cast` are 2 and 1 for the
    cast of a gated activation, 3 and 2 for the gradients of gate and up.

    >>> cast_bytes(num_read=2, num_cast=1)
    6.0625
    """
    return 2 * num_read * (1 + amax) + num_cast * (2 + 2 * 4 / CAST_BLOCK)
