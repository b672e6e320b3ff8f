"""Bytes that one layer keeps between its forward and its backward pass, per micro-batch.

Per token of the rank, with tensor width t, r = t under sequence parallelism (else 1), and b bytes per element of a
linear layer's saved input (2, less under fp8 recipes):

    residual   (4 h + 2 b h) / r               inputs of both norms, their outputs (inputs of the linear layers)
    attention  (2 n_q d + 2 n_kv (d + d_v) + 2 n_q d_v + 4 n_q) / t      q, k, v, output, log-sum-exp
    dense FFN  (2 (m - 1) + b) f / t           m matrices: gate and up (or one) before, their product after
    MoE FFN    k (b h z + (2 (m - 1) + b) f_e) / t + shared experts + 8 E / r       z: expert tensor width
    latent     2 (2 r_q + 2 r_kv + d_r)        MLA: compressed tensors and their norms, on every tensor rank
    dropout    2 h / r                         one byte per element and mask
    unfused    p n_q s / t                     s x s probabilities: 2 bytes each, 5 with their mask and masked copy

With dropout, unfused attention and m = 2, f = 4 h this is 34 h + 5 n_q s bytes: Korthikanti et al. 2022,
arXiv 2205.05198, section 4.1. DeepSeek-V2 (arXiv 2405.04434, section 2.1) for MLA's tensors.

A layer that recomputes holds all of this once more while its backward pass runs: the `live` bytes are what the
kept ones lack. Frozen linear layers without adapters need no gradient of their weights and keep no input.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.memory.constants import MemoryConstants
from meshwright.cost.tables import RECOMPUTES, Array, BatchTable, ModelTable, PlanTable, PrecisionTable
from meshwright.specs.plan import Recompute

FULL = RECOMPUTES.index(Recompute.FULL)
SELECTIVE = RECOMPUTES.index(Recompute.SELECTIVE)


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Per layer and micro-batch on one rank: kept by a dense and by an MoE layer, and live in addition."""

    dense: Array
    moe: Array
    live_dense: Array
    live_moe: Array


@dataclass(frozen=True, kw_only=True)
class _Modules:
    """Bytes per token of one layer by the module whose recomputation drops them; `rest` always stays."""

    rest: Array
    norm: Array
    core_attention: Array
    mla_up_projection: Array
    activation: Array  # dense FFN: the product alone
    mlp: Array  # dense FFN without the product
    moe_activation: Array
    moe: Array
    moe_rest: Array
    shared_experts: Array


def layer_bytes(
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    constants: MemoryConstants,
    tokens: Array,
) -> LayerBytes:
    """What a layer of each kind keeps for `tokens` tokens of a micro-batch, after recomputation."""
    share = 1 / plan.tensor
    stream = np.where(plan.sequence_parallel > 0, share, 1.0)
    modules = _modules(model, batch, plan, precision, constants, share, stream)
    inputs = 2 * model.hidden * stream
    # Layers with full recomputation, of those on the rank.
    covered = np.where(
        plan.recompute == FULL,
        np.where(
            plan.recompute_layers < 0,
            1.0,
            np.minimum(plan.recompute_layers * plan.pipeline / model.num_layers, 1.0),
        ),
        0.0,
    )
    picked = plan.recompute == SELECTIVE
    alternate = picked & (plan.recomputes("alternate_matmuls") > 0)

    def after(everything: Array, dropped: Array, saved: Array) -> tuple[Array, Array]:
        selective = np.where(alternate, np.minimum(saved, everything), everything - picked * dropped)
        kept = selective + covered * (inputs - selective)
        live = everything - np.where(covered > 0, inputs, selective)
        return kept * tokens, live * tokens

    common = modules.norm + modules.core_attention + modules.mla_up_projection
    common_dropped = (
        plan.recomputes("norm") * modules.norm
        + plan.recomputes("core_attention") * modules.core_attention
        + plan.recomputes("mla_up_projection") * modules.mla_up_projection
    )
    saved = _saved_matmuls(model, share, inputs)
    dense, live_dense = after(
        modules.rest + common + modules.activation + modules.mlp,
        common_dropped
        + np.maximum(plan.recomputes("activation"), plan.recomputes("mlp")) * modules.activation
        + plan.recomputes("mlp") * modules.mlp,
        saved + 2 * (model.ffn * share + model.hidden),
    )
    if not np.any(model.num_moe_layers):
        return LayerBytes(dense=dense, moe=0.0, live_dense=live_dense, live_moe=0.0)
    moe, live_moe = after(
        modules.rest
        + common
        + modules.moe_activation
        + modules.moe
        + modules.moe_rest
        + modules.shared_experts,
        common_dropped
        + np.maximum(plan.recomputes("activation"), plan.recomputes("moe")) * modules.moe_activation
        + plan.recomputes("moe") * modules.moe
        + plan.recomputes("shared_experts") * modules.shared_experts,
        saved + modules.moe_rest + model.top_k * 4 * model.hidden * share,
    )
    return LayerBytes(dense=dense, moe=moe, live_dense=live_dense, live_moe=live_moe)


def _modules(
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    constants: MemoryConstants,
    share: Array,
    stream: Array,
) -> _Modules:
    """Everything that one layer would keep, per token. `share` is 1/t, `stream` the share of the residual stream."""
    h, nq, nkv, d, dv = model.hidden, model.num_heads, model.num_kv_heads, model.qk_dim, model.v_dim
    b = precision.linear_input_bytes
    ffn_input = _ffn_keeps_inputs(model) * b
    before = 2 * (model.ffn_matrices - 1)  # bytes per element of f before the activation function
    is_mla, masks = model.is_mla > 0, constants.keeps_dropout_masks

    up_projected = np.where(is_mla, 2 * (nq - nkv) * (d + dv), 0) * share
    latent = np.where(is_mla, 2 * (2 * model.q_rank + 2 * model.kv_rank + model.rope_dim), 0)
    attention = (2 * nq * d + 2 * nkv * (d + dv) + 2 * nq * dv + 4 * nq) * share
    probabilities = constants.unfused_attention * constants.probability_bytes * nq * batch.seq_len * share
    expert_share = share * plan.expert_tensor
    gathered = np.where(constants.keeps_gathered_inputs > 0, 1.0, stream)
    return _Modules(
        rest=(4 + 2 * masks) * h * stream + attention + latent,
        norm=((b + ffn_input) * gathered + 2 * constants.norm_copy_bytes * stream) * h,
        core_attention=probabilities,
        mla_up_projection=up_projected,
        activation=ffn_input * model.ffn * share,
        mlp=(before + 2 * constants.ffn_copies) * model.ffn * share,
        moe_activation=ffn_input * (model.top_k * model.expert_ffn + model.shared_ffn) * share,
        # Tokens enter the experts split over tensor ranks; with z-way experts each rank works on z of those parts.
        moe=model.top_k * (ffn_input * h * expert_share + before * model.expert_ffn * share),
        moe_rest=8 * model.num_experts * stream,
        shared_experts=before * model.shared_ffn * share,
    )


def _ffn_keeps_inputs(model: ModelTable) -> Array:
    """0 where the feed-forward matrices are frozen and have no adapters, else 1."""
    q, kv = model.num_heads * model.qk_dim, model.num_kv_heads * (model.qk_dim + model.v_dim)
    attention_width = 4 * model.hidden + q + kv + model.num_heads * model.v_dim
    return np.where((model.lora_rank > 0) & (model.lora_width <= attention_width), 0, 1)


def _saved_matmuls(model: ModelTable, share: Array, inputs: Array) -> Array:
    """Per token, what selective recomputation of every second matrix product saves outside the feed-forward.

    Of query, key, value and output projection the first and third are saved, and the attention itself.
    """
    nq, nkv, dv = model.num_heads, model.num_kv_heads, model.v_dim
    return inputs + (2 * nq * model.qk_dim + 2 * nkv * dv + 2 * nq * dv + 4 * nq) * share
