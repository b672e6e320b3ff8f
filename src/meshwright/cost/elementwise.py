"""Seconds of norms, residual additions, rotary embedding and gated activations of one layer.

    seconds = elements x accesses x bytes of an element x factor / streaming bandwidth

An access is one read or one write. Most stacks are counted with the accesses of well fused kernels, and
`elementwise_factor` is calibrated on top; the backward pass reads the saved input and the gradient and writes
a gradient: twice the forward bytes. The native engine's own kernels (`FusedKernels`) have the accesses of
`kernels.traffic` in either pass, with the accesses that PyTorch adds around them:

    residual stream   the norm of attention's input, the norm of the sum before the feed-forward, the last addition;
                      backward the gradients of the layer's input, which two operations read, are added
    joined inputs     gradients that arrive at an input of several matrices (query, key, value; gate, up; router,
                      experts, shared experts) are added: on each tensor rank, before they are scattered
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.arrays import Array, Table
from meshwright.cost.layer_shapes import LayerShapes
from meshwright.cost.passes import PassTimes
from meshwright.cost.tables import ModelTable, PrecisionTable
from meshwright.kernels.traffic import (
    ADD_RMS_NORM,
    ADDITION,
    GATED_ACTIVATION,
    RMS_NORM,
    ROTARY,
    USED_TWICE,
    cast_bytes,
)

NORM_ACCESSES = 4
"""Two fused norms, each one read and one write."""

UNFUSED_NORM_ACCESSES = 24
"""Two norms of several kernels with fp32 copies: each moves 24 bytes per 16-bit element instead of 4."""

RESIDUAL_ACCESSES = 8
"""Residual additions and casts. Assumed; `elementwise_factor` is calibrated on top."""

STREAM_FORWARD_ACCESSES = (2, 8)
"""Hyper-connections around each of a layer's two blocks make 2 + 8 K reads or writes of a 16-bit stream: the
norm reads K streams and writes them in 32 bits, the GEMM of their weights reads the copies, the block's input
is read from K and written, and all are read again with its output and written (AMD-AGI/Primus,
core/transformer/hyper_connection.py, with its fused kernels)."""

STREAM_BACKWARD_ACCESSES = (3, 19)
"""Accesses of the backward pass, 3 + 19 K: 3 K + 2 of the last step, 2 K + 1 of the block's input, 4 K of the
GEMM in 32 bits and 4 K of the norm, and 6 K of adding the gradients of the streams, which three operations
read."""

SHARED_HEAD_ACCESSES = 6
"""Per element of queries and outputs of DeepSeek-V4's heads, forward: norm of each head, rotation into a new
tensor, rotation of outputs back. Backward as many again, sums for attention's gradient (2) and 32-bit
gradients of queries (4)."""

ROTARY_ACCESSES = 3
"""Per element of queries and keys. Assumed, as above."""

GATE_ACCESSES = 3
"""Per output of gated attention: it and the gate are read, and their product written."""

BIAS_ACCESSES = 14
"""Per output of an expert with a bias, which is added weighted with the router's probability: product, sum, joining of
the experts' parts and the cast back are four kernels, three of them in fp32, 28 bytes in all (Megatron-Core 0.16,
transformer/moe/experts.py, `TEGroupedMLP._apply_bias`; NeMo AutoModel does the same)."""

CLAMP_ACCESSES = 8
"""Per activation of an expert with a bias: gate and up are clamped and joined before the fused activation (the same,
fusions/fused_bias_geglu.py, `weighted_bias_quick_geglu_impl`). All models of the catalogue with such biases
clamp."""


@dataclass(frozen=True, kw_only=True)
class FusedKernels(Table):
    """1 where an operation is one of the native engine's Triton kernels, whose traffic is known; 0: as calibrated.

    `factor`: seconds of such a kernel over a copy of the same bytes: 1 unless it was measured on the device.
    """

    norm: Array = 0
    activation: Array = 0
    rotary: Array = 0
    loss: Array = 0
    factor: Array = 1.0


@dataclass(frozen=True, kw_only=True)
class ElementwiseTimes:
    """Memory-bound kernels of one layer by part, without their starts."""

    stream: PassTimes  # norms and residual additions
    rotary: PassTimes  # with norms of queries and keys
    activation: PassTimes
    moe_activation: PassTimes
    norms_again_s: Array  # forward seconds of both norms of inputs, where they are recomputed
    joined: PassTimes  # added gradients at inputs of several matrices; part of what is calibrated for other stacks
    moe_joined: PassTimes

    def of_layer(self, *, is_moe: bool) -> PassTimes:
        """All parts of a layer of one kind."""
        own = self.moe_activation + self.moe_joined if is_moe else self.activation + self.joined
        return self.stream + self.rotary + own


def memory_bound(forward_s: Array) -> PassTimes:
    """Backward reads the saved input and the gradient and writes a gradient: about twice the forward bytes."""
    return PassTimes(forward_s=forward_s, input_s=2.0 * forward_s, weight_s=0.0)


def elementwise_times(s: LayerShapes) -> ElementwiseTimes:
    """Times of one layer of each kind for one micro-batch."""
    calibrated, fused = _calibrated(s), s.rates.fused
    if not any(np.any(flag) for flag in (fused.norm, fused.activation, fused.rotary)):
        return calibrated
    own = _own(s)
    grouped = fused.rotary * (s.model.is_mla == 0)  # latent attention joins and splits heads around the kernel
    return ElementwiseTimes(
        stream=own.stream.where(fused.norm, calibrated.stream),
        rotary=own.rotary.where(grouped, calibrated.rotary),
        activation=own.activation.where(fused.activation, calibrated.activation),
        moe_activation=own.moe_activation.where(fused.activation, calibrated.moe_activation),
        norms_again_s=np.where(fused.norm > 0, own.norms_again_s, calibrated.norms_again_s),
        joined=own.joined.times(fused.norm),
        moe_joined=own.moe_joined.times(fused.norm),
    )


def _calibrated(s: LayerShapes) -> ElementwiseTimes:
    """Parts as stacks in general have them."""
    model, t, tokens, rates = s.model, s.plan.tensor, s.tokens, s.rates
    moved = rates.elementwise_factor * s.element_s
    norm = s.stream * np.where(rates.unfused_norm > 0, UNFUSED_NORM_ACCESSES, NORM_ACCESSES) * moved
    norm = norm * s.correction("rms_norm", s.stream)
    of_stream = s.correction("swiglu", s.stream)
    residual = memory_bound(RESIDUAL_ACCESSES * s.stream * model.blocks * moved * of_stream)
    if np.any(np.asarray(model.streams) > 1):
        residual = _mixed_streams(s).times(moved).where(np.asarray(model.streams) > 1, residual)
    rotary = tokens * _rotary_accesses(model) / t * model.attention_share * moved * of_stream
    activation = tokens * model.ffn_share * model.ffn_matrices * model.ffn / t * moved
    activation = activation * s.correction("swiglu", tokens * model.ffn / t)
    expert_width = s.routed * np.where(s.fused_experts > 0, 0.0, 1.0) + tokens * model.shared_ffn / t
    moe_activation = model.ffn_matrices * expert_width * moved * s.correction("swiglu", expert_width)
    moe_activation = model.moe_share * (moe_activation + _expert_bias_s(s)) + model.single_block * activation
    nothing = PassTimes(forward_s=0.0, input_s=0.0, weight_s=0.0)
    return ElementwiseTimes(
        stream=memory_bound(norm * model.num_norms / 2) + residual,
        rotary=memory_bound(rotary),
        activation=memory_bound(activation),
        moe_activation=memory_bound(moe_activation),
        norms_again_s=norm * model.blocks * model.block_inputs / 2,
        joined=nothing,
        moe_joined=nothing,
    )


def _mixed_streams(s: LayerShapes) -> PassTimes:
    """Elements that hyper-connections around both blocks of a layer read or write."""

    def elements(accesses: tuple[int, int]) -> Array:
        return 2 * s.stream * (accesses[0] + accesses[1] * s.model.streams)

    return PassTimes(
        forward_s=elements(STREAM_FORWARD_ACCESSES), input_s=elements(STREAM_BACKWARD_ACCESSES), weight_s=0.0
    )


def _own(s: LayerShapes) -> ElementwiseTimes:
    """Parts as the kernels of the native engine move them."""
    model, t, tokens = s.model, s.plan.tensor, s.tokens
    access_s = s.rates.fused.factor * s.element_s
    normed = s.correction("rms_norm", s.stream)
    forward, backward = stream_accesses(model)
    stream = PassTimes(forward_s=forward, input_s=backward, weight_s=0.0)
    stream = stream.times(model.blocks * s.stream * access_s * normed)
    heads = tokens * (model.query_heads + model.kv_heads) * model.qk_dim / t
    has_norms = model.head_norm_width > 0
    rotary = PassTimes(
        forward_s=heads * (ROTARY.forward + RMS_NORM.forward * has_norms),
        input_s=heads * (ROTARY.backward + RMS_NORM.backward * has_norms),
        weight_s=0.0,
    ).times(access_s * normed)
    dense, shared = tokens * model.ffn / t, tokens * model.shared_ffn / t
    gates = model.ffn_matrices - 2  # inputs of a gate and of another matrix
    attention_joins = np.where(model.is_mla > 0, 1, 2)
    # The router, the permutation, and shared experts where there are any, read the same input.
    has_shared = model.shared_ffn > 0
    gathered = (attention_joins + has_shared * gates) * tokens + gates * s.expert_tokens
    moe_joined = model.hidden * gathered + (1 + has_shared) * s.stream
    return ElementwiseTimes(
        stream=stream,
        rotary=rotary,
        activation=_gated(s, dense, access_s),
        moe_activation=_gated(s, s.routed + shared, access_s) + memory_bound(_expert_bias_s(s)),
        norms_again_s=2 * RMS_NORM.forward * s.stream * access_s * normed,
        joined=PassTimes(
            forward_s=0.0,
            input_s=USED_TWICE.backward * tokens * model.hidden * (attention_joins + gates) * access_s,
            weight_s=0.0,
        ),
        moe_joined=PassTimes(
            forward_s=ADDITION.forward * has_shared * s.stream * access_s,
            input_s=USED_TWICE.backward * moe_joined * access_s,
            weight_s=0.0,
        ),
    )


def stream_accesses(model: ModelTable) -> tuple[Array, Array]:
    """Accesses per element of the residual stream in one layer of the native engine, forward and backward.

    Norms of inputs, the second of them with the addition before it; norms of outputs; the last addition.
    """
    before = np.where(model.norms_inputs > 0, 1, 0)
    after = np.where((model.norms_inputs == 0) | (model.num_norms > 2), 2, 0)
    found = []
    for part in ("forward", "backward"):
        norm, sum_norm, sum_, twice = (
            getattr(passes, part) for passes in (RMS_NORM, ADD_RMS_NORM, ADDITION, USED_TWICE)
        )
        inputs = before * (norm + sum_norm) + (1 - before) * (sum_ + twice)
        in_turn = inputs + after * norm + sum_ + twice
        parallel = model.parallel_norms * (norm + twice) + 2 * sum_  # the residual reads the input besides
        found.append(np.where(np.asarray(model.parallel_norms) > 0, parallel, in_turn))
    return found[0], found[1]


def _gated(s: LayerShapes, elements: Array, access_s: Array) -> PassTimes:
    """The gated activation of `elements`. In 8 bits the same kernel casts it, and nothing is written in 16."""
    precision = s.precision
    times = access_s * elements * s.correction("swiglu", elements)
    wide = PassTimes(forward_s=GATED_ACTIVATION.forward, input_s=GATED_ACTIVATION.backward, weight_s=0.0)
    amax = precision.amax_passes
    narrow = PassTimes(
        forward_s=cast_bytes(num_read=2, num_cast=1, amax=amax) / precision.activation_bytes,
        input_s=cast_bytes(num_read=3, num_cast=2, amax=amax) / precision.activation_bytes,
        weight_s=0.0,
    )
    return narrow.where(casts_gated(precision, s.rates.fused), wide).times(times)


def casts_gated(precision: PrecisionTable, fused: FusedKernels) -> Array:
    """1 where the gated activation and its gradients are cast to 8 bits by the kernels that compute them."""
    return (np.asarray(fused.activation) > 0) * (precision.linear_input_bytes == 1) * 1


def _expert_bias_s(s: LayerShapes) -> Array:
    """Forward seconds of biases of experts and of their clamped activation."""
    model, routed = s.model, s.routed
    outputs = s.expert_tokens * model.expert_hidden
    separate = BIAS_ACCESSES * outputs + CLAMP_ACCESSES * routed
    fused = 2.0 * (outputs + (model.ffn_matrices - 1) * routed)  # sums of both gradients over tokens remain
    accesses = np.where(s.fused_experts > 0, fused, separate)
    return model.expert_bias * accesses * s.element_s


def _rotary_accesses(model: ModelTable) -> Array:
    """Elements per token that rotary embedding, norms of queries and keys and the output's gate read or write."""
    heads = (model.query_heads + model.kv_heads) * model.qk_dim
    grouped, head_norms = ROTARY_ACCESSES * heads, 2 * heads * (model.head_norm_width > 0)
    # Latent attention rotates a part of each query in place. Keys and values come from one GEMM: the kernel reads both,
    # and writes the keys with the rotated part that all heads share, and the values.
    expanded = model.qk_dim - model.rope_dim + model.v_dim
    latent = model.num_heads * (2 * model.rope_dim + expanded + model.qk_dim + model.v_dim)
    gate = model.output_gate * GATE_ACCESSES * model.num_heads * model.v_dim
    shared = SHARED_HEAD_ACCESSES * model.num_heads * model.qk_dim
    whole = np.where(model.is_mla > 0, latent, grouped + head_norms + gate)
    return np.where(model.is_shared > 0, shared, whole)
