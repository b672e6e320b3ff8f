"""FLOPs of Muon's orthogonalization, a Newton-Schulz iteration in bf16.

For a matrix of A x B with A <= B, one iteration multiplies X X' (2 A^2 B), its square (2 A^3), and the polynomial with
X (2 A^2 B). Every rank that holds a shard of a matrix gathers the whole of it and computes all of this; experts and
pipeline stages of other ranks are not gathered. Source: Jordan 2024, kellerjordan.github.io/posts/muon.
"""

from __future__ import annotations

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.linear_attention import projected
from meshwright.cost.stages import StageLayers
from meshwright.cost.tables import ModelTable, PlanTable


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
