"""Work of a step that runs once: reduce gradients, update parameters, gather them again. Exposed seconds."""

from __future__ import annotations

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.collectives import Group, all_gather_s, all_reduce_s, reduce_scatter_s
from meshwright.cost.layers import LayerTimes, StepContext, shard_copies_s
from meshwright.cost.linear_attention import projected
from meshwright.cost.memory.states import keeps_masters
from meshwright.cost.overlap import exposed_s
from meshwright.cost.stages import StageLayers
from meshwright.cost.tables import ModelTable, PlanTable
from meshwright.specs.plan import Sharding

OPTIMIZER_BYTES = 34.0
"""AdamW's, per parameter: master and both optimizer states read and written (24), gradient read twice for norm and
update (8), 16-bit weight written (2). `Precision.update_bytes` counts the run's optimizer."""

HOST_UPDATES_PER_S = 1.4e9
"""Parameters that AdamW updates on one thread: PyTorch 2.13, `fused=True`, parameters, gradients and states in bf16,
one core of an AMD EPYC, 20 million parameters (1.33e9 to 1.45e9 in seven repeats; in fp32 1.8e9). torchrun
gives each process one thread by default (OMP_NUM_THREADS=1)."""


def trained_parameters(s: StepContext, layers: StageLayers) -> tuple[Array, Array]:
    """(dense, expert) trained parameters of the rank that holds most."""
    p, plan = s.parameters, s.plan
    t = plan.tensor
    num_layers = np.maximum(layers.first, layers.middle)
    num_moe = np.maximum(layers.first_moe, layers.middle_moe)
    tables = p.embedding + np.where(plan.pipeline > 1, 0, p.head)
    split = num_layers * p.attention_layer + (num_layers - num_moe) * p.dense_ffn_layer + num_moe * p.shared_layer
    dense = (split + tables) / t + num_moe * p.router_layer
    expert = num_moe * p.experts_layer / (plan.expert * plan.expert_tensor)
    frozen = s.model.lora_rank > 0
    saved = p.embedding * s.model.saved_embedding + np.where(plan.pipeline > 1, 0, p.head) * s.model.saved_head
    return np.where(frozen, (num_layers * p.lora_layer + saved) / t, dense), np.where(frozen, 0, expert)


def data_parallel_s(s: StepContext, layers: StageLayers, middle: LayerTimes) -> Array:
    """Gradient reduction behind the last backward pass, parameter gather behind the first forward pass.

    FSDP without a pipeline pays per layer instead, and here for the tables around the layers: gathered once, reduced
    after each micro-batch, a calibrated share hidden. FSDP2 copies both from and to buffers. `middle`:
    one micro-batch on a middle rank.
    """
    dense, expert = trained_parameters(s, layers)
    plan, groups = s.plan, s.groups
    sharded = plan.sharding > Sharding.NONE

    def reduce_s(count: Array, shard: Group, whole: Group) -> Array:
        size = count * s.precision.reduce_bytes
        copies = np.where(plan.data_replicate > 1, all_reduce_s(size / shard.size, groups.replicate), 0.0)
        return np.where(sharded, reduce_scatter_s(size, shard) + copies, all_reduce_s(size, whole))

    def gather_s(count: Array, shard: Group) -> Array:
        return np.where(sharded, all_gather_s(count * s.precision.gather_bytes, shard), 0.0)

    num_layers = np.maximum(layers.first, layers.middle)  # each exchanges by itself
    num_moe = np.maximum(layers.first_moe, layers.middle_moe)
    several = plan.data * plan.context > 1
    several_experts = (np.asarray(expert) > 0) & (plan.expert_data > 1)
    reduction = s.collective_s(reduce_s(dense, groups.shard, groups.whole), groups.whole, count=num_layers)
    reduction = np.where(several, reduction, 0.0)
    of_experts = reduce_s(expert, groups.expert_shard, groups.expert_whole)
    of_experts = s.collective_s(of_experts, groups.expert_whole, count=num_moe)
    reduction = reduction + np.where(several_experts, of_experts, 0.0)
    gathering = s.collective_s(gather_s(dense, groups.shard), groups.shard, count=num_layers)
    gathering = np.where(several & sharded, gathering, 0.0)
    of_experts = s.collective_s(gather_s(expert, groups.expert_shard), groups.expert_shard, count=num_moe)
    gathering = gathering + np.where(several_experts & sharded, of_experts, 0.0)
    backward = _exposed_by_chunk(s, reduction, middle.input_s + middle.weight_s)
    forward = _exposed_by_chunk(s, gathering, middle.forward_s)
    copied = several * dense + several_experts * expert
    copies = sum(shard_copies_s(s, copied)) * (plan.sharding >= Sharding.GRADIENTS)
    return np.where(s.gathers_layers > 0, _tables_s(s), backward + forward + copies)


def _tables_s(s: StepContext) -> Array:
    """Embedding and head under FSDP."""
    tables = s.parameters.embedding + s.parameters.head
    trained = np.where(s.model.lora_rank > 0, s.model.saved_parameters / np.maximum(tables, 1), 1)
    count, shard = tables / s.plan.tensor, s.groups.shard
    gather = s.collective_s(all_gather_s(count * s.precision.gather_bytes, shard), shard)
    size = count * s.precision.reduce_bytes
    copies = np.where(s.plan.data_replicate > 1, all_reduce_s(size / shard.size, s.groups.replicate), 0.0)
    reduce = s.collective_s(reduce_scatter_s(size, shard) + copies, shard) * trained
    felt = 1 - s.rates.gather_hidden_ratio
    out_s, in_s = shard_copies_s(s, count)
    copies_s = out_s + s.num_micro_batches * in_s
    return np.where(shard.size > 1, (gather + s.num_micro_batches * reduce) * felt + copies_s, 0.0)


def _exposed_by_chunk(s: StepContext, comm_s: Array, pass_s: Array) -> Array:
    """Seconds of `comm_s` that the passes of one micro-batch (`pass_s`) or, with virtual stages, of many do not hide.

    Interleaving ends one chunk's backward passes before the next chunk's: all chunks but the last to finish reduce
    behind a round of p micro-batches each, and are gathered so before the first forward passes. Only one chunk in v
    has no more than its own pass to hide behind.
    """
    p, v = s.plan.pipeline, s.plan.virtual_pipeline
    overlap = s.rates.data_hidden_ratio * s.rates.overlaps_data
    slowdown = 1 + s.rates.overlap_slowdown_ratio
    early = (v - 1) / v
    rounds = np.minimum(p, s.num_micro_batches)
    hidden_early = exposed_s(early * comm_s, early * rounds * pass_s, slowdown, overlap)
    return hidden_early + exposed_s(comm_s / v, pass_s / v, slowdown, overlap)


def optimizer_s(s: StepContext, layers: StageLayers) -> Array:
    """One pass over gradients, master weights and optimizer states of the shard, or the time of host and host link.

    Muon gathers the matrices in 16 bits and orthogonalizes them besides.
    """
    dense, expert = trained_parameters(s, layers)
    plan, rates = s.plan, s.rates
    sharded = plan.sharding > Sharding.NONE
    count = dense / np.where(sharded, s.groups.shard.size, 1) + expert / np.where(
        sharded, s.groups.expert_shard.size, 1
    )
    streaming = rates.device.streaming_bytes_per_s
    correction = rates.device.corrections.factor("optimizer/adamw", count)
    on_device = count * s.precision.update_bytes * rates.optimizer_passes / streaming * correction
    # Sharded parameters are masters that stay on the device. The link carries both directions at once.
    staying = (plan.sharding == Sharding.PARAMETERS) | keeps_masters(s.model, plan, rates.keeps_masters)
    masters = np.where(staying, 0.0, s.precision.master_bytes)
    on_host = count * (masters + s.precision.optimizer_state_bytes) / rates.host_bytes_per_s
    offloaded = np.where(rates.updates_on_host > 0, _on_host_s(s, count), np.maximum(on_device, on_host))
    streamed = np.where(plan.offload_optimizer > 0, offloaded, on_device)
    if not np.any(s.precision.newton_schulz_steps):
        return streamed
    flops = s.precision.newton_schulz_steps * rank_flops(s.model, plan, layers)
    arithmetic = flops / (rates.device.bf16_flops_per_s * rates.device.bf16_gemm_ratio)
    shards = ((dense, s.groups.shard), (dense, s.groups.tensor), (expert, s.groups.expert_shard))
    gathered = sum(
        np.where(is_split & (group.size > 1), all_gather_s(2.0 * held, group), 0.0)
        for is_split, (held, group) in zip((sharded, True, sharded), shards, strict=True)
    )
    return streamed + np.where(s.precision.newton_schulz_steps > 0, arithmetic + gathered, 0.0)


def _on_host_s(s: StepContext, count: Array) -> Array:
    """Update of a shard of `count` parameters that lives in host memory; nothing hides it.

    FSDP's CPUOffloadPolicy: each micro-batch copies the shard to the device for either gather and its gradients back.
    Megatron's HybridDeviceOptimizer: a step copies the gradients to the host and the weights back.
    """
    of_shards = s.num_micro_batches * (2 * s.precision.gather_bytes + s.precision.reduce_bytes)
    of_step = s.precision.reduce_bytes + s.precision.gather_bytes
    copies = np.where(s.plan.sharding == Sharding.PARAMETERS, of_shards, of_step)
    return count * (1 / HOST_UPDATES_PER_S + copies / s.rates.host_bytes_per_s)


# --- Muon's orthogonalization, a Newton-Schulz iteration in bf16 ---

# For a matrix of A x B with A <= B, one iteration multiplies X X' (2 A^2 B), its square (2 A^3), and the polynomial
# with X (2 A^2 B). Every rank that holds a shard of a matrix gathers the whole of it and computes all of this; experts
# and pipeline stages of other ranks are not gathered. Source: Jordan 2024, kellerjordan.github.io/posts/muon.


def iteration_flops(rows: Array, columns: Array) -> Array:
    """FLOPs of one iteration on one matrix."""
    short, long = np.minimum(rows, columns), np.maximum(rows, columns)
    return 4.0 * short**2 * long + 2.0 * short**3


def attention_flops(model: ModelTable) -> Array:
    """One iteration on the projections of one layer."""
    h, nq, d, dv = model.hidden, model.query_heads, model.qk_dim, model.v_dim
    kv = model.projected_kv_heads
    grouped = iteration_flops(nq * d, h) + iteration_flops(kv * d, h) + iteration_flops(kv * dv, h)
    query = np.where(
        model.q_rank > 0,
        iteration_flops(model.q_rank, h) + iteration_flops(nq * d, model.q_rank),
        iteration_flops(nq * d, h),
    )
    nope = d - model.rope_dim + dv
    latent = query + iteration_flops(model.kv_rank + model.rope_dim, h) + iteration_flops(nq * nope, model.kv_rank)
    attention = np.where(model.is_mla, latent, grouped) + iteration_flops(h, nq * dv)
    rank, groups = model.output_rank, np.maximum(model.output_groups, 1)
    outputs = groups * iteration_flops(rank, nq * d / groups) + iteration_flops(h, groups * rank)
    compressed = (model.selected_share + model.pooled_share) * 2 * iteration_flops(d, h)
    shared = query + iteration_flops(d, h) + outputs + compressed
    attention = np.where(model.is_shared, shared, attention)
    indexer = iteration_flops(model.index_heads * model.index_dim, model.q_rank)
    attention = attention + model.index_share * indexer
    inputs = model.state_inner + model.state_convolved + model.state_heads
    state_space = iteration_flops(inputs, h) + iteration_flops(h, model.state_inner)
    outputs, between = projected(model)
    linear = iteration_flops(outputs, h) + iteration_flops(h, model.linear_values)
    linear = linear + iteration_flops(between / 2, model.linear_keys + model.linear_values)
    hybrid = model.state_space_share * state_space + model.linear_share * linear
    return model.attention_share * attention + hybrid


def rank_flops(model: ModelTable, plan: PlanTable, layers: StageLayers) -> Array:
    """One iteration on all matrices that the rank with most layers updates. Adapters are A [r, in] and B [out, r]."""
    h, m = model.hidden, model.ffn_matrices
    num_layers = np.maximum(layers.first, layers.middle)
    num_moe = np.maximum(layers.first_moe, layers.middle_moe)
    experts = (
        model.num_experts
        / (plan.expert * plan.expert_tensor)
        * m
        * iteration_flops(model.expert_ffn, model.expert_hidden)
    )
    dense = model.ffn_share * m * iteration_flops(model.ffn, h)
    sparse = experts + m * iteration_flops(model.shared_ffn, h) + iteration_flops(model.num_experts, h)
    sparse = sparse + 2 * iteration_flops(model.latent, h)
    sparse = model.moe_share * sparse + model.single_block * dense
    whole = num_layers * attention_flops(model) + (num_layers - num_moe) * dense + num_moe * sparse
    adapters = num_layers * 4.0 * model.lora_rank**2 * model.lora_width
    return np.where(model.lora_rank > 0, adapters, whole)
