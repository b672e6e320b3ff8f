"""FLOPs of DeepSeek-V4 as Primus prints them.

Its closed form counts every GEMM of attention and experts for each of the K residual streams of a token, and attention
over a sequence of K s positions, although a layer mixes the streams into one before either block: about four
times the computed FLOPs (AMD-AGI/Primus, patches/deepseek_v4_flops_patches.py). Multiply-adds per layer, with
T = K s:

    projections    T (h r_q + r_q n_q d + h d + n_q d r_o + g r_o h)
    scores         2 n_q d pairs           of windows w T - w (w - 1) / 2; + min(k, T / m) T or compressed ones before
    compressed     4 h d T, 2 h d T        layers with and without an indexer
    indexer        T (h d_i + d_i n_i d_i + h n_i + 4 h d_i) + T n_i d_i T / m
    experts        T (h E + k g h f_e + g h f_s)           it leaves h E of hashed layers out, 0.02 % of all
    streams        2 s K h (2 + K) K

Each counts 6 times, and so do both heads and the projection of a prediction module.
"""

from __future__ import annotations

from meshwright.cost.tables import ModelTable


def primus_flops_per_token(model: ModelTable, *, seq_len: int) -> float:
    """FLOPs of one token, forward and backward, in Primus's count."""
    m, length = model, float(model.streams) * seq_len
    num_layers, modules = float(m.num_layers), float(m.num_mtp_layers)
    selected, pooled = float(m.selected_share) * num_layers, float(m.pooled_share) * num_layers
    width = m.num_heads * m.qk_dim
    every = m.hidden * m.q_rank + m.q_rank * width + m.hidden * m.qk_dim
    every = length * (every + width * m.output_rank + m.output_groups * m.output_rank * m.hidden)
    every = every + 2 * width * _window_pairs(float(m.window), length) + _experts(m) * length
    every = every + m.hidden * m.num_experts * length
    every = every + 2 * seq_len * m.streams * m.hidden * (2 + m.streams) * m.streams
    stride = float(m.index_stride)
    keys = min(float(m.top_keys), length // stride)
    with_indexer = 2 * width * keys * length + 4 * m.hidden * m.qk_dim * length + _indexer(m, length)
    compressed = 2 * width * _compressed_pairs(float(m.pooled_stride), length) + 2 * m.hidden * m.qk_dim * length
    total = (num_layers + modules) * every
    total = total + selected * with_indexer + pooled * compressed
    heads = (1 + modules) * seq_len * (m.streams**2 * m.hidden + m.hidden * m.vocab)
    return float(6 * (total + heads + modules * seq_len * 2 * m.hidden**2) / seq_len)


def _experts(m: ModelTable) -> float:
    return float(m.ffn_matrices * m.hidden * (m.top_k * m.expert_ffn + m.shared_ffn))


def _indexer(m: ModelTable, length: float) -> float:
    di, heads = m.index_dim, m.index_heads
    projections = m.hidden * di + di * heads * di + m.hidden * heads + 4 * m.hidden * di
    return float(length * (projections + heads * di * (length // m.index_stride)))


def _window_pairs(window: float, length: float) -> float:
    return window * length - window * (window - 1) / 2 if 0 < window < length else length * (length + 1) / 2


def _compressed_pairs(stride: float, length: float) -> float:
    keys = length // stride
    return stride * keys * (keys - 1) / 2 + keys * (length - stride * keys + 1)
