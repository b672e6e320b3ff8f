"""Parameters and model FLOPs.

    N_gqa  = h d n_q + h n_kv (d + d_v) + n_q d_v h
    N_mla  = h r_q + r_q n_q d + h (r_kv + d_r) + r_kv n_q (d - d_r + d_v) + n_q d_v h
    N_ffn  = g h f                         g = 3 matrices when gated, 2 when not
    N_moe  = E g h f_e + g h f_s + h E     of which a token uses k of E experts; experts of a latent mixture are
                                           g z f_e, of the latent's width z, and it has 2 h z more
    core(s)= 2 s̄ n_q (d + d_v)             forward FLOPs of the scores and of weighing V, per token
    F      = 6 N_active + 3 Σ_layers core  forward and backward, no recomputation

s̄ is the mean number of keys a query sees: s/2 when causal, s when not, at most the window in windowed layers.
Indexers, selected and compressed keys and hyper-connections: `cost.sparse_attention`, whose scores count three times.
The output head counts once, the input embedding (a look-up) does not. Each multi-token prediction module adds one
layer, its 2h x h projection and one more head. Frozen matrices have no weight gradient: LoRA takes 4 N + 6
N_lora. One multiply-add is 2 FLOP. Source: Kaplan et al. 2020 (section 2.1) for 6N; Megatron-Core's FLOP
counter for the attention, MoE and MTP terms. Every symbol is per token; multiply by tokens for a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from meshwright.arrays import Array
from meshwright.cost import linear_attention
from meshwright.cost.sparse_attention import (
    added_keys,
    compressor_parameters,
    index_score_flops,
    indexer_parameters,
    scored_keys,
    shared_attention_parameters,
    sparse_norm_parameters,
    stream_head_parameters,
    stream_parameters,
)
from meshwright.cost.tables import ModelTable, prediction_module


class AttentionCount(StrEnum):
    """Convention by which attention FLOPs are counted; stated with every MFU."""

    CAUSAL = "causal"  # half of the score matrix: what must be computed
    FULL = "full"  # the whole matrix: PaLM appendix B, Megatron-LM before 2025, torchtitan


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters. `layer` terms are of one layer, without norms."""

    attention_layer: Array
    dense_ffn_layer: Array
    expert: Array  # one routed expert
    experts_layer: Array  # all routed experts of one layer
    shared_layer: Array  # shared experts of one layer, and in hybrids its dense feed-forward blocks
    router_layer: Array  # with the gate of shared experts and the projections of a latent mixture
    norm_layer: Array  # norms and, where there are any, projection biases and sinks
    embedding: Array  # input table and learned positions
    head: Array  # output matrix; 0 when tied
    mtp_projection: Array  # of one module
    lora_layer: Array
    total: Array
    active: Array  # used by one token; embedding look-ups excluded, the head included


def attention_parameters(model: ModelTable) -> Array:
    """Parameters of one attention block, without indexers and compressed keys."""
    h, nq, d, dv = model.hidden, model.query_heads, model.qk_dim, model.v_dim
    grouped = h * d * nq * (1 + model.output_gate) + h * model.projected_kv_heads * (d + dv)
    query = np.where(model.q_rank > 0, h * model.q_rank + model.q_rank * nq * d, h * nq * d)
    latent = h * (model.kv_rank + model.rope_dim) + model.kv_rank * nq * (d - model.rope_dim + dv)
    whole = np.where(model.is_mla, query + latent, grouped) + nq * dv * h
    return np.where(model.is_shared, shared_attention_parameters(model), whole)


def _feed_forward(model: ModelTable, width: Array, bias: Array, *, hidden: Array) -> Array:
    """Parameters of one feed-forward block of this width."""
    return model.ffn_matrices * hidden * width + bias * ((model.ffn_matrices - 1) * width + hidden)


def state_space_matrices(model: ModelTable) -> Array:
    """Parameters of the two projections of a state-space block: gate, heads' inputs, groups, steps; and the output."""
    inputs = model.state_inner + model.state_convolved + model.state_heads
    return model.hidden * (inputs + model.state_inner)


def state_space_rest(model: ModelTable) -> Array:
    """Its other parameters: convolution with bias, norm of the output, A, D and the bias of the steps per head."""
    biases = model.state_inner + model.state_convolved + model.state_heads + model.hidden
    return (
        model.state_convolved * (model.state_kernel + 1)
        + model.state_inner
        + 3 * model.state_heads
        + model.state_bias * biases
    )


def state_space_scan_flops_per_token(model: ModelTable) -> Array:
    """Forward FLOPs of one block's scan per token: 7 d N, Megatron-Core's count (`mamba_layer_flops`)."""
    return 7.0 * model.state_inner * model.state_size


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Parameters of one layer, the mean layer of a hybrid; `chosen`: parameters of the experts that a token uses."""

    attention: Array
    dense: Array
    expert: Array
    experts: Array
    chosen: Array
    shared: Array
    router: Array
    norm: Array

    def total(self, is_moe: Array) -> Array:
        """All parameters of a layer with or without a mixture."""
        return self.attention + self.norm + self.feed_forward(is_moe, self.experts)

    def feed_forward(self, is_moe: Array, experts: Array) -> Array:
        """The feed-forward block, of a mixture with `experts` parameters of routed experts."""
        return is_moe * (experts + self.shared + self.router) + (1 - is_moe) * self.dense


def _layer(model: ModelTable) -> _Layer:
    h = model.hidden
    every = attention_parameters(model) + compressor_parameters(model) + indexer_parameters(model)
    attention = model.attention_share * every
    attention = attention + model.state_space_share * state_space_matrices(model)
    attention = attention + model.linear_share * linear_attention.matrices(model)
    dense = _feed_forward(model, model.ffn, model.ffn_bias, hidden=h) * model.ffn_share
    expert = _feed_forward(model, model.expert_ffn, model.expert_bias, hidden=model.expert_hidden)
    router = (h + model.expert_bias) * model.num_experts + model.shared_gate * h + 2 * h * model.latent
    router = router + model.expert_norms * (h + model.num_experts)
    norm = model.num_norms * h * (1 + model.norm_bias) + model.num_sinks
    norm = norm + model.head_norm_width * (1 + model.norm_bias)
    norm = norm + model.attention_bias * (
        model.query_heads * model.qk_dim * (1 + model.output_gate)
        + model.projected_kv_heads * (model.qk_dim + model.v_dim)
    )
    norm = norm + model.output_bias * h + model.is_mla * (model.q_rank + model.kv_rank)
    norm = norm + sparse_norm_parameters(model) + stream_parameters(model)
    every_layer = model.num_norms * h * (1 + model.norm_bias)
    norm = every_layer + model.attention_share * (norm - every_layer)
    norm = norm + model.linear_share * linear_attention.other_parameters(model)
    return _Layer(
        attention=attention,
        dense=dense,
        expert=expert,
        experts=model.moe_share * model.num_experts * expert,
        chosen=model.moe_share * model.top_k * expert,
        shared=model.moe_share * model.ffn_matrices * h * model.shared_ffn + model.single_block * dense,
        router=model.moe_share * router,
        norm=norm + model.state_space_share * state_space_rest(model),
    )


def count_parameters(model: ModelTable) -> Parameters:
    """All parameter counts of `model`; whole numbers, except in a hybrid's mean layer."""
    h, num_dense, num_moe = model.hidden, model.num_dense_layers, model.num_moe_layers
    layer, module_model = _layer(model), prediction_module(model)
    module = layer if module_model is model else _layer(module_model)
    embedding = (model.vocab + model.learned_positions) * h
    head = np.where(model.tied, 0, model.head_rows * h) + model.head_bias * model.vocab
    streams = stream_head_parameters(model)
    projection = 2 * h * h + 3 * h + streams
    is_moe = np.where(model.num_experts > 0, 1, 0)
    body = num_dense * layer.total(0) + num_moe * layer.total(1) + h * (1 + model.norm_bias) + streams
    active = num_dense * layer.dense + num_moe * layer.feed_forward(1, layer.chosen)
    module_active = module.attention + module.feed_forward(is_moe, module.chosen) + 2 * h * h
    return Parameters(
        attention_layer=layer.attention,
        dense_ffn_layer=layer.dense,
        expert=layer.expert,
        experts_layer=layer.experts,
        shared_layer=layer.shared,
        router_layer=layer.router,
        norm_layer=layer.norm,
        embedding=embedding,
        head=head,
        mtp_projection=projection,
        lora_layer=model.lora_rank * model.lora_width + model.dora_outputs,
        total=body + embedding + head + model.num_mtp_modules * (module.total(is_moe) + projection),
        active=model.num_layers * layer.attention
        + active
        + model.head_rows * h
        + model.num_mtp_layers * (module_active + model.vocab * h),
    )


def keys_seen(seq_len: Array, *, window: Array = 0, count: AttentionCount = AttentionCount.CAUSAL) -> Array:
    """Mean number of keys that a query sees, in tokens. A windowed query sees min(position, window) keys."""
    seen = seq_len / 2 if count is AttentionCount.CAUSAL else seq_len * 1.0
    if np.all(np.asarray(window) == 0):
        return seen
    w = np.minimum(np.where(window > 0, window, seq_len), seq_len)
    windowed = w - w * w / (2 * seq_len) if count is AttentionCount.CAUSAL else w
    return np.where(window > 0, windowed, seen)


def attention_core_flops_per_token(
    model: ModelTable, *, seq_len: Array, count: AttentionCount = AttentionCount.CAUSAL
) -> Array:
    """Forward FLOPs of attention scores and values per token, summed over all layers and MTP modules."""
    per_key = 2 * model.num_heads * (model.qk_dim + model.v_dim)
    mtp, module, shared = model.num_mtp_layers, prediction_module(model), model.is_shared
    selecting = 1 - (1 - shared) * model.selected_share  # selected keys are in place of all
    full = model.num_layers * model.attention_share * selecting - model.num_windowed_layers
    full = full + mtp * (1 - shared) * module.attention_share * selecting
    windowed = model.num_windowed_layers + mtp * shared
    keys = full * model.full_head_ratio * keys_seen(seq_len, count=count)
    keys = keys + windowed * keys_seen(seq_len, window=model.window, count=count)
    keys = keys + model.num_layers * added_keys(model, seq_len) + mtp * added_keys(module, seq_len)
    return per_key * keys


def model_flops_per_token(model: ModelTable, *, seq_len: Array, count: AttentionCount = AttentionCount.CAUSAL) -> Array:
    """Forward and backward FLOPs per token without recomputation.

    >>> from meshwright.cost.tables import model_row
    >>> from meshwright.specs.model import Attention, Model
    >>> llama = Model(name="llama3.1-8b", hidden=4096, num_layers=32, vocab=128256, ffn_hidden=14336,
    ...               attention=Attention(num_heads=32, num_kv_heads=8, head_dim=128))
    >>> round(float(model_flops_per_token(model_row(llama), seq_len=8192)) / 1e9, 2)
    51.47
    """
    parameters = count_parameters(model)
    core = attention_core_flops_per_token(model, seq_len=seq_len, count=count)
    scans = model.num_layers * model.state_space_share + model.num_mtp_layers * model.mtp_state_space_blocks
    core = core + scans * state_space_scan_flops_per_token(model)
    scored = [
        num * index_score_flops(m, scored_keys(m, seq_len))
        for num, m in ((model.num_layers, model), (model.num_mtp_layers, prediction_module(model)))
    ]
    core = core + scored[0] + scored[1]
    core = core + model.num_layers * model.linear_share * linear_attention.model_flops_per_token(model)
    lora = model.num_layers * parameters.lora_layer + model.saved_head * model.head_rows * model.hidden / 3
    weight = np.where(model.lora_rank > 0, 4 * parameters.active + 6 * lora, 6 * parameters.active)
    return weight + 3 * core
