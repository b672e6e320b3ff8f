"""Bytes that one layer keeps between its forward and its backward pass, per micro-batch.

Per token of the rank, with tensor width t, r = t under sequence parallelism (else 1), and b bytes per element of a
linear layer's saved input (2, less under fp8 recipes):

    residual   (2 e h + 2 b h) / r             inputs of both norms, their outputs (inputs of the linear layers);
                                               of parallel blocks e h for the one input, b h if one norm serves both
    attention  e (n_q d + n_kv (d + d_v) + n_q d_v) / t + 4 n_q / t      q, k, v, output, log-sum-exp
    dense FFN  (e (m - 1) + b) f / t           m matrices: gate and up (or one) before the activation, its output after
    MoE FFN    k (b h z + (e (m - 1) + b) f_e) / t + shared experts + 8 E / r       z: expert tensor width
               of a latent mixture the latent's width in place of h, and b of it / r more
    latent     e (2 r_q + 2 r_kv + d_r)        MLA: compressed tensors and their norms, on every tensor rank
    selected   e n_q (2 r_kv - d - d_v) / t + 4 k       DSA in latent space: queries and outputs there, positions
    shared     e ((2 n_q d + g r_o) / t + 2 r_q + 2 d + z)  DeepSeek-V4 in place of `latent`: queries and outputs twice,
                                               z: values and gates of compressed keys
    streams    2 (e (K + 1) + 4 K) h / r       K residual streams before each block, in 32 bits too, and its output
    dropout    2 h / r                         one byte per element and mask
    unfused    p n_q s / t                     s x s probabilities: 2 bytes each, 5 with their mask and masked copy
    blockwise  e n_q (s + 64) / 2 t            probabilities of earlier keys in blocks of 64 queries (our CPU route)
    context    e (c - 1) n_kv (d + d_v) / t    keys and values of c - 1 other ranks, where they are gathered

e is 2, in an fp32 run 4. Modules whose activations are stored in 8 bits (`kernels.stored_activations`) keep 1 + 1/32
bytes of each value instead of e or b: the feed-forward its input and all of its own, the norms their inputs.
Adapters of LoRA with dropout keep 3 bytes of each of their inputs, which they drop themselves: the copy and its mask.
DoRA keeps the outputs of the frozen matrix and of the adapter, 4 bytes for both.

Dropout, unfused attention, m = 2 and f = 4 h give 34 h + 5 n_q s bytes: Korthikanti et al. 2022,
arXiv 2205.05198, section 4.1. DeepSeek-V2 (arXiv 2405.04434, section 2.1) for MLA's tensors.

A layer that recomputes holds all of this once more while its backward pass runs: the `live` bytes are all
bytes less the kept ones. Frozen linear layers without adapters need no gradient of their weights and keep no
input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshwright.arrays import Array
from meshwright.calibration.memory import MemoryConstants
from meshwright.cost import linear_attention
from meshwright.cost.routing import busiest_rank_ratio
from meshwright.cost.sparse_attention import (
    has_sparse_attention,
    indexer_bytes_per_token,
    sparse_bytes_per_token,
    stream_bytes_per_token,
)
from meshwright.cost.state_space import kept_bytes_per_token
from meshwright.cost.tables import RECOMPUTES, BatchTable, ModelTable, PlanTable, PrecisionTable, prediction_module
from meshwright.specs.plan import Recompute

BLOCK_QUERIES = 64
"""Queries of a block of our attention on CPUs (`kernels.attention.blockwise`)."""

FULL = RECOMPUTES.index(Recompute.FULL)
SELECTIVE = RECOMPUTES.index(Recompute.SELECTIVE)


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Per layer and micro-batch on one rank: kept by a dense and by an MoE layer, and live in addition."""

    dense: Array
    moe: Array
    live_dense: Array
    live_moe: Array
    module: Array  # kept by a prediction module


@dataclass(frozen=True, kw_only=True)
class _Modules:
    """Bytes per token of one layer by the module whose recomputation drops them; `rest` always stays."""

    rest: Array
    attention_output: Array  # here and in `residual` under policies of names alone, else in `rest`
    residual: Array  # input of the norm before the feed-forward
    norm: Array
    core_attention: Array
    mla_up_projection: Array
    activation: Array  # dense FFN: the product alone
    mlp: Array  # dense FFN without the product
    moe_activation: Array
    moe: Array
    moe_rest: Array
    shared_experts: Array


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Bytes per token of one kind of layer."""

    everything: Array  # without recomputation
    dropped: Array  # by the modules that the plan names
    saved: Array  # when every second GEMM is recomputed


def routed_copies(model: ModelTable, plan: PlanTable, constants: MemoryConstants) -> Array:
    """Copies of a token that the busiest rank's experts compute."""
    return model.top_k * busiest_rank_ratio(
        model, plan, stated=constants.busiest_expert_ratio, is_padded=constants.pads_experts
    )


def layer_bytes(
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    constants: MemoryConstants,
    tokens: Array,
) -> LayerBytes:
    """Bytes that a layer of each kind keeps for `tokens` tokens of a micro-batch, after recomputation."""

    def of(table: ModelTable) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        return _kept_and_live(table, batch, plan, precision, constants)

    (dense, live_dense), (moe, live_moe) = of(model)
    for block, is_there in _blocks_of_hybrids(model):  # the fullest block runs backward, not the mean one
        (_, own_dense), (_, own_moe) = of(block)
        live_dense = np.where(is_there, np.maximum(live_dense, own_dense), live_dense)
        live_moe = np.where(is_there, np.maximum(live_moe, own_moe), live_moe)
    table = prediction_module(model)
    of_dense, of_moe = ((dense, 0.0), (moe, 0.0)) if table is model else of(table)
    return LayerBytes(
        dense=dense * tokens,
        moe=moe * tokens,
        live_dense=live_dense * tokens,
        live_moe=live_moe * tokens,
        module=np.where(model.num_experts > 0, of_moe[0], of_dense[0]) * tokens,
    )


def _blocks_of_hybrids(model: ModelTable) -> Iterator[tuple[ModelTable, Array]]:
    """The model with layers of one kind of block only, and where it has such layers; nothing but for hybrids."""
    shares = ("attention_share", "ffn_share", "moe_share", "state_space_share")
    for name in shares:
        is_there = (np.asarray(model.single_block) > 0) & (np.asarray(getattr(model, name)) > 0)
        if np.any(is_there):
            yield replace(model, **{other: 1.0 * (other == name) for other in shares}), is_there


def _kept_and_live(
    model: ModelTable, batch: BatchTable, plan: PlanTable, precision: PrecisionTable, constants: MemoryConstants
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Bytes per token, kept and live besides, of a dense layer and of one with a mixture."""
    share = 1 / plan.tensor
    stream = np.where(plan.sequence_parallel > 0, share, 1.0)
    modules = _modules(model, batch, plan, precision, constants, share, stream)
    inputs = precision.activation_bytes * model.streams * model.hidden * stream
    saved = _saved_by_attention(model, share, inputs)
    covered = _covered(model, plan)
    dense = _after(plan, _dense(model, plan, modules, saved, share), inputs, covered)
    if not np.any(model.num_moe_layers):
        return dense, (0.0, 0.0)
    routed = routed_copies(model, plan, constants)
    return dense, _after(plan, _moe(model, plan, modules, saved, share, routed), inputs, covered)


def _covered(model: ModelTable, plan: PlanTable) -> Array:
    """Share of a rank's layers that are recomputed as a whole."""
    some = np.minimum(plan.recompute_layers * plan.pipeline / model.num_layers, 1.0)
    return (plan.recompute == FULL) * np.where(plan.recompute_layers < 0, 1.0, some)


def _after(plan: PlanTable, kind: _Kind, inputs: Array, covered: Array) -> tuple[Array, Array]:
    """Bytes per token that a layer keeps on average, and those that are live besides while it runs backward."""
    picked = plan.recompute == SELECTIVE
    alternate = picked & (plan.recomputes("alternate_matmuls") > 0)
    selective = np.where(alternate, np.minimum(kind.saved, kind.everything), kind.everything - picked * kind.dropped)
    kept = selective + covered * (inputs - selective)
    return kept, kind.everything - np.where(covered > 0, inputs, selective)


def _dense(model: ModelTable, plan: PlanTable, modules: _Modules, saved: Array, share: Array) -> _Kind:
    """Selective recomputation saves the outputs of the feed-forward's first and last GEMM."""
    block = plan.recomputes("mlp")
    either = np.maximum(plan.recomputes("activation"), block)
    everything, dropped = _attention(plan, modules)
    return _Kind(
        everything=everything + modules.activation + modules.mlp,
        dropped=dropped + either * modules.activation + block * modules.mlp,
        saved=saved + 2 * model.ffn_share * (model.ffn * share + model.hidden),
    )


def _moe(model: ModelTable, plan: PlanTable, modules: _Modules, saved: Array, share: Array, routed: Array) -> _Kind:
    """Selective recomputation saves the experts' tokens of both all-to-alls and no GEMM output. A hybrid's
    mean layer has dense feed-forward blocks besides.

    `routed`: copies of a token that the busiest rank's experts compute.
    """
    block = plan.recomputes("moe")
    either = np.maximum(plan.recomputes("activation"), block)
    everything, dropped = _attention(plan, modules)
    feed_forward = _dense(model, plan, modules, 0.0, share)
    everything = everything + model.single_block * (feed_forward.everything - everything)
    dropped = dropped + model.single_block * (feed_forward.dropped - dropped)
    ffn = modules.moe_activation + modules.moe + modules.moe_rest + modules.shared_experts
    return _Kind(
        everything=everything + ffn,
        dropped=dropped
        + either * modules.moe_activation
        + block * modules.moe
        + plan.recomputes("shared_experts") * modules.shared_experts,
        saved=saved
        + model.single_block * feed_forward.saved
        + modules.moe_rest
        + 4 * model.moe_share * routed * model.expert_hidden * share,
    )


def _attention(plan: PlanTable, modules: _Modules) -> tuple[Array, Array]:
    """The attention half of both kinds of layers: (all bytes, those that the named modules recompute)."""
    parts = {name: getattr(modules, name) for name in ("norm", "core_attention", "mla_up_projection")}
    dropped = sum(plan.recomputes(name) * part for name, part in parts.items())
    dropped = dropped + plan.recomputes("core_attention") * modules.attention_output
    dropped = dropped + np.maximum(plan.recomputes("mlp"), plan.recomputes("moe")) * modules.residual
    return modules.rest + modules.attention_output + modules.residual + sum(parts.values()), dropped


def _kept_by_adapters(model: ModelTable, gathered: Array, share: Array) -> Array:
    dropped = 3 * model.lora_dropout * (model.lora_column_inputs * gathered + model.lora_row_inputs * share)
    return dropped + 4 * model.dora_outputs * share


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
    h, nq, d, dv = model.hidden, model.num_heads, model.qk_dim, model.v_dim
    e = precision.activation_bytes
    attention_input, ffn_input = _linear_inputs(model, precision)
    ffn_input = _narrowed(ffn_input, precision.stored_ffn_bytes)
    in_ffn = _narrowed(e, precision.stored_ffn_bytes)
    norm_input = _narrowed(e, precision.stored_norm_bytes)
    norm_copy = _narrowed(constants.norm_copy_bytes, precision.stored_norm_bytes)
    before = in_ffn * (model.ffn_matrices - 1)  # bytes per element of f before the activation function
    is_mla, masks = model.is_mla > 0, constants.keeps_dropout_masks

    # MLA expands its latent tensors to keys and values of every query head.
    key_value = e * np.where(is_mla, nq, model.kv_heads) * (d + dv) * share
    expanded = e * model.query_heads * d * share + key_value
    latent = np.where(is_mla, e * (2 * model.q_rank + 2 * model.kv_rank + model.rope_dim), 0)
    output = (e * model.query_heads * dv * (1 + 2 * model.output_gate) + 4 * nq) * share  # gated: gate and product too
    indexer: Array = 0.0
    if has_sparse_attention(model):
        expanded = expanded + sparse_bytes_per_token(model, batch.seq_len, e, share)
        indexer = indexer_bytes_per_token(model, batch.seq_len, e)
    # A hybrid's layer holds one block: a mean layer has shares of each kind, and half of two blocks' residuals.
    attention, ffn, mixture, blocks = model.attention_share, model.ffn_share, model.moe_share, model.blocks
    state_space = model.state_space_share * kept_bytes_per_token(model) * share
    linear = model.linear_share * linear_attention.kept_bytes_per_token(model, precision) * share
    probabilities = _probabilities(model, batch, constants, e * share, share)
    of_others = constants.gathers_keys * (plan.context - 1) * key_value
    expert_share, routed = share * plan.expert_tensor, routed_copies(model, plan, constants)
    gathered = np.where(constants.keeps_gathered_inputs > 0, 1.0, stream)
    output_norms = np.maximum(model.num_norms - 2, 0) * (norm_input + norm_copy)  # their inputs
    kept = _kept_by_adapters(model, gathered, share)
    by_name, sums, inputs = constants.keeps_named_only > 0, model.residual_sums, model.block_inputs
    return _Modules(
        rest=((sums - by_name * (sums - 1)) * norm_input * blocks + 2 * masks + output_norms) * h * stream
        + attention * (np.where(is_mla, latent, expanded) + np.where(by_name, 0, output))
        + indexer
        + stream_bytes_per_token(model, e) * stream
        + state_space
        + linear
        + kept,
        attention_output=by_name * attention * output,
        residual=by_name * (sums - 1) * norm_input * blocks * h * stream,
        norm=(_normed(model, attention_input, ffn_input) * gathered + inputs * norm_copy * stream) * h * blocks,
        core_attention=attention * (probabilities + of_others),
        mla_up_projection=attention * np.where(is_mla, expanded, 0),
        activation=ffn * ffn_input * model.ffn * share,
        mlp=ffn * (before + in_ffn * constants.ffn_copies) * model.ffn * share,
        moe_activation=mixture * ffn_input * (routed * model.expert_ffn + model.shared_ffn) * share,
        # Tokens enter the experts split over tensor ranks; with z-way experts each rank works on z of those parts.
        moe=mixture * routed * (ffn_input * model.expert_hidden * expert_share + before * model.expert_ffn * share),
        moe_rest=mixture * (8 * model.num_experts + ffn_input * model.latent) * stream,
        shared_experts=mixture * before * model.shared_ffn * share,
    )


def _normed(model: ModelTable, attention_input: Array, ffn_input: Array) -> Array:
    """Bytes kept per element of the norms' outputs; one that both blocks read is kept once."""
    return np.where(model.block_inputs == 1, np.maximum(attention_input, ffn_input), attention_input + ffn_input)


def _probabilities(
    model: ModelTable, batch: BatchTable, constants: MemoryConstants, element_bytes: Array, share: Array
) -> Array:
    """Bytes per token of the probabilities that unfused attention keeps; `element_bytes` and `share`: of 1/t."""
    nq, s = model.num_heads, batch.seq_len
    whole = constants.unfused_attention * constants.probability_bytes * nq * s * share
    # Capped scores have no fused kernel: probabilities of earlier keys are kept, 2 bytes each.
    capped = model.caps_scores * (1 - constants.unfused_attention) * nq * s * share
    in_blocks = 0.5 * element_bytes * nq * (s + BLOCK_QUERIES)
    return whole + capped + constants.blockwise_attention * (1 - model.caps_scores) * in_blocks


def _linear_inputs(model: ModelTable, precision: PrecisionTable) -> tuple[Array, Array]:
    """Bytes kept per element of the inputs of attention's projections and of the feed-forward's matrices.

    Frozen matrices keep none; their adapters do, in 16 bits, or with dropout a copy of their own.
    """
    frozen, adapter_bytes = model.lora_rank > 0, (1 - model.lora_dropout) * precision.activation_bytes
    b = precision.linear_input_bytes
    return (
        np.where(frozen, model.adapts_attention * adapter_bytes, b),
        np.where(frozen, model.adapts_ffn * adapter_bytes, b),
    )


def _narrowed(bytes_per_element: Array, stored_bytes: Array) -> Array:
    """Bytes of an element where its module stores activations in `stored_bytes`; 0: as it was computed."""
    return np.where(stored_bytes > 0, np.minimum(bytes_per_element, stored_bytes), bytes_per_element)


def _saved_by_attention(model: ModelTable, share: Array, inputs: Array) -> Array:
    """Per token, bytes of the attention block that selective recomputation of every second GEMM saves.

    It saves the query projection, the value projection, and the attention itself.
    """
    nq, nkv, dv = model.query_heads, model.kv_heads, model.v_dim
    return inputs + model.attention_share * (2 * nq * model.qk_dim + 2 * nkv * dv + 2 * nq * dv + 4 * nq) * share
