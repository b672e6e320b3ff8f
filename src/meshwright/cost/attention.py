"""Seconds of attention's scores and values: fused and unfused kernels, windows, gathered keys.

FLOPs of `cost.flops` over a calibrated share of the 16-bit peak, which grows with the keys that a query sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.flops import keys_seen
from meshwright.cost.layer_shapes import LayerShapes
from meshwright.cost.passes import PassTimes
from meshwright.cost.sparse_attention import (
    GATHERED_BACKWARD,
    GATHERED_FORWARD,
    gathers_keys,
    has_sparse_attention,
    latent_width,
    pooled_keys,
)
from meshwright.cost.tables import BatchTable, ModelTable, PlanTable

if TYPE_CHECKING:
    from meshwright.cost.compute import DeviceRates

UNFUSED_FORWARD_ACCESSES = 6
"""Times that unfused attention moves its probabilities through memory. Assumed, like the backward pass."""

UNFUSED_BACKWARD_ACCESSES = 8

UNFUSED_BACKWARD_GEMMS = 2.0
"""Backward FLOPs of attention over its forward FLOPs: four GEMMs against two."""

FUSED_BACKWARD_GEMMS = 2.5
"""Backward over forward FLOPs of a fused kernel, which computes the scores again: five GEMMs against two (Dao
2023, FlashAttention-2, arXiv 2307.08691, section 4.1)."""

SPLIT_BACKWARD_GEMMS = 3.5
"""Backward over forward FLOPs of two fused kernels, one for the gradients of queries (three GEMMs) and one
for the gradients of keys and values (four): both compute the scores and their gradients (jax
pallas/ops/tpu/splash_attention, without `use_fused_bwd_kernel`)."""

ATTENTION_TILE = 128
"""Queries and keys of a tile of attention (FlashAttention-2, arXiv 2307.08691, section 3.3: 64 or 128)."""


ATTENTION_FILL_KEYS = 250.0
"""Mean keys of a query at which a fused kernel reaches half of its rate on long sequences: 512 to 16k causal tokens of
FlashAttention-2 on A100 (arXiv 2307.08691, figure 4) and FlashAttention-3 on H100 (arXiv 2407.08608, figure 5)."""

WIDE_HEAD = 128
EXPONENTIAL_SHARES = {
    "Volta": 0.125, "Ampere": 0.25, "Ada": 0.125, "Hopper": 0.5, "Blackwell": 1.0, "Blackwell Ultra": 0.5,
    "CDNA 3": 0.25, "CDNA 4": 0.25,
}  # fmt: skip
"""Cycles of exponentials over cycles of GEMMs in the forward pass with heads of 128: a score takes one exponential and
512 FLOPs. A multiprocessor computes 16 exponentials a cycle, of Blackwell Ultra 32 (CUDA C++ Programming Guide,
throughput of native arithmetic instructions; NVIDIA, Inside NVIDIA Blackwell Ultra, 2025-08), and 1,024 (Volta, Ada),
2,048 (Ampere), 4,096 (Hopper) or 8,192 16-bit FLOPs; a compute unit of CDNA 3 16 and 2,048, of CDNA 4 twice both."""

UNKNOWN_EXPONENTIAL_SHARE = 0.25
"""Of an architecture that is not in the table: Ampere's."""

FP8_FORWARD_GAIN = 1.5
"""Rate of fused attention in 8 bits over its rate in 16, forward: 1.2 against 0.74 PFLOP/s of
FlashAttention-3 on H100 (arXiv 2407.08608, figure 7) less the quantisation of its inputs."""

FP8_BACKWARD_GAIN = 1.2
"""FP8 gain of the backward pass, whose exponentials and accumulation keep their format. Assumed."""

ALIGNED_HEAD_DIM = 8
"""Elements of 16 bits in the 16 bytes to which tensor cores want rows aligned."""

UNALIGNED_RATIO = 0.07
"""Rate of 16-bit batched GEMMs of unfused attention on unaligned heads over the rate on aligned heads: steps
of 182 billion parameters with heads of 108 take 1.4 times the seconds with heads of 128 (BigScience,
chronicles of BLOOM, 2022)."""


def computed_keys(model: ModelTable, batch: BatchTable, rates: DeviceRates) -> Array:
    """Mean keys that are computed for a query, over full and windowed layers.

    A tile on the diagonal is computed whole, half of it for nothing: counted are tiles larger than those with which
    `ATTENTION_FILL_KEYS` was measured. A tile of queries needs all tiles of keys that one of their windows touches: one
    for each tile of the window, and one more. Keys of wider heads count as more of them.
    """
    beyond = np.maximum(np.minimum(rates.attention_tile, batch.seq_len) - ATTENTION_TILE, 0) / 2
    full = keys_seen(batch.seq_len) + beyond
    if not np.any(model.num_windowed_layers):
        return full
    share = model.num_windowed_layers / model.num_layers
    tiles = np.ceil((model.window - 1) / rates.attention_tile) + 1
    touched = np.minimum(np.where(model.window > 0, tiles * rates.attention_tile, 0), batch.seq_len)
    windowed = keys_seen(batch.seq_len, window=touched) + beyond * touched / batch.seq_len
    return full * (1 - share) * model.full_head_ratio + share * windowed


def _reached(ratio: Array, model: ModelTable, rates: DeviceRates, *, gemms: Array = 1.0) -> Array:
    """Share of the peak that a fused kernel reaches on long sequences; `ratio` is its share with heads of 128.

    Systolic arrays pad heads to a multiple of their width, which lengthens GEMMs and not exponentials. A
    board with a part `s` of its die's matrix rate needs 1 / s of the time for GEMMs, and the same time for
    the rest:

        reached = 1 / (1 + s (1 / ratio - 1))

    Narrower heads have as many exponentials beside fewer FLOPs. With `e` of `EXPONENTIAL_SHARES`, over the
    `gemms` of a pass, of which forward is 1:

        reached(d) = 1 / (1 / reached(128) + s e / gemms (128 / d - 1))
    """
    unit_width = rates.matrix_unit_width
    ratio = 1 / (1 + rates.matrix_share * (1 / ratio - 1))
    heads = model.qk_dim + model.v_dim
    narrower = np.maximum(WIDE_HEAD / (0.5 * heads) - 1, 0.0)
    on_cores = 1 / (1 / ratio + rates.matrix_share * rates.exponential_share / gemms * narrower)
    unit = np.maximum(unit_width, 1)
    padded = unit * (np.ceil(model.qk_dim / unit) + np.ceil(model.v_dim / unit))
    others = (1 / ratio - 1) * 2 * WIDE_HEAD
    return np.where(np.asarray(unit_width) > 0, heads / (padded + others), on_cores)


def gathered_keys(model: ModelTable, batch: BatchTable) -> Array:
    """Keys that gathering attention computes for a query: window, selected and compressed keys.

    All lists of selected keys have one length: masked keys fill the lists of early queries.
    """
    window = keys_seen(batch.seq_len, window=model.window) * model.is_shared
    listed = np.minimum(model.top_keys, batch.seq_len / np.maximum(model.index_stride, 1))
    return window + model.selected_share * listed + model.pooled_share * pooled_keys(model, batch.seq_len)


def attention_passes(s: LayerShapes) -> PassTimes:
    """Attention to all keys, or to the selected ones where that is less work."""
    every = _attention_core(s.model, s.batch, s.plan, s.rates, s.tokens)
    if not has_sparse_attention(s.model):
        return every
    return _gathering_attention(s).where(gathers_keys(s.model, s.batch.seq_len), every)


def _gathering_attention(s: LayerShapes) -> PassTimes:
    """Attention in which one vector a key serves all heads, mean over layers.

    Short lists lower the rate as short sequences do: k keys take the time of k + 250 keys at the rate of long
    sequences. Keys that an indexer selects are gathered, and their gradients scattered.
    """
    model, rates, batch = s.model, s.rates, s.batch
    width = np.where(model.is_mla > 0, latent_width(model), model.qk_dim + model.v_dim)
    filled = gathered_keys(model, batch) + ATTENTION_FILL_KEYS
    flops = s.tokens * 2 * model.num_heads / s.plan.tensor * width * filled
    share, peak = model.selected_share, rates.bf16_flops_per_s
    forward = peak * rates.attention_forward_ratio * (1 - share + share * GATHERED_FORWARD)
    backward = peak * rates.attention_backward_ratio * (1 - share + share * GATHERED_BACKWARD)
    return PassTimes(
        forward_s=flops / forward + rates.kernel_s,
        input_s=FUSED_BACKWARD_GEMMS * flops / backward + rates.kernel_s,
        weight_s=0.0,
    )


def _attention_core(
    model: ModelTable, batch: BatchTable, plan: PlanTable, rates: DeviceRates, tokens: Array
) -> PassTimes:
    """Scores and values, mean over full and windowed layers of one micro-batch on one rank."""
    keys = computed_keys(model, batch, rates)
    per_token = 2 * model.num_heads / plan.tensor * (model.qk_dim + model.v_dim)
    # An unfused kernel computes the whole square and moves the probabilities through memory.
    flops = tokens * per_token * np.where(rates.unfused_attention > 0, batch.seq_len, keys)
    scores = tokens * model.num_heads / plan.tensor * batch.seq_len * 2.0
    traffic = rates.unfused_attention * scores / rates.streaming_bytes_per_s
    unfused = rates.unfused_attention > 0
    aligned = np.where(model.qk_dim % ALIGNED_HEAD_DIM == 0, 1.0, UNALIGNED_RATIO)
    fill = keys / (keys + ATTENTION_FILL_KEYS)
    forward, backward = (
        np.where(unfused, rates.bf16_gemm_ratio * aligned, fill * _reached(ratio, model, rates, gemms=gemms))
        for ratio, gemms in (
            (rates.attention_forward_ratio, 1.0),
            (rates.attention_backward_ratio, rates.attention_backward_gemms),
        )
    )
    backward_flops = np.where(unfused, UNFUSED_BACKWARD_GEMMS, rates.attention_backward_gemms) * flops
    shape = (model.num_heads * plan.micro_batch / plan.tensor, batch.seq_len / plan.context, model.qk_dim)
    peak = rates.bf16_flops_per_s
    forward = forward * np.where(rates.fp8_attention > 0, FP8_FORWARD_GAIN, 1.0)
    backward = backward * np.where(rates.fp8_attention > 0, FP8_BACKWARD_GAIN, 1.0)
    forward_s = flops / (peak * forward) + UNFUSED_FORWARD_ACCESSES * traffic + rates.kernel_s
    backward_s = backward_flops / (peak * backward) + UNFUSED_BACKWARD_ACCESSES * traffic + rates.kernel_s
    return PassTimes(
        forward_s=forward_s * rates.corrections.factor("attention/forward", *shape),
        input_s=backward_s * rates.corrections.factor("attention/backward", *shape),
        weight_s=0.0,
    )
