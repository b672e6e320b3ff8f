"""Seconds of kernels on one device: GEMM, grouped GEMM, attention, memory-bound work, launches.

GEMM of m x n outputs and depth k, on U compute units of which each computes one output tile at a time:

    waves  = ceil(ceil(m / tm) ceil(n / tn) / U)
    t_math = waves tm tn (k + k0) 2 U / (P u e_tile)      the least over the tile shapes a library chooses from
    t_gemm = max(t_math, bytes / (B r)) + t_kernel

P peak of the number format, u the share of it that large GEMMs reach (clock under power, pipeline fill), k0 the
prologue and epilogue of a tile in units of depth, B memory bandwidth, r the share of it that streaming reaches.
Waves make efficiency a function of shape: 133 tiles on 132 units take the time of 264.
Attention: FLOPs of `cost.flops` over its own measured share of the 16-bit peak. Everything else moves bytes, at
B r / (1 + B r / (U c)) where each unit loads at most c bytes/s.
Sources: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantisation); Williams et al. 2009
(roofline). All shares and times are calibrated: calibration/data.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

import numpy as np

from meshwright.arrays import Array, Table
from meshwright.calibration.correction import EfficiencyCorrection
from meshwright.cost import linear_attention
from meshwright.cost.adapters import adapter_passes
from meshwright.cost.attention import attention_passes, computed_keys, gathered_keys
from meshwright.cost.elementwise import FusedKernels, casts_gated, elementwise_times, memory_bound
from meshwright.cost.flops import count_parameters, keys_seen
from meshwright.cost.layer_shapes import LayerShapes
from meshwright.cost.passes import NO_PASSES, PassTimes
from meshwright.cost.sparse_attention import added_kernels, has_sparse_attention, indexer_passes
from meshwright.cost.state_space import scan_passes
from meshwright.kernels.traffic import (
    HIDDEN_GRADIENT_COPY,
    LOSS_OF_LOGITS,
    LOSS_OF_SHARDED_LOGITS,
    loss_rows,
    num_chunks,
    weight_sum_bytes,
)

ROUTER_ACCESSES = 4
"""Reads or writes per token and expert: scores and top-k. Assumed."""

LOSS_BYTES = 6.0
"""Per logit: the loss reads and writes logits in 16 and 32 bits, three times in all."""

EXPERT_STREAMS = 4
"""Streams over which the GEMMs of a rank's experts start where each is a kernel of its own (Transformer Engine)."""

FUSED_CASTS = 0.5
"""Share of the quantisation around experts that fused kernels leave: inputs are quantised, activations are not written
in 16 bits (NVIDIA-NeMo/Megatron-Bridge issue 2885)."""


@dataclass(frozen=True, kw_only=True)
class GemmTiles:
    """Output tiles that a library chooses from, and the depth that starting one costs (`kernels.toml` says whence)."""

    shapes: tuple[tuple[float, float, float], ...]  # rows, columns, share of the best tile's rate
    depth: float


@cache
def gemm_tiles() -> GemmTiles:
    """The tiles of calibration/data/kernels.toml."""
    text = (files("meshwright.calibration") / "data" / "kernels.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    return GemmTiles(shapes=tuple(tuple(shape) for shape in data["tiles"]), depth=data["tile_depth"])


@dataclass(frozen=True, kw_only=True)
class KernelCorrections:
    """Measured over modelled kernel times, by shape; empty where nothing was measured."""

    linear: Mapping[str, EfficiencyCorrection] = field(default_factory=dict)  # "gemm/forward", ... in the matmul format
    bf16: Mapping[str, EfficiencyCorrection] = field(default_factory=dict)  # the same in 16 bits

    def factor(self, kernel: str, *shape: Array, bf16: bool = False) -> Array:
        """The factor on the seconds of `kernel`; 1 where nothing was measured."""
        correction = (self.bf16 if bf16 else self.linear).get(kernel)
        return 1.0 if correction is None else correction.factor(*shape)


@dataclass(frozen=True, kw_only=True)
class DeviceFacts(Table):
    """Data sheet of one device, and traits of the kernels that a software stack runs on it."""

    matmul_flops_per_s: Array  # dense peak of the recipe's matmul format
    bf16_flops_per_s: Array  # dense 16-bit peak
    memory_bytes_per_s: Array
    memory_bytes: Array
    num_units: Array  # that compute output tiles at the same time; 0: no tile quantisation (systolic arrays)
    output_tiles: Array  # 1: GEMMs are made of output tiles; 0: of any shape, so that FLOPs and bytes alone count
    matrix_unit_width: Array  # of systolic arrays; 0: none
    unfused_attention: Array  # 1: scores are written to memory
    unfused_norm: Array  # 1: norms run as several kernels with fp32 copies
    fp8_attention: Array  # 1: scores and values are multiplied in 8 bits
    fused_experts: Array  # 1: grouped GEMMs quantise, activate and permute by themselves
    attention_tile: Array  # keys that attention computes together, whatever a mask hides of them
    remakes_logits: Array  # 1: those of a chunk of the loss are made again in the backward pass
    attention_backward_gemms: Array  # FLOPs of the backward pass of fused attention over those of the forward pass
    ragged_rows: Array  # that a grouped GEMM computes of each expert beyond its own
    fused: FusedKernels  # the native engine's own
    wide_dense: Array = 0.0  # 1: all GEMMs but the grouped ones stay in 16 bits
    wide_experts: Array = 0.0  # 1: the grouped ones do
    routed_accesses: Array = 0.0  # of a routed row in one forward pass, besides those of `permutation_passes`
    loops_experts: Array = 0.0  # 1: a kernel for each expert, one after the other, in place of a grouped GEMM
    matrix_share: Array = 1.0  # matrix rate of a compute unit over the one that attention's ratios belong to
    exponential_share: Array = 0.25  # cycles of attention's exponentials over those of its GEMMs, heads of 128, forward
    unit_pace: Array = 0.0  # seconds through ports of compute units over those of memory (`cost.unit_ports`)
    clock_width: Array = 0.0  # `Accelerator.clock_width`
    scan_pace: Array = 1.0  # seconds of a state-space scan's bytes over those at the memory's bandwidth


@dataclass(frozen=True, kw_only=True)
class DeviceRates(DeviceFacts):
    """Rates that one device reaches with one software stack: datasheet and calibration together."""

    gemm_ratio: Array  # share of matmul_flops_per_s of a large GEMM
    bf16_gemm_ratio: Array  # share of bf16_flops_per_s of a large 16-bit GEMM
    sustained_ratio: Array  # share of the peaks that a whole layer can sustain within the power limit
    grouped_ratio: Array  # grouped GEMM against a plain GEMM of the same tiles
    attention_forward_ratio: Array  # share of bf16_flops_per_s
    attention_backward_ratio: Array
    memory_ratio: Array  # share of memory_bytes_per_s of streaming kernels
    elementwise_factor: Array  # bytes moved against perfectly fused elementwise work
    permutation_passes: Array  # reads and writes of routed tokens in one forward pass
    head_factor: Array  # embedding, output matrix and loss against the sum of `_head`
    elementwise_kernels: Array  # memory-bound kernels of one layer's forward pass
    kernel_s: Array  # start and end of one kernel on the device
    host_layer_s: Array  # host time to issue one layer's forward pass
    host_moe_s: Array  # additional host time of a mixture-of-experts layer (routing, permutation, synchronisation)
    host_expert_s: Array  # host time to start one kernel of one expert
    corrections: KernelCorrections = field(default_factory=KernelCorrections)

    @property
    def streaming_bytes_per_s(self) -> Array:
        """Bytes/s of kernels of a step that stream: r B / (1 + r B / (U c)), of memory and ports one after the other.

        U compute units load at most c bytes/s each (`UNIT_PORT_BYTES_PER_S`). Copies that are tuned hide one of the
        two behind the other and reach r B.
        """
        return self.memory_bytes_per_s * self.memory_ratio / (1 + self.memory_ratio * self.unit_pace)


def _tile_seconds(m: Array, n: Array, k: Array, groups: Array, flops_per_s: Array, units: Array) -> Array:
    offered = gemm_tiles()
    best: Array = np.inf
    quantised = units > 0
    u = np.maximum(units, 1)
    for tile_m, tile_n, share in offered.shapes:
        full = groups * np.ceil(m / tile_m) * np.ceil(n / tile_n) / u
        # Stream-K and persistent kernels balance about half of the last wave's loss.
        waves = np.where(quantised, np.maximum(0.5 * (np.ceil(full) + full), 1.0), full)
        best = np.minimum(best, waves * (tile_m * tile_n / share))
    return best * u * 2.0 * (k + offered.depth) / flops_per_s


def gemm_s(
    m: Array,
    n: Array,
    k: Array,
    *,
    flops_per_s: Array,
    bytes_per_s: Array,
    num_units: Array,
    kernel_s: Array,
    output_tiles: Array = 1,
    groups: Array = 1,
    element_bytes: Array = 2.0,
    unit_width: Array = 0,
) -> Array:
    """Seconds of `groups` equal GEMMs (m x k) (k x n) in one kernel.

    m, n, k: per group. flops_per_s and bytes_per_s are what large kernels reach. Systolic arrays of `unit_width` hold
    whole blocks of k and n, through which the m rows pass. A GEMM without work costs nothing.
    """
    tiled = _tile_seconds(m, n, k, groups, flops_per_s, num_units)
    whole = 2.0 * groups * m * _filled(n, unit_width) * _filled(k, unit_width) / flops_per_s
    math = np.where(np.asarray(output_tiles) > 0, tiled, whole)
    moved = groups * (element_bytes * (m * k + k * n) + 2.0 * m * n)
    return np.where(m * n * k > 0, np.maximum(math, moved / bytes_per_s) + kernel_s, 0.0)


def _filled(size: Array, unit_width: Array) -> Array:
    """`size`, padded to a multiple of the width of systolic arrays; 0: there are none."""
    unit = np.maximum(unit_width, 1)
    return np.where(np.asarray(unit_width) > 0, np.ceil(size / unit) * unit, size)


@dataclass(frozen=True, kw_only=True)
class LayerCompute:
    """One layer of each kind on one device for one micro-batch, by kernel family; no communication."""

    attention_gemm: PassTimes
    attention_core: PassTimes  # mean of full and windowed layers
    indexer: PassTimes  # with the selection of keys
    dense_ffn: PassTimes
    experts: PassTimes  # grouped GEMMs and shared experts
    router: PassTimes  # scores, top-k, permutation
    adapters: PassTimes
    state_space: PassTimes  # of a hybrid, mean over its layers
    linear_attention: PassTimes  # mean over all layers
    elementwise: PassTimes  # norms, residual, rotary embedding, casts of one dense layer
    moe_elementwise: PassTimes
    head: PassTimes  # output matrix and loss
    norm_s: Array  # forward seconds of both norms, of the activation, of the experts' activation: parts of the above
    activation_s: Array
    moe_activation_s: Array
    dense_floor: PassTimes  # least time of a dense layer's arithmetic at the sustained rate
    moe_floor: PassTimes
    latent_up: PassTimes  # the part of attention_gemm that expands MLA's latent; recomputed by mla_up_projection


def layer_compute(s: LayerShapes) -> LayerCompute:
    """Kernel times of one micro-batch."""
    model, plan, rates, tokens = s.model, s.plan, s.rates, s.tokens
    attention_gemm, latent_up = _attention_gemm(s)
    kernels = elementwise_times(s)
    starts = memory_bound((rates.elementwise_kernels * model.blocks + added_kernels(model)) * rates.kernel_s)
    dense_floor, moe_floor = _floors(s)
    return LayerCompute(
        attention_gemm=attention_gemm.times(model.attention_share),
        attention_core=attention_passes(s).times(model.attention_share),
        indexer=_indexer(s),
        dense_ffn=_feed_forward(s, model.ffn).times(model.ffn_share),
        experts=_experts(s).times(model.moe_share),
        router=_router(s).times(model.moe_share),
        adapters=adapter_passes(model, plan, tokens, bytes_per_s=s.streaming_bytes_per_s, kernel_s=rates.kernel_s),
        state_space=_state_space(s),
        linear_attention=_linear_attention(s),
        elementwise=kernels.of_layer(is_moe=False) + starts,
        moe_elementwise=kernels.of_layer(is_moe=True) + starts,
        head=_head(s),
        norm_s=kernels.norms_again_s,
        activation_s=kernels.activation.forward_s,
        moe_activation_s=kernels.moe_activation.forward_s,
        dense_floor=dense_floor,
        moe_floor=moe_floor,
        latent_up=latent_up,
    )


def compute_details(s: LayerShapes) -> dict[str, dict[str, Array]]:
    """Seconds of the head and of memory-bound kernels of all layers by name, for a plan and one micro-batch."""
    model, rates, kernels = s.model, s.rates, elementwise_times(s)
    dense, moe = model.num_dense_layers, model.num_moe_layers
    starts = memory_bound((rates.elementwise_kernels * model.blocks + added_kernels(model)) * rates.kernel_s)
    head = _linear_cross_entropy(s) if np.all(rates.fused.loss) else _calibrated_head(s)
    factor = rates.head_factor * (1 + model.num_mtp_layers)
    return {
        "head": {name: passes.total_s * factor for name, passes in head.items()},
        "elementwise": {
            "norms and residual stream": kernels.stream.total_s * (dense + moe),
            "rotary embedding": kernels.rotary.total_s * (dense + moe),
            "activations": kernels.activation.total_s * dense + kernels.moe_activation.total_s * moe,
            "sums of gradients": kernels.joined.total_s * dense + kernels.moe_joined.total_s * moe,
            "starts of kernels": starts.total_s * (dense + moe),
        },
    }


def _linear(
    s: LayerShapes,
    m: Array,
    n: Array,
    k: Array,
    *,
    bf16: bool = False,
    groups: Array = 1,
    grouped: bool = False,
    casts_input: Array = 1,
    casts_gradient: Array = 1,
) -> PassTimes:
    """One linear layer: its GEMM forward and both GEMMs backward, with the casts of narrow formats.

    m rows (tokens), n outputs, k inputs. `bf16`: in 16 bits in every recipe but fp32, where it is in fp32.
    `casts_input` and `casts_gradient`: 0 where the kernel that computes the tensor casts it.
    """
    rates, b_in, streaming = s.rates, s.precision.linear_input_bytes, s.streaming_bytes_per_s
    wide = bf16 | (np.asarray(rates.wide_experts if grouped else rates.wide_dense) > 0)
    in_16_bits = wide & (np.asarray(b_in) <= 2)
    bf16_peak, narrow_peak = rates.bf16_flops_per_s * rates.bf16_gemm_ratio, rates.matmul_flops_per_s * rates.gemm_ratio
    peak = np.where(in_16_bits, bf16_peak, narrow_peak)
    element_bytes = np.where(in_16_bits, 2.0, b_in)
    in_bf16 = bool(np.all(in_16_bits))
    loops = np.asarray(rates.loops_experts) > 0 if grouped else False
    kernels, together = np.where(loops, groups, 1), np.where(loops, 1, groups)
    rate = peak * np.where(together > 1, rates.grouped_ratio, 1.0) if grouped else peak

    def seconds(layout: str, rows: Array, columns: Array, depth: Array) -> Array:
        correction = rates.corrections.factor(f"gemm/{layout}", rows, columns, depth, bf16=in_bf16)
        if grouped:  # tiles of all groups fill the device: a correction measured on one GEMM does not apply
            correction = np.where(np.asarray(rates.output_tiles) > 0, 1.0, correction)
        time_s = gemm_s(
            rows,
            columns,
            depth,
            flops_per_s=rate,
            bytes_per_s=streaming,
            num_units=rates.num_units,
            kernel_s=rates.kernel_s,
            output_tiles=rates.output_tiles,
            groups=together,
            element_bytes=element_bytes,
            unit_width=rates.matrix_unit_width,
        )
        return kernels * correction * time_s

    # Quantising reads 16 bits and writes the narrow format: inputs forward, output gradients backward, transposed too
    # where a weight gradient multiplies them. Scales of the tensor itself take another read before. Quantised weights
    # are kept for all micro-batches of a step.
    moved = 2 * (1 + s.precision.amax_passes) + (1 + s.trained) * b_in
    cast_passes: Array = np.where(wide, 0.0, s.precision.cast_passes)
    casts = cast_passes * moved * groups / streaming
    starts: Array = 0.0
    if grouped:
        fused = s.fused_experts > 0
        casts = casts * np.where(fused, FUSED_CASTS, 1.0)
        separate = (np.where(loops, 0.0, 1 / EXPERT_STREAMS) + cast_passes) * np.maximum(groups - 1, 0) * rates.kernel_s
        starts = np.where(fused | (np.asarray(rates.output_tiles) == 0), 0.0, separate)
    return PassTimes(
        forward_s=seconds("forward", m, n, k) + casts_input * casts * m * k + starts,
        input_s=seconds("input_gradient", m, k, n) + casts_gradient * casts * m * n + starts,
        weight_s=(seconds("weight_gradient", n, k, m) + starts) * s.trained,
    )


def _attention_gemm(s: LayerShapes) -> tuple[PassTimes, PassTimes]:
    """(all projections, the part of them that expands MLA's latent)."""
    model, t, tokens, h = s.model, s.plan.tensor, s.tokens, s.model.hidden
    nq, d, dv = model.num_heads, model.qk_dim, model.v_dim
    queries, projected = model.query_heads, model.projected_kv_heads
    grouped_query = _linear(s, tokens, (queries * d * (1 + model.output_gate) + projected * (d + dv)) / t, h)
    output = _linear(s, tokens, h, queries * dv / t)
    if not np.any(model.is_mla):
        return _or_shared(s, grouped_query + output), NO_PASSES
    query = _linear(s, tokens, np.where(model.q_rank > 0, model.q_rank, nq * d / t), h)
    query_up = _linear(s, tokens, nq * d / t, model.q_rank)
    key_value = _linear(s, tokens, model.kv_rank + model.rope_dim, h)
    key_value_up = _linear(s, tokens, nq * (d - model.rope_dim + dv) / t, model.kv_rank)
    is_mla = (model.is_mla > 0) * 1.0
    latent_up = (query_up + key_value_up).times(is_mla)
    projections = grouped_query.times(1 - is_mla) + (query + key_value).times(is_mla) + latent_up
    return _or_shared(s, projections + output), latent_up


def _or_shared(s: LayerShapes, projections: PassTimes) -> PassTimes:
    """Return `projections`, or the projections of DeepSeek-V4 where a model has them."""
    if not np.any(s.model.is_shared):
        return projections
    return _shared_attention_gemm(s).where(s.model.is_shared, projections)


def _shared_attention_gemm(s: LayerShapes) -> PassTimes:
    """Projections of DeepSeek-V4: query and output at low rank, one key-value vector, values and gates of compressed
    keys."""
    model, t, tokens, h, d = s.model, s.plan.tensor, s.tokens, s.model.hidden, s.model.qk_dim
    groups, inputs = (np.maximum(model.output_groups, 1) / t, model.num_heads * d / np.maximum(model.output_groups, 1))
    compressed = 2 * model.selected_share + model.pooled_share
    return (
        _linear(s, tokens, model.q_rank + d, h)
        + _linear(s, tokens, model.num_heads * d / t, model.q_rank)
        + _linear(s, tokens, model.output_rank, inputs, groups=groups)
        + _linear(s, tokens, h, model.output_rank * groups)
        + _linear(s, tokens, 2 * d, h).times(compressed)
    )


def _indexer(s: LayerShapes) -> PassTimes:
    rates = s.rates
    return indexer_passes(
        s.model, s.tokens, s.batch.seq_len,
        linear=lambda outputs, inputs: _linear(s, s.tokens, outputs, inputs),
        flops_per_s=rates.matmul_flops_per_s * rates.attention_forward_ratio,
        attention_flops_per_s=rates.bf16_flops_per_s * rates.attention_forward_ratio,
        bytes_per_s=s.streaming_bytes_per_s,
        kernel_s=rates.kernel_s,
    )  # fmt: skip


def _feed_forward(s: LayerShapes, width: Array) -> PassTimes:
    """A dense feed-forward block of this width, split over tensor ranks."""
    up = (s.model.ffn_matrices - 1) * width / s.plan.tensor
    inside = 1 - casts_gated(s.precision, s.rates.fused)
    return _linear(s, s.tokens, up, s.model.hidden, casts_gradient=inside) + _linear(
        s, s.tokens, s.model.hidden, width / s.plan.tensor, casts_input=inside
    )


def _state_space(s: LayerShapes) -> PassTimes:
    """State-space blocks: both projections, convolution, scan and norm."""
    model, rates, t = s.model, s.rates, s.plan.tensor
    if not np.any(model.state_space_share):
        return NO_PASSES
    inputs = model.state_inner + model.state_convolved + model.state_heads
    projections = _linear(s, s.tokens, inputs / t, model.hidden) + _linear(
        s, s.tokens, model.hidden, model.state_inner / t
    )
    scan = scan_passes(
        model, s.plan, s.tokens,
        element_s=s.element_s * rates.scan_pace,
        flops_per_s=rates.bf16_flops_per_s * rates.attention_forward_ratio,
        kernel_s=rates.kernel_s,
    )  # fmt: skip
    return projections.times(model.state_space_share) + scan


def _linear_attention(s: LayerShapes) -> PassTimes:
    """Layers of linear attention: projections, convolution, norms, gates, and the delta rule."""
    model, rates, t, h = s.model, s.rates, s.plan.tensor, s.model.hidden
    if not np.any(model.linear_share):
        return NO_PASSES
    outputs, between = linear_attention.projected(model)
    projections = _linear(s, s.tokens, (outputs - between) / t + between, h)
    projections = projections + _linear(s, s.tokens, h, model.linear_values / t)
    if np.any(between):
        projections = projections + _linear(
            s, s.tokens, (model.linear_keys + model.linear_values) / t, between / 2, bf16=True
        )
    elements = s.tokens * linear_attention.elementwise_elements_per_token(model) / t
    rest = memory_bound(elements * rates.elementwise_factor * s.element_s + linear_attention.KERNELS * rates.kernel_s)
    rule = linear_attention.rule_passes(
        model, tokens=s.tokens, seq_len=s.batch.seq_len, tensor=t,
        flops_per_s=rates.bf16_flops_per_s * rates.attention_forward_ratio,
        bytes_per_s=s.streaming_bytes_per_s, num_units=rates.num_units,
    )  # fmt: skip
    return (projections + rest + rule).times(model.linear_share)


def _experts(s: LayerShapes) -> PassTimes:
    """Routed experts of one rank as grouped GEMMs, and the shared ones."""
    model, h = s.model, s.model.hidden
    if not np.any(s.has_experts):
        return NO_PASSES
    local = s.num_experts / s.plan.expert  # experts on this rank
    per_expert = s.expert_tokens / np.maximum(local, 1) + s.rates.ragged_rows
    width, inside = model.expert_ffn / s.plan.expert_tensor, 1 - casts_gated(s.precision, s.rates.fused)
    up = (model.ffn_matrices - 1) * width
    outer = model.expert_hidden
    routed = _linear(s, per_expert, up, outer, groups=local, grouped=True, casts_gradient=inside)
    routed = routed + _linear(s, per_expert, outer, width, groups=local, grouped=True, casts_input=inside)
    if np.any(model.latent):
        here = s.tokens / s.stream_split  # every tensor rank holds both projections and its own tokens
        routed = routed + _linear(s, here, model.latent, h) + _linear(s, here, h, model.latent)
    if not np.any(model.shared_ffn):
        return routed.times(s.has_experts)
    shared = _feed_forward(s, model.shared_ffn)
    return routed.times(s.has_experts) + shared.times(s.has_experts * (model.shared_ffn > 0))


def _router(s: LayerShapes) -> PassTimes:
    """Scores, top-k, and permutation: reads or writes of the routed tokens around both all-to-alls, and more copies."""
    if not np.any(s.has_experts):
        return NO_PASSES
    scores = _linear(s, s.tokens / s.stream_split, s.num_experts, s.model.hidden, bf16=True)
    passes = s.rates.permutation_passes + s.rates.routed_accesses
    elements = passes * s.expert_tokens * s.model.expert_hidden
    elements = elements + s.tokens * ROUTER_ACCESSES * s.num_experts / s.stream_split
    return (scores + memory_bound(elements * 2.0 / s.streaming_bytes_per_s)).times(s.has_experts)


def _floors(s: LayerShapes) -> tuple[PassTimes, PassTimes]:
    """Least time of a dense and of a mixture-of-experts layer at the rate that the power limit sustains."""
    model, t, tokens, parameters = s.model, s.plan.tensor, s.tokens, count_parameters(s.model)
    attention = 2 * tokens * parameters.attention_layer / t
    dense = 2 * tokens * parameters.dense_ffn_layer / t
    experts = s.expert_tokens * parameters.expert / s.plan.expert_tensor
    experts = (experts + 2 * tokens / s.stream_split * model.hidden * model.latent) * model.moe_share
    experts = 2 * (experts + tokens * parameters.shared_layer / t)
    keys = computed_keys(model, s.batch, s.rates)
    if has_sparse_attention(model):
        keys = np.minimum(keys, keys_seen(s.batch.seq_len) * (1 - model.is_shared) + gathered_keys(model, s.batch))
    core = tokens * keys * 2 * model.num_heads / t * (model.qk_dim + model.v_dim)
    core = core * model.attention_share
    return (_floor(attention, dense, core, s.rates, s.trained), _floor(attention, experts, core, s.rates, s.trained))


def _floor(attention: Array, ffn: Array, core: Array, rates: DeviceRates, trained: Array) -> PassTimes:
    """Forward FLOPs of one layer (projections, feed-forward, scores) at the sustained rate."""
    linear = (attention + ffn) / (rates.matmul_flops_per_s * rates.sustained_ratio)
    scores = core / (rates.bf16_flops_per_s * rates.sustained_ratio)
    return PassTimes(
        forward_s=linear + scores, input_s=linear + rates.attention_backward_gemms * scores, weight_s=linear * trained
    )


def _head(s: LayerShapes) -> PassTimes:
    """Output matrix and cross-entropy."""
    s = replace(s, model=replace(s.model, lora_rank=np.where(s.model.trains_head > 0, 0, s.model.lora_rank)))
    own = s.rates.fused.loss
    if np.all(own):
        return _sum_of(_linear_cross_entropy(s)).times(s.rates.head_factor)
    head = _sum_of(_calibrated_head(s))
    if np.any(own):
        head = _sum_of(_linear_cross_entropy(s)).where(own, head)
    return head.times(s.rates.head_factor)


def _sum_of(parts: Mapping[str, PassTimes]) -> PassTimes:
    first, *others = parts.values()
    return sum(others, start=first)


def _calibrated_head(s: LayerShapes) -> dict[str, PassTimes]:
    """The head of most stacks by part: all logits, which the loss reads and writes."""
    model, rates, tokens, vocab = s.model, s.rates, s.tokens, s.model.head_rows / s.plan.tensor
    loss = tokens * vocab * LOSS_BYTES / s.streaming_bytes_per_s * rates.elementwise_factor
    gemms = _linear(s, tokens, vocab, model.hidden, bf16=True)
    parts = {"GEMMs": gemms, "loss: passes over logits": PassTimes(forward_s=loss, input_s=loss, weight_s=0.0)}
    remade = (np.asarray(s.precision.loss_chunk) > 0) & (np.asarray(rates.remakes_logits) > 0)
    if np.any(remade):
        parts["loss: logits made again"] = replace(NO_PASSES, input_s=remade * (gemms.forward_s + loss))
    return parts


def _linear_cross_entropy(s: LayerShapes) -> dict[str, PassTimes]:
    """The head of the native engine's kernel by part: logits of a chunk of tokens, which their gradient
    overwrites, and the sum of the weight gradients of chunks."""
    vocab, hidden, element_bytes = s.model.head_rows / s.plan.tensor, s.model.hidden, s.precision.activation_bytes
    said = s.precision.loss_chunk
    rows = loss_rows(s.tokens, said=said, vocab=vocab, hidden=hidden, element_bytes=element_bytes, sums=s.trained)
    chunks = num_chunks(s.tokens, rows=rows)
    access_s = s.rates.fused.factor / s.streaming_bytes_per_s
    passes = np.where(s.plan.tensor > 1, LOSS_OF_SHARDED_LOGITS, LOSS_OF_LOGITS)
    sums = s.trained * vocab * hidden * weight_sum_bytes(chunks, element_bytes=element_bytes)
    gemms = _linear(s, s.tokens / chunks, vocab, hidden, bf16=True).times(chunks)
    logits_s = passes * s.tokens * vocab * element_bytes * access_s
    hidden_s = HIDDEN_GRADIENT_COPY * s.tokens * hidden * element_bytes * access_s
    return {
        "GEMMs": gemms,
        "loss: passes over logits": replace(NO_PASSES, forward_s=logits_s),
        "loss: copies of the gradient of hidden states": replace(NO_PASSES, input_s=hidden_s),
        "loss: sum of the head's gradient over chunks": replace(NO_PASSES, weight_s=sums * access_s),
    }
