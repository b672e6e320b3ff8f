"""Indexers, selected and compressed keys, hyper-connections: counts of one layer, as a mean over all layers.

Symbols as in `cost.flops`; n_i and d_i heads and head dimension of the indexer, k keys that it selects, m tokens of a
key that it scores (1: every token), m' tokens of a compressed key without an indexer, r_q, r_o ranks of query and
output, g groups of the output projection, K residual streams. Per token:

    indexer      r_q n_i d_i + h n_i + h d_i                parameters of DeepSeek Sparse Attention (DSA)
                 r_q n_i d_i + h n_i + 4 h d_i              of DeepSeek-V4: compressed keys have values and gates
    scores       2 n_i d_i s / (2 m)                        forward FLOPs; all earlier keys
    selected     mean over positions t of min(k, t / m)     keys that the query attends to
    compressed   4 h d, 2 h d                               parameters of a layer with and without an indexer
    shared       h r_q + r_q n_q d + h d + n_q d r_o + g r_o h      parameters of DeepSeek-V4's projections
    streams      2 (2 + K) K^2 h                            parameters of both hyper-connections of a layer

An indexer that is trained learns from the attention to the selected keys alone (the sparse stage of DeepSeek-V3.2-Exp,
section 1): its backward pass has two GEMMs over those, its target one more score of each of the model's heads. Its
inputs are detached. The dense warm-up before it, 0.2 % of the tokens, is not costed.

DSA attends in latent space, where a token's latent serves all heads: n_q (2 r_kv + d_r) instead of n_q (d + d_v) per
key. Short sequences run masked dense attention over all keys instead, which is then less work (the same report,
section 2). DeepSeek-V4 has no other form than the first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.passes import NO_PASSES, PassTimes
from meshwright.cost.tables import ModelTable, PlanTable

GATHERED_FORWARD = 0.95
"""Rate of attention to gathered keys over that to consecutive ones: layers with an indexer against those without, of
DeepSeek-V4 Flash and Pro on MI355X (AMD-AGI/Primus, examples/deepseek-v4/benchmark, fastest backend, rates over
k / (k + 250)). FlashMLA's README: 640 TFLOP/s gathered against 660 of its dense kernel on H800."""

GATHERED_BACKWARD = 0.7
"""Rate of the backward pass, which scatters gradients of gathered keys: 0.62 and 0.76 in the same table."""

SELECTION_PASSES = 3
"""Times that scores in 32 bits are written or read until the best k are known: written once, read by a histogram and by
the selection (radix select). Assumed."""

SCORE_BYTES = 4.0

NORMED_STREAM_BYTES = 4.0
"""Bytes of an element of the normed streams, which the GEMM of their weights keeps (Primus, hyper_connection.py)."""

INDEX_BYTES = 4.0
"""Bytes of a selected key's position, which the backward pass needs again."""

STREAM_KERNELS = 16
"""More kernels of a layer's forward pass with hyper-connections: norm, GEMM, scales, Sinkhorn, three casts, collapse
and expansion around both blocks, in place of two additions (Primus, core/transformer/hyper_connection.py)."""

SHARED_KERNELS = 8
"""Kernels of DeepSeek-V4's attention: norms of latents and heads, rotations of queries, keys and outputs,
copies of layouts."""

COMPRESSOR_KERNELS = 10
"""Kernels of compressed keys: two GEMMs, overlap, bias, softmax, sum, norm, rotation, casts
(core/transformer/compressor)."""

INDEXER_KERNELS = 16
"""Kernels of an indexer beside its keys: GEMMs, rotation, scores, weights, mask, top-k, and lists of keys
with the window's."""

LinearPasses = Callable[[Array, Array], PassTimes]
"""(outputs, inputs) of a linear layer -> its passes for the tokens of a micro-batch."""


def has_sparse_attention(model: ModelTable) -> bool:
    """True if any model of the table has an indexer or compressed keys."""
    return bool(np.any(model.index_heads) or np.any(model.is_shared))


# --- parameters ---


def shared_attention_parameters(model: ModelTable) -> Array:
    """Matrices of DeepSeek-V4's attention without compression: query, key-value and output in groups."""
    h, width = model.hidden, model.num_heads * model.qk_dim
    query = h * model.q_rank + model.q_rank * width
    output = width * model.output_rank + model.output_groups * model.output_rank * h
    return query + h * model.qk_dim + output


def compressor_parameters(model: ModelTable) -> Array:
    """Matrices of values and gates of the compressed keys."""
    each = 2 * model.hidden * model.qk_dim
    return model.is_shared * (2 * model.selected_share + model.pooled_share) * each


def indexer_parameters(model: ModelTable) -> Array:
    """Matrices of the indexer: queries, weights of its heads, and keys."""
    h, di = model.hidden, model.index_dim
    keys = np.where(model.is_shared > 0, 4 * h * di, h * di)
    return model.index_share * (model.q_rank * model.index_heads * di + h * model.index_heads + keys)


def sparse_norm_parameters(model: ModelTable) -> Array:
    """Norms and position biases of attention, compressed keys and indexer, which every tensor rank has."""
    d, di = model.qk_dim, model.index_dim
    attention = model.is_shared * (model.q_rank + d)
    selected = model.selected_share * (2 * model.index_stride + 1) * d
    pooled = model.pooled_share * (model.pooled_stride + 1) * d
    index = np.where(model.is_shared > 0, (2 * model.index_stride + 1) * di, 2 * di)
    return attention + model.is_shared * (selected + pooled) + model.index_share * index


def stream_parameters(model: ModelTable) -> Array:
    """Both hyper-connections of a layer: weights, biases and scales."""
    mixes = (2 + model.streams) * model.streams
    return 2 * (mixes * model.streams * model.hidden + mixes + 3) * (model.streams > 1)


def stream_head_parameters(model: ModelTable) -> Array:
    """The mixing of all streams into one before the final norm."""
    return (model.streams**2 * model.hidden + model.streams + 1) * (model.streams > 1)


# --- keys and FLOPs ---


def selected_keys(model: ModelTable, seq_len: Array) -> Array:
    """Mean keys that an indexer selects for a query of a causal sequence."""
    span = np.minimum(model.top_keys * model.index_stride, seq_len)
    return (span - span * span / np.maximum(2.0 * seq_len, 1.0)) / np.maximum(model.index_stride, 1)


def pooled_keys(model: ModelTable, seq_len: Array) -> Array:
    """Mean compressed keys before a query in layers that attend to all of them."""
    return seq_len / (2.0 * np.maximum(model.pooled_stride, 1))


def scored_keys(model: ModelTable, seq_len: Array) -> Array:
    """Mean keys that an indexer scores for a query."""
    return seq_len / (2.0 * np.maximum(model.index_stride, 1))


def added_keys(model: ModelTable, seq_len: Array) -> Array:
    """Selected and compressed keys of a query, mean over layers; in DSA they stand in place of all keys."""
    selected = model.selected_share * selected_keys(model, seq_len)
    return selected + model.pooled_share * pooled_keys(model, seq_len)


def index_score_flops(model: ModelTable, keys: Array) -> Array:
    """Forward FLOPs of the scores of `keys` keys, per token, mean over layers."""
    return 2.0 * model.index_share * model.index_heads * model.index_dim * keys


def latent_width(model: ModelTable) -> Array:
    """Widths of key and value of one head in latent space."""
    return 2 * model.kv_rank + model.rope_dim


def gathers_keys(model: ModelTable, seq_len: Array) -> Array:
    """1 where attending to the selected keys alone is less work than to all of them."""
    gathered = selected_keys(model, seq_len) * np.where(
        model.is_mla > 0, latent_width(model), model.qk_dim + model.v_dim
    )
    every = seq_len / 2.0 * (model.qk_dim + model.v_dim)
    is_less = (gathered < every) & (model.selected_share > 0)
    return np.where(model.is_shared > 0, 1, is_less * 1)


def gathered_width(model: ModelTable, plan: PlanTable) -> Array:
    """Values of a token that context ranks send each other: keys and values of the tensor rank's heads.

    An indexer has the latent that serves all heads, and its own key; compressed keys have one vector.
    """
    heads = model.kv_heads / plan.tensor * (model.qk_dim + model.v_dim)
    latent = model.kv_rank + model.rope_dim + model.index_dim
    heads = np.where((model.is_mla > 0) & (model.index_heads > 0), latent, heads)
    return np.where(model.is_shared > 0, model.qk_dim, heads)


# --- time ---


def indexer_passes(
    model: ModelTable, tokens: Array, seq_len: Array, *, linear: LinearPasses, flops_per_s: Array,
    attention_flops_per_s: Array, bytes_per_s: Array, kernel_s: Array,
) -> PassTimes:  # fmt: skip
    """Seconds of projections, scores and selection; training adds its target and gradients. Every tensor rank has them.

    flops_per_s: rate of scores, in the format of the recipe's GEMMs. attention_flops_per_s: rate of the
    model's own scores.
    """
    if not np.any(model.index_heads):
        return NO_PASSES
    seconds, share = 1 / flops_per_s, model.index_share
    scored, selected = scored_keys(model, seq_len), selected_keys(model, seq_len)
    projections = linear(model.index_heads * model.index_dim, model.q_rank)
    keys = np.where(model.is_shared > 0, 4, 1) * model.index_dim
    projections = (projections + linear(model.index_heads + keys, model.hidden)).times(share)
    moved = SELECTION_PASSES * SCORE_BYTES * share * scored / bytes_per_s
    forward = tokens * (index_score_flops(model, scored) * seconds + moved) + 2 * share * kernel_s
    width = np.where(model.is_mla > 0, model.kv_rank + model.rope_dim, model.qk_dim)
    target = 2.0 * share * model.num_heads * width * selected / attention_flops_per_s
    backward = tokens * (target + 2 * index_score_flops(model, selected) * seconds) + 2 * share * kernel_s
    learns = model.index_trained
    return PassTimes(
        forward_s=projections.forward_s + forward,
        input_s=learns * backward,  # its inputs are detached
        weight_s=learns * projections.weight_s,
    )


def added_kernels(model: ModelTable) -> Array:
    """Kernels of a layer's forward pass, GEMMs apart, that one with plain attention and residuals does not have."""
    compressors = model.is_shared * (model.selected_share + model.pooled_share + model.index_share)
    streams = STREAM_KERNELS * (model.streams > 1)
    attention = SHARED_KERNELS * model.is_shared + INDEXER_KERNELS * model.index_share
    return streams + attention + COMPRESSOR_KERNELS * compressors


# --- memory ---


def sparse_bytes_per_token(model: ModelTable, seq_len: Array, element_bytes: Array, share: Array) -> Array:
    """Bytes that gathering attention keeps beyond queries, keys, values and outputs. `share`: 1 / tensor width.

    DSA: queries and outputs in latent space, in place of the heads' keys and values. DeepSeek-V4: the norm of queries
    and the rotation of outputs each keep a second copy; latents, values and gates are on every tensor rank.
    """
    heads = model.num_heads * share
    latent = heads * (2 * model.kv_rank - model.qk_dim - model.v_dim) * gathers_keys(model, seq_len)
    width = 2 * (2 * model.selected_share + model.pooled_share) * model.qk_dim
    compressed = heads * (model.qk_dim + model.v_dim) + width + 2 * model.q_rank + 2 * model.qk_dim
    compressed = compressed + model.output_groups * model.output_rank * share
    return element_bytes * np.where(model.is_shared > 0, compressed, latent)


def indexer_bytes_per_token(model: ModelTable, seq_len: Array, element_bytes: Array) -> Array:
    """Bytes of positions of selected keys, and of what an indexer learns with; on every tensor rank."""
    chosen = model.selected_share * np.minimum(model.top_keys, seq_len / np.maximum(model.index_stride, 1))
    own = (model.index_heads + 1) * (model.index_dim + 1)
    return INDEX_BYTES * chosen + model.index_trained * model.index_share * own * element_bytes


def stream_bytes_per_token(model: ModelTable, element_bytes: Array) -> Array:
    """Bytes of the residual streams before each of a layer's two blocks, in 32 bits too, and of the blocks' outputs."""
    wide = (element_bytes + NORMED_STREAM_BYTES) * model.streams + element_bytes
    return 2 * wide * model.hidden * (model.streams > 1)
