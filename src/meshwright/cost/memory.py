"""Bytes per device on the fullest pipeline rank.

    static      = N_rank (w + g + o / D)            by ZeRO stage, dense and expert parameters apart
    activations = Σ_layers A_layer x micro-batches in flight
    peak        = static + activations + max(head workspace, layer workspace) + fixed workspace

Bytes that one layer keeps for its backward pass, per token of the rank (T = s B / c tokens, TP width t, with
sequence parallelism; without it the 8h term is not divided by t):

    dense  A = 4h + 4h_in + 2 n_q (d + d_v) + 2 n_kv (d + d_v) + 6f       all / t, + 4 n_q / t for the log-sum-exp
    MoE    A = attention part + k (2h + 2h + 3 f_e x 2) + router 4E + shared experts

h_in terms (a linear layer's saved input) shrink to the bytes of the matmul format under fp8 recipes.
Sources: Korthikanti et al. 2022 (arXiv 2205.05198, section 4) for the counting; DeepSeek-V2 (section 2.1) for the
latent tensors of MLA; Rajbhandari et al. 2020 (ZeRO) for the static part. Constants that are measured, not derived
(allocator slack, communication buffers, driver context), live in catalog/data/calibration/memory.toml.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

import numpy as np

from meshwright.catalog.stacks import stack_facts
from meshwright.cost.flops import Parameters, count_parameters
from meshwright.cost.pipeline.closed_form import in_flight
from meshwright.cost.stages import StageLayers, split_layers
from meshwright.cost.tables import (
    RECOMPUTES,
    Array,
    BatchTable,
    ModelTable,
    PlanTable,
    PrecisionTable,
    Table,
)
from meshwright.specs.hardware import Stack
from meshwright.specs.plan import Recompute, Sharding

FULL = RECOMPUTES.index(Recompute.FULL)
SELECTIVE = RECOMPUTES.index(Recompute.SELECTIVE)


@dataclass(frozen=True, kw_only=True)
class MemoryConstants(Table):
    """Measured constants of an allocator and its stack."""

    workspace_bytes: Array  # GEMM and attention workspaces, small tensors
    context_bytes: Array  # driver context, kernels, reserved beside the allocator
    communicator_bytes: Array  # per communicator a rank takes part in
    fragmentation_ratio: Array  # reserved / allocated - 1, of the part that is not static
    logits_bytes: Array  # per element of the logits: 16-bit logits and gradient, or fp32 copies
    head_gradient_bytes: Array  # per parameter of the head: temporary weight gradient
    keeps_norm_inputs: Array  # 1: norm inputs and outputs are kept (8h); 0: inputs only (4h)
    unfused_attention: Array  # 1: the s x s probabilities are kept
    keeps_dropout_masks: Array  # 1: dropout masks are kept (2h bytes, and s x s bytes when unfused)
    activation_copies: Array  # 16-bit copies of f kept beside gate, up and their product


@dataclass(frozen=True, kw_only=True)
class MemoryTable(Table):
    """Bytes per device; `allocated` is their sum on the fullest rank, `reserved` what the device must have."""

    weights_bytes: Array
    gradients_bytes: Array
    optimizer_bytes: Array
    activations_bytes: Array
    workspace_bytes: Array
    allocated_bytes: Array
    reserved_bytes: Array
    on_last_stage: Array  # 1 when the last rank is the fullest


def estimate_memory(
    *,
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    constants: MemoryConstants,
) -> MemoryTable:
    """Memory of the first and the last pipeline rank; the larger is returned."""
    parameters = count_parameters(model)
    layers = split_layers(model, plan)
    num_micro = batch.global_batch / (plan.micro_batch * plan.data)
    first = _rank(model, batch, plan, precision, constants, parameters, layers, num_micro, last=False)
    last = _rank(model, batch, plan, precision, constants, parameters, layers, num_micro, last=True)
    on_last = last["allocated_bytes"] > first["allocated_bytes"]
    picked = {name: np.where(on_last, last[name], first[name]) for name in first}
    return MemoryTable(**picked, on_last_stage=on_last * 1)


def _rank(
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    constants: MemoryConstants,
    parameters: Parameters,
    layers: StageLayers,
    num_micro: Array,
    *,
    last: bool,
) -> dict[str, Array]:
    p, t = plan.pipeline, plan.tensor
    dense_layers = layers.last_dense if last else layers.first_dense
    moe_layers = layers.last_moe if last else layers.first_moe
    single = p == 1
    holds_embedding = 1 if not last else np.where(single | (model.tied > 0), 1, 0)
    holds_head = 1 if last else np.where(single, 1, 0)

    dense_count, expert_count = _parameters_on_rank(
        model, parameters, plan, dense_layers, moe_layers, holds_embedding, holds_head
    )
    weights, gradients, optimizer = _static_bytes(
        model, plan, precision, parameters, dense_count, expert_count, dense_layers + moe_layers
    )
    tokens = batch.seq_len * plan.micro_batch / plan.context
    stage = p - 1 if last else 0
    flights = in_flight(plan.schedule, p, plan.virtual_pipeline, num_micro, stage)
    dense_kept, moe_kept, live = _layer_activation_bytes(model, plan, precision, constants, batch, tokens)
    activations = flights * (dense_layers * dense_kept + moe_layers * moe_kept) + live
    activations = activations + holds_embedding * flights * tokens * model.hidden * 2 / t
    head_bytes = tokens * model.vocab / t * constants.logits_bytes
    head_bytes = head_bytes + model.vocab * model.hidden / t * constants.head_gradient_bytes * (
        model.lora_rank == 0
    )
    layer_bytes = _layer_workspace_bytes(model, plan, parameters, tokens)
    workspace = np.maximum(holds_head * head_bytes, layer_bytes) + constants.workspace_bytes
    allocated = weights + gradients + optimizer + activations + workspace
    communicators = (t > 1) * 1 + (plan.context > 1) * 1 + (plan.data > 1) * 1 + (p > 1) * 1 + (plan.expert > 1) * 1
    reserved = (
        allocated
        + constants.fragmentation_ratio * (activations + workspace)
        + constants.context_bytes
        + communicators * constants.communicator_bytes
    )
    return {
        "weights_bytes": weights,
        "gradients_bytes": gradients,
        "optimizer_bytes": optimizer,
        "activations_bytes": activations,
        "workspace_bytes": workspace,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
    }


def _parameters_on_rank(
    model: ModelTable,
    parameters: Parameters,
    plan: PlanTable,
    dense_layers: Array,
    moe_layers: Array,
    holds_embedding: Array,
    holds_head: Array,
) -> tuple[Array, Array]:
    """Parameters that data parallelism shares out over all ranks, and expert parameters."""
    t = plan.tensor
    mtp = holds_head * model.num_mtp_layers
    is_moe = np.where(model.num_experts > 0, 1, 0)
    attention = parameters.attention_layer / t + parameters.norm_layer
    dense = (dense_layers + moe_layers + mtp) * attention
    dense = dense + (dense_layers + mtp * (1 - is_moe)) * parameters.dense_ffn_layer / t
    moe = moe_layers + mtp * is_moe
    dense = dense + moe * (parameters.shared_layer / t + parameters.router_layer)
    dense = dense + mtp * parameters.mtp_projection / t
    head = np.where(model.tied > 0, 0, parameters.head)
    dense = dense + (holds_embedding * parameters.embedding + holds_head * head) / t
    expert = moe * parameters.experts_layer / (plan.expert * plan.expert_tensor)
    return dense, expert


def _static_bytes(
    model: ModelTable,
    plan: PlanTable,
    precision: PrecisionTable,
    parameters: Parameters,
    dense: Array,
    expert: Array,
    num_layers: Array,
) -> tuple[Array, Array, Array]:
    """Weights, gradients and optimizer states under each ZeRO stage."""
    shard = plan.data_shard * plan.context
    expert_shard = np.maximum(1, plan.expert_data / np.maximum(plan.data_replicate, 1))
    stage = plan.sharding
    w, g = precision.weight_bytes + precision.weight_cache_bytes, precision.grad_bytes
    o = precision.master_bytes + precision.moment_bytes
    full = stage == Sharding.PARAMETERS

    # FSDP keeps one sharded fp32 copy that is both weight and master; two gathered layers are in flight.
    kept_weight = np.where(full, np.maximum(precision.master_bytes, precision.weight_bytes), w)
    state = np.where(full, precision.moment_bytes, o)
    layer = (dense + expert) / np.maximum(num_layers, 1)
    gathered = np.where(full, 2 * layer * precision.gather_bytes, 0)
    unreduced = np.where(full & (shard > 1), layer * precision.reduce_bytes, 0)

    frozen = model.lora_rank > 0
    adapters = parameters.lora_layer * num_layers / plan.tensor
    trained_dense = np.where(frozen, adapters, dense)
    trained_expert = np.where(frozen, 0, expert)
    base = np.where(frozen, precision.weight_bytes + precision.weight_cache_bytes, kept_weight)
    host = plan.offload_optimizer > 0

    def part(count: Array, trained: Array, width: Array) -> tuple[Array, Array, Array]:
        weights = count * base / np.where(full, width, 1) + np.where(frozen, trained * w, 0)
        gradients = trained * g / np.where(stage >= Sharding.GRADIENTS, width, 1)
        optimizer = np.where(host, 0, trained * state / np.where(stage >= Sharding.OPTIMIZER, width, 1))
        return weights, gradients, optimizer

    d, x = part(dense, trained_dense, shard), part(expert, trained_expert, expert_shard)
    return d[0] + x[0] + gathered, d[1] + x[1] + np.where(frozen, 0, unreduced), d[2] + x[2]


def _layer_activation_bytes(
    model: ModelTable,
    plan: PlanTable,
    precision: PrecisionTable,
    constants: MemoryConstants,
    batch: BatchTable,
    tokens: Array,
) -> tuple[Array, Array, Array]:
    """Bytes kept by one dense and one MoE layer, and the live bytes of a layer that is recomputed."""
    t, h, f = plan.tensor, model.hidden, model.ffn
    split = np.where(plan.sequence_parallel > 0, t, 1)  # of the residual stream
    b_in = precision.linear_input_bytes
    nq, nkv, d, dv = model.num_heads, model.num_kv_heads, model.qk_dim, model.v_dim

    norm = 2 * (2 * h) / split  # inputs of both norms
    norm_out = constants.keeps_norm_inputs * 2 * b_in * h / split  # their outputs: inputs of QKV and of the FFN
    masks = constants.keeps_dropout_masks * 2 * h / split
    query_key_value = 2 * (nq * d + nkv * (d + dv)) / t
    latent = np.where(model.is_mla > 0, 2 * (2 * model.q_rank + 2 * model.kv_rank + model.rope_dim), 0)
    latent_heads = np.where(model.is_mla > 0, 2 * nq * (d + dv) / t - 2 * nkv * (d + dv) / t, 0)
    attention_out = 2 * nq * dv / t + 4 * nq / t
    probabilities = constants.unfused_attention * (4 + constants.keeps_dropout_masks) * nq * batch.seq_len / t
    attention = query_key_value + latent + np.maximum(latent_heads, 0) + attention_out + probabilities

    gate_up = 2 * (model.ffn_matrices - 1)
    dense_ffn = (gate_up + b_in + 2 * constants.activation_copies) * f / t
    expert_in = model.top_k * b_in * h  # tokens as received by the experts
    expert_mid = model.top_k * (gate_up + b_in) * model.expert_ffn
    expert_out = model.top_k * 2 * h  # expert outputs, kept for the gradient of the routing weights
    shared = (gate_up + b_in) * model.shared_ffn / t
    # Tokens enter the experts split over tensor ranks; with expert_tensor = z each rank works on z of those parts.
    moe_ffn = (expert_in + expert_out) / t * plan.expert_tensor + expert_mid / t
    router = 4 * 2 * model.num_experts / split

    picked = plan.recompute == SELECTIVE

    def kept(module: str) -> Array:
        return 1 - picked * plan.recomputes(module)

    common = norm + norm_out * kept("norm") + masks
    common = common + attention - kept_away(plan, picked, attention_out, latent_heads, probabilities)
    activation = f * b_in / t
    dense_part = (dense_ffn - (1 - kept("activation")) * activation) * kept("mlp")
    moe_activation = model.top_k * b_in * model.expert_ffn / t + b_in * model.shared_ffn / t
    moe_part = (moe_ffn + shared * kept("shared_experts") - (1 - kept("activation")) * moe_activation) * kept("moe")
    dense = tokens * (common + dense_part)
    moe = tokens * (common + moe_part + router)

    inputs = tokens * 2 * h / split
    is_full = plan.recompute == FULL
    fraction = np.where(
        is_full,
        np.where(
            plan.recompute_layers < 0,
            1.0,
            np.minimum(plan.recompute_layers / np.maximum(model.num_layers / plan.pipeline, 1), 1.0),
        ),
        0.0,
    )
    live = np.where(is_full, np.where(model.num_moe_layers > 0, np.maximum(dense * (model.ffn > 0), moe), dense), 0)
    return (
        dense * (1 - fraction) + inputs * fraction,
        moe * (1 - fraction) + inputs * fraction,
        live,
    )


def kept_away(plan: PlanTable, picked: Array, attention_out: Array, latent_heads: Array, probabilities: Array) -> Array:
    """Per token, what selective recomputation of attention modules does not keep."""
    core = picked * plan.recomputes("core_attention") * (attention_out * 0 + probabilities)
    up = picked * plan.recomputes("mla_up_projection") * np.maximum(latent_heads, 0)
    return core + up


def _layer_workspace_bytes(model: ModelTable, plan: PlanTable, parameters: Parameters, tokens: Array) -> Array:
    """Gradients alive while one layer runs backward: of gate, up and their product, and one weight gradient."""
    t, h = plan.tensor, model.hidden
    dense = 2 * 2 * model.ffn_matrices * tokens * model.ffn / (2 * t) + 2 * h * model.ffn * (
        model.ffn_matrices - 1
    ) / t * (model.lora_rank == 0)
    moe = 2 * model.top_k * tokens * (2 * h + model.ffn_matrices * model.expert_ffn) / t
    return np.maximum(dense, moe) + 3 * 2 * tokens * h


@cache
def memory_constants(stack: Stack, *, unfused_attention: bool | None = None) -> MemoryConstants:
    """The constants of a stack's lineage. `unfused_attention` overrides what the stack usually does."""
    text = (files("meshwright.catalog") / "data" / "calibration" / "memory.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)
    facts = stack_facts(stack.framework)
    values = {**entries["default"], **entries.get(facts.lineage, {})}
    values["unfused_attention"] = int(facts.unfused_attention if unfused_attention is None else unfused_attention)
    return MemoryConstants(**{f.name: values[f.name] for f in fields(MemoryConstants)})
