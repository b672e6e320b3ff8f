"""How long kernels take on one device: GEMM, grouped GEMM, attention, memory-bound work, launches.

GEMM of m x n outputs and depth k, on U compute units of which each computes one output tile at a time:

    waves  = ceil(ceil(m / tm) ceil(n / tn) / U)
    t_math = waves tm tn (k + k0) 2 U / (P u e_tile)      the least over the tile shapes a library chooses from
    t_gemm = max(t_math, bytes / (B r)) + t_kernel

P peak of the number format, u the share of it that large GEMMs reach (clock under power, pipeline fill), k0 the
prologue and epilogue of a tile in units of depth, B memory bandwidth, r the share of it that streaming reaches.
Waves make efficiency a function of shape: a GEMM that needs 133 tiles on 132 units takes as long as one of 264.
Attention: FLOPs of `cost.flops` over its own measured share of the 16-bit peak. Everything else moves bytes.
Sources: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantisation); Williams et al. 2009
(roofline). All shares and times are calibrated: calibration/data.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import numpy as np

from meshwright.arrays import Array, Table
from meshwright.calibration.correction import EfficiencyCorrection
from meshwright.cost.flops import count_parameters, keys_seen
from meshwright.cost.tables import BatchTable, ModelTable, PlanTable, PrecisionTable


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
    """What measured kernels take beside the formulas here, by shape; empty where nothing was measured."""

    linear: Mapping[str, EfficiencyCorrection] = field(
        default_factory=dict
    )  # "gemm/forward", ... in the matmul format
    bf16: Mapping[str, EfficiencyCorrection] = field(default_factory=dict)  # the same in 16 bits

    def factor(self, kernel: str, *shape: Array, bf16: bool = False) -> Array:
        """What to multiply the seconds of `kernel` by."""
        correction = (self.bf16 if bf16 else self.linear).get(kernel)
        return 1.0 if correction is None else correction.factor(*shape)


@dataclass(frozen=True, kw_only=True)
class DeviceRates(Table):
    """What one device reaches with one software stack, datasheet and calibration joined."""

    matmul_flops_per_s: Array  # dense peak of the recipe's matmul format
    bf16_flops_per_s: Array  # dense 16-bit peak
    memory_bytes_per_s: Array
    memory_bytes: Array
    num_units: Array  # that compute output tiles at the same time; 0: no tile quantisation (systolic arrays)
    output_tiles: (
        Array  # 1: GEMMs are made of output tiles; 0: of any shape, so that FLOPs and bytes alone count
    )
    gemm_ratio: Array  # share of matmul_flops_per_s of a large GEMM
    bf16_gemm_ratio: Array  # share of bf16_flops_per_s of a large 16-bit GEMM
    sustained_ratio: Array  # share of the peaks that a whole layer can sustain within the power limit
    grouped_ratio: Array  # grouped GEMM against a plain GEMM of the same tiles
    attention_forward_ratio: Array  # share of bf16_flops_per_s
    attention_backward_ratio: Array
    memory_ratio: Array  # share of memory_bytes_per_s of streaming kernels
    elementwise_factor: Array  # bytes moved against perfectly fused elementwise work
    unfused_attention: Array  # 1: scores are written to memory
    unfused_norm: Array  # 1: norms run as several kernels with fp32 copies
    permutation_passes: Array  # reads and writes of routed tokens in one forward pass
    head_factor: Array  # embedding, output matrix and loss against what `_head` adds up
    elementwise_kernels: Array  # memory-bound kernels of one layer's forward pass
    kernel_s: Array  # start and end of one kernel on the device
    host_layer_s: Array  # host time to issue one layer's forward pass
    host_moe_s: (
        Array  # additional host time of a mixture-of-experts layer (routing, permutation, synchronisation)
    )
    corrections: KernelCorrections = field(default_factory=KernelCorrections)


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
) -> Array:
    """Seconds of `groups` equal GEMMs (m x k) (k x n) in one kernel.

    m, n, k: per group. flops_per_s and bytes_per_s are what large kernels reach. A GEMM without work costs nothing.
    """
    tiled = _tile_seconds(m, n, k, groups, flops_per_s, num_units)
    math = np.where(np.asarray(output_tiles) > 0, tiled, 2.0 * groups * m * n * k / flops_per_s)
    moved = groups * (element_bytes * (m * k + k * n) + 2.0 * m * n)
    return np.where(m * n * k > 0, np.maximum(math, moved / bytes_per_s) + kernel_s, 0.0)


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of one module in the forward pass and in the two halves of the backward pass."""

    forward_s: Array
    input_s: Array  # gradient of the inputs
    weight_s: Array  # gradient of the weights

    def __add__(self, other: PassTimes) -> PassTimes:
        return PassTimes(
            forward_s=self.forward_s + other.forward_s,
            input_s=self.input_s + other.input_s,
            weight_s=self.weight_s + other.weight_s,
        )

    def times(self, factor: Array) -> PassTimes:
        """`factor` of them one after the other."""
        return PassTimes(
            forward_s=self.forward_s * factor, input_s=self.input_s * factor, weight_s=self.weight_s * factor
        )

    @property
    def total_s(self) -> Array:
        return self.forward_s + self.input_s + self.weight_s


NOTHING = PassTimes(forward_s=0.0, input_s=0.0, weight_s=0.0)


@dataclass(frozen=True, kw_only=True)
class LayerCompute:
    """One layer of each kind on one device for one micro-batch, by kernel family; no communication."""

    attention_gemm: PassTimes
    attention_core: PassTimes  # mean of full and windowed layers
    dense_ffn: PassTimes
    experts: PassTimes  # grouped GEMMs and shared experts
    router: PassTimes  # scores, top-k, permutation
    elementwise: PassTimes  # norms, residual, rotary embedding, casts of one dense layer
    moe_elementwise: PassTimes
    head: PassTimes  # output matrix and loss
    norm_s: Array  # forward seconds of both norms, of the activation, of the experts' activation: parts of the above
    activation_s: Array
    moe_activation_s: Array
    dense_floor: PassTimes  # least time of a dense layer's arithmetic at the sustained rate
    moe_floor: PassTimes
    latent_up: (
        PassTimes  # the part of attention_gemm that expands MLA's latent; recomputed by mla_up_projection
    )


def layer_compute(
    *,
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    rates: DeviceRates,
    load_factor: Array = 1.0,
) -> LayerCompute:
    """Kernel times of one micro-batch. `load_factor`: busiest expert rank's tokens over the mean."""
    h, t = model.hidden, plan.tensor
    nq, nkv, d, dv = model.num_heads, model.num_kv_heads, model.qk_dim, model.v_dim
    tokens = batch.seq_len * plan.micro_batch / plan.context
    trained = 1 - (model.lora_rank > 0) * 1
    streaming = rates.memory_bytes_per_s * rates.memory_ratio
    b_in = precision.linear_input_bytes

    def linear(
        m: Array, n: Array, k: Array, *, bf16: bool = False, groups: Array = 1, grouped: bool = False
    ) -> PassTimes:
        peak, element_bytes = rates.matmul_flops_per_s * rates.gemm_ratio, b_in
        if bf16:  # but in fp32 nothing is narrower
            peak = np.where(b_in > 2, peak, rates.bf16_flops_per_s * rates.bf16_gemm_ratio)
            element_bytes = np.where(b_in > 2, b_in, 2.0)
        rate = peak * rates.grouped_ratio if grouped else peak
        in_bf16 = bf16 and not np.any(np.asarray(b_in) > 2)

        def seconds(layout: str, rows: Array, columns: Array, depth: Array) -> Array:
            beside = rates.corrections.factor(f"gemm/{layout}", rows, columns, depth, bf16=in_bf16)
            if grouped:  # tiles of all groups fill the device: measured products of one say nothing of that
                beside = np.where(np.asarray(rates.output_tiles) > 0, 1.0, beside)
            return beside * gemm_s(
                rows,
                columns,
                depth,
                flops_per_s=rate,
                bytes_per_s=streaming,
                num_units=rates.num_units,
                kernel_s=rates.kernel_s,
                output_tiles=rates.output_tiles,
                groups=groups,
                element_bytes=element_bytes,
            )

        # Quantising reads 16 bits and writes the narrow format, as it is and transposed: inputs forward, output
        # gradients backward. Quantised weights are kept for all micro-batches of a step.
        casts = 0.0 if bf16 else precision.cast_passes * (2 + 2 * b_in) * groups / streaming
        return PassTimes(
            forward_s=seconds("forward", m, n, k) + casts * m * k,
            input_s=seconds("input_gradient", m, k, n) + casts * m * n,
            weight_s=seconds("weight_gradient", n, k, m) * trained,
        )

    grouped_query = linear(tokens, (nq * d + nkv * (d + dv)) / t, h)
    query = linear(tokens, np.where(model.q_rank > 0, model.q_rank, nq * d / t), h)
    query_up = linear(tokens, nq * d / t, model.q_rank)
    key_value = linear(tokens, model.kv_rank + model.rope_dim, h)
    key_value_up = linear(tokens, nq * (d - model.rope_dim + dv) / t, model.kv_rank)
    is_mla = (model.is_mla > 0) * 1.0
    latent_up = (query_up + key_value_up).times(is_mla)
    projections = grouped_query.times(1 - is_mla) + (query + key_value).times(is_mla) + latent_up
    attention_gemm = projections + linear(tokens, h, nq * dv / t)

    up_matrices = model.ffn_matrices - 1
    dense_ffn = linear(tokens, up_matrices * model.ffn / t, h) + linear(tokens, h, model.ffn / t)

    has_experts = (model.num_experts > 0) * 1.0
    num_experts = np.maximum(model.num_experts, 1)
    local = num_experts / plan.expert  # experts on this rank
    received = tokens / t * plan.expert_tensor * model.top_k * load_factor  # tokens this rank works on
    per_expert = received / np.maximum(local, 1)
    f_e = model.expert_ffn / plan.expert_tensor
    routed = linear(per_expert, up_matrices * f_e, h, groups=local, grouped=True) + linear(
        per_expert, h, f_e, groups=local, grouped=True
    )
    shared = linear(tokens, up_matrices * model.shared_ffn / t, h) + linear(tokens, h, model.shared_ffn / t)
    experts = routed.times(has_experts) + shared.times(has_experts * (model.shared_ffn > 0))

    split = np.where(plan.sequence_parallel > 0, t, 1)
    # seconds per element read or written
    moved = rates.elementwise_factor * precision.activation_bytes / streaming
    starts = rates.elementwise_kernels * rates.kernel_s

    # Two norms read and write once when fused; with fp32 copies each moves 24 bytes per element instead of 4.
    def beside(kernel: str, elements: Array) -> Array:
        return rates.corrections.factor(f"elementwise/{kernel}", elements)

    norm = tokens * np.where(rates.unfused_norm > 0, 24, 4) * h / split * moved
    norm = norm * beside("rms_norm", tokens * h / split)
    others = tokens * (8 * h / split + 3 * (nq * d + nkv * d) / t) * moved
    common = norm + others * beside("swiglu", tokens * h / split)
    activation = tokens * model.ffn_matrices * model.ffn / t * moved
    activation = activation * beside("swiglu", tokens * model.ffn / t)
    expert_width = received * f_e + tokens * model.shared_ffn / t
    expert_activation = model.ffn_matrices * expert_width * moved * beside("swiglu", expert_width)
    # Permute before and after the exchange, unpermute and weigh after: reads or writes of the routed tokens.
    permutation = (
        (rates.permutation_passes * received * h + tokens * 4 * num_experts / split) * 2.0 / streaming
    )
    router = linear(tokens / split, num_experts, h, bf16=True)

    parameters = count_parameters(model)
    attention_flops = 2 * tokens * parameters.attention_layer / t
    dense_flops = 2 * tokens * parameters.dense_ffn_layer / t
    expert_flops = 2 * (
        received * parameters.expert / plan.expert_tensor + tokens * parameters.shared_layer / t
    )
    core_flops = tokens * _keys(model, batch) * 2 * nq / t * (d + dv)

    return LayerCompute(
        attention_gemm=attention_gemm,
        attention_core=_attention_core(model, batch, plan, rates, tokens),
        dense_ffn=dense_ffn,
        experts=experts,
        router=(router + _memory_bound(permutation)).times(has_experts),
        elementwise=_memory_bound(common + activation + starts),
        moe_elementwise=_memory_bound(common + expert_activation + starts),
        head=_head(model, plan, rates, tokens, linear(tokens, model.vocab / t, h, bf16=True)),
        norm_s=norm,
        activation_s=activation,
        moe_activation_s=expert_activation,
        dense_floor=_floor(attention_flops, dense_flops, core_flops, rates, trained),
        moe_floor=_floor(attention_flops, expert_flops, core_flops, rates, trained),
        latent_up=latent_up,
    )


def _floor(attention: Array, ffn: Array, core: Array, rates: DeviceRates, trained: Array) -> PassTimes:
    """Forward FLOPs of one layer (projections, feed-forward, scores) at the rate the power limit sustains."""
    linear = (attention + ffn) / (rates.matmul_flops_per_s * rates.sustained_ratio)
    scores = core / (rates.bf16_flops_per_s * rates.sustained_ratio)
    return PassTimes(forward_s=linear + scores, input_s=linear + 2.5 * scores, weight_s=linear * trained)


def _memory_bound(forward_s: Array) -> PassTimes:
    """Backward reads the saved input and the gradient and writes a gradient: about twice the forward bytes."""
    return PassTimes(forward_s=forward_s, input_s=2.0 * forward_s, weight_s=0.0 * forward_s)


def _head(
    model: ModelTable, plan: PlanTable, rates: DeviceRates, tokens: Array, gemm: PassTimes
) -> PassTimes:
    """Output matrix and cross-entropy; the loss reads and writes the logits in 16 and 32 bits, three times in all."""
    loss = tokens * model.vocab / plan.tensor * 6.0 / (rates.memory_bytes_per_s * rates.memory_ratio)
    loss = loss * rates.elementwise_factor
    return (gemm + PassTimes(forward_s=loss, input_s=loss, weight_s=0.0 * loss)).times(rates.head_factor)


def _keys(model: ModelTable, batch: BatchTable) -> Array:
    """Mean keys a query sees over full and windowed layers."""
    share = model.num_windowed_layers / model.num_layers
    return keys_seen(batch.seq_len) * (1 - share) + share * keys_seen(batch.seq_len, window=model.window)


def _attention_core(
    model: ModelTable, batch: BatchTable, plan: PlanTable, rates: DeviceRates, tokens: Array
) -> PassTimes:
    """Scores and values, mean over full and windowed layers of one micro-batch on one rank."""
    keys = _keys(model, batch)
    per_token = 2 * model.num_heads / plan.tensor * (model.qk_dim + model.v_dim)
    # An unfused kernel computes the whole square and moves the probabilities through memory six times.
    flops = tokens * per_token * np.where(rates.unfused_attention > 0, batch.seq_len, keys)
    scores = tokens * model.num_heads / plan.tensor * batch.seq_len * 2.0
    traffic = rates.unfused_attention * scores / (rates.memory_bytes_per_s * rates.memory_ratio)
    unfused = rates.unfused_attention > 0
    forward = np.where(unfused, rates.bf16_gemm_ratio, rates.attention_forward_ratio)
    backward = np.where(unfused, rates.bf16_gemm_ratio, rates.attention_backward_ratio)
    backward_flops = np.where(unfused, 2.0, 2.5) * flops  # the fused kernel computes the scores again
    shape = (model.num_heads * plan.micro_batch / plan.tensor, batch.seq_len / plan.context, model.qk_dim)
    forward_s = flops / (rates.bf16_flops_per_s * forward) + 6 * traffic + rates.kernel_s
    backward_s = backward_flops / (rates.bf16_flops_per_s * backward) + 8 * traffic + rates.kernel_s
    return PassTimes(
        forward_s=forward_s * rates.corrections.factor("attention/forward", *shape),
        input_s=backward_s * rates.corrections.factor("attention/backward", *shape),
        weight_s=0.0 * flops,
    )
