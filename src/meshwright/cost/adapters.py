"""Seconds of a layer's low-rank adapters (LoRA) for one micro-batch on one rank.

    y = W x + s B A x       A [r, k], B [n, r], r of 8 to 64

An adapter's GEMMs do 2 r FLOP for each element that they read, too few to keep a device busy: only bytes and
launches count. A GEMM whose result is added accumulates into the other term, as `addmm` does. Elements of 16
bits that move per token, without the r of the narrow side:

    forward   k       A reads x                2 n   B adds to W x
    inputs    n       B' reads the gradient    2 k   A' adds to the gradient of x
    weights   n + k   both read the inputs of the GEMMs above
    dropout   2 k     forward, and again backward

DoRA reads a weight in 16 bits, and in fp32 writes it, reads it, writes its sum with the update and reads that for its
norm: 18 bytes. Six passes over the outputs resize them, and as many backward.

Tensor ranks split n of query, key, value, gate and up, and k of output and down; the other side is whole, or under
sequence parallelism split for the outputs. Hu et al. 2021, arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.passes import NO_PASSES, PassTimes
from meshwright.cost.tables import ModelTable, PlanTable

ELEMENT_BYTES = 2.0

RESIZING, NORM_BYTES = 6, 18
"""Of DoRA: passes over outputs, and bytes that move for the norm of a weight."""

NUM_GEMMS = 2
"""GEMMs of an adapter in each of its three passes."""


def adapter_passes(
    model: ModelTable, plan: PlanTable, tokens: Array, *, bytes_per_s: Array, kernel_s: Array
) -> PassTimes:
    """Passes of a layer's adapters; nothing where every parameter is trained."""
    if not np.any(model.num_adapters):
        return NO_PASSES
    inputs = model.lora_column_inputs + model.lora_row_inputs / plan.tensor
    stream = np.where(plan.sequence_parallel > 0, plan.tensor, 1)
    outputs = model.lora_column_outputs / plan.tensor + model.lora_row_outputs / stream
    element_s = tokens * ELEMENT_BYTES / bytes_per_s
    dropout = 2 * model.lora_dropout
    launches = model.num_adapters * kernel_s
    resizing_s = element_s * RESIZING * model.dora_outputs / plan.tensor
    norms_s = NORM_BYTES * model.dora_weights / plan.tensor / bytes_per_s
    return PassTimes(
        forward_s=element_s * ((1 + dropout) * inputs + 2 * outputs)
        + (NUM_GEMMS + model.lora_dropout) * launches
        + resizing_s
        + norms_s,
        input_s=element_s * ((2 + dropout) * inputs + outputs)
        + (NUM_GEMMS + model.lora_dropout) * launches
        + resizing_s,
        weight_s=element_s * (inputs + outputs) + NUM_GEMMS * launches,
    )
