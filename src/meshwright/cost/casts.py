"""Seconds and bytes of what kernels quantise besides operands of GEMMs: stored activations, weights and their cache.

    stored activation    read once and written in 8 bits forward, read and written again backward
    weight, cached       cast once a step in both orientations, which are kept: 2 b bytes; a frozen one that is held in
                         b bytes needs the other orientation alone, and never a cast
    weight, not cached   cast in every forward and in every backward pass

    frozen in b bytes    a transposed copy in every backward pass, unless it is cached
    frozen, quantised    read in 8 or 4 bits with its scales and written in 16, in every forward and every backward pass

b bytes of a GEMM's operand. The native engine caches weights where a step has several micro-batches and a rank's
weights stay whole between them (`kernels.weight_cache: auto`); `on` and `off` decide it. The calibration of
other stacks includes their casts of weights.
"""

from __future__ import annotations

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.flops import Parameters
from meshwright.cost.passes import NO_PASSES, PassTimes
from meshwright.cost.tables import BatchTable, ModelTable, PlanTable, PrecisionTable, WeightCache
from meshwright.kernels.traffic import dequantised_bytes
from meshwright.specs.plan import Sharding


def is_cached(batch: BatchTable, plan: PlanTable, precision: PrecisionTable) -> Array:
    """1 where a rank keeps its quantised weights for a step."""
    whole = (plan.sharding != Sharding.PARAMETERS) | (plan.pipeline > 1) | (plan.data_shard == 1)
    several = batch.global_batch > plan.micro_batch * plan.data
    kind = precision.weight_cache
    asked = (kind == WeightCache.ON) | ((kind == WeightCache.AUTO) & several)
    return 1.0 * (whole & asked & (precision.linear_input_bytes < 2))


def cache_bytes(
    model: ModelTable, batch: BatchTable, plan: PlanTable, precision: PrecisionTable, frozen_bytes: Array
) -> Array:
    """Bytes kept per weight of a linear layer. `frozen_bytes`: bytes of a frozen weight as the rank holds it."""
    b = precision.linear_input_bytes
    copies = np.where((model.lora_rank > 0) & (frozen_bytes <= b), 1, 2)
    return is_cached(batch, plan, precision) * copies * b


def dequantised_passes(model: ModelTable, precision: PrecisionTable, weights: Array, bytes_per_s: Array) -> PassTimes:
    """Frozen weights in 8 or 4 bits, made whole for a GEMM forward and for that of the gradient of its input."""
    if not np.any(model.quantised_bytes):
        return NO_PASSES
    moved = dequantised_bytes(
        model.quantised_bytes, element_bytes=precision.activation_bytes, in_parts=precision.dequantises_in_parts
    )
    seconds = (np.asarray(model.quantised_bytes) > 0) * weights * moved / bytes_per_s
    return PassTimes(forward_s=seconds, input_s=seconds, weight_s=0.0)


def cast_passes(
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    parameters: Parameters,
    tokens: Array,
    bytes_per_s: Array,
    *,
    is_moe: bool,
) -> PassTimes:
    """Casts of one layer and micro-batch."""
    forward, backward = _stored(model, plan, precision, tokens, is_moe=is_moe)
    if np.any(precision.weight_cache):
        weights = parameters.attention_layer / plan.tensor
        if is_moe:
            experts = parameters.experts_layer / (plan.expert * plan.expert_tensor)
            weights = weights + parameters.shared_layer / plan.tensor + experts
        else:
            weights = weights + parameters.dense_ffn_layer / plan.tensor
        b = precision.linear_input_bytes
        cast = weights * ((b < 2) & (precision.weight_cache > 0)) * (precision.activation_bytes + 2 * b)
        transposed = weights * 2 * b
        cached = is_cached(batch, plan, precision)
        num_micro = batch.global_batch / (plan.micro_batch * plan.data)
        held_narrow = (model.lora_rank > 0) & (precision.frozen_in_16_bits == 0)
        once = np.where(held_narrow, 0.0, cast / num_micro)
        forward = forward + np.where(cached > 0, once, np.where(held_narrow, 0.0, cast))
        again = np.where(held_narrow, (cast > 0) * transposed, cast)
        backward = backward + np.where(cached > 0, 0.0, again)
    return PassTimes(forward_s=forward / bytes_per_s, input_s=backward / bytes_per_s, weight_s=0.0)


def _stored(
    model: ModelTable, plan: PlanTable, precision: PrecisionTable, tokens: Array, *, is_moe: bool
) -> tuple[Array, Array]:
    """Bytes that casts of stored activations move forward and backward."""
    ffn_bytes, norm_bytes, e = (precision.stored_ffn_bytes, precision.stored_norm_bytes, precision.activation_bytes)
    if not np.any(np.asarray(ffn_bytes) + norm_bytes):
        return 0.0, 0.0
    split = np.where(plan.sequence_parallel > 0, plan.tensor, 1)
    # GEMM inputs that are 8 bits wide already are kept as they are.
    wide = precision.linear_input_bytes >= 2
    columns = (model.ffn_matrices - 1 + wide) / plan.tensor
    in_ffn = model.ffn_share * tokens * (columns * model.ffn + wide * model.hidden / split)
    if is_moe:
        width = model.top_k * model.expert_ffn + model.shared_ffn
        routed = wide * model.top_k * model.expert_hidden / plan.tensor
        in_ffn = model.single_block * in_ffn + model.moe_share * tokens * (columns * width + routed)
    moved = in_ffn * (ffn_bytes > 0) * (e + ffn_bytes)
    moved = moved + 2 * model.blocks * tokens * model.hidden / split * (norm_bytes > 0) * (e + norm_bytes)
    return moved, moved
