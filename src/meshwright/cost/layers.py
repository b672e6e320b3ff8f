"""Seconds of one layer on one rank for one micro-batch, communication and host included, by component.

    forward = kernels + what communication cannot hide, but never faster than the power limit or the host allows

What hides behind what:

    tensor parallel    a calibrated share overlaps with its GEMMs
    context parallel   keys and values are sent while attention runs on the previous part
    expert parallel    a calibrated share of the all-to-all overlaps
    FSDP               a layer's gather behind the layer before it; backward, gather and reduction share the link.
                       Copies from and to their buffers are kernels, which nothing hides
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.arrays import Array, Table
from meshwright.cost.adapters import NUM_GEMMS
from meshwright.cost.casts import cast_passes, dequantised_passes
from meshwright.cost.collectives import (
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_hierarchical_s,
    all_to_all_s,
    reduce_scatter_s,
)
from meshwright.cost.compute import LayerCompute
from meshwright.cost.context_heads import has_scans, swap_s
from meshwright.cost.flops import Parameters
from meshwright.cost.groups import Groups
from meshwright.cost.layer_shapes import LayerShapes
from meshwright.cost.linear_attention import KERNELS, convolved
from meshwright.cost.overlap import exposed_s
from meshwright.cost.passes import PassTimes, total_of
from meshwright.cost.rates import SystemRates
from meshwright.cost.sparse_attention import added_kernels, gathered_width
from meshwright.cost.state_space import launches
from meshwright.cost.tables import RECOMPUTES, BatchTable, ModelTable, PlanTable, PrecisionTable
from meshwright.specs.plan import Recompute, Sharding

FULL = RECOMPUTES.index(Recompute.FULL)
SELECTIVE = RECOMPUTES.index(Recompute.SELECTIVE)

CONTEXT_LOSS_TOKENS = 8192
"""Sequence at which `context_loss_ratio` is stated. Merging partial results and starting shorter kernels take time for
each token and further rank, attention itself for each token and key: the ratio falls with the sequence."""

GEMM_KERNELS = 5
"""GEMM kernels of a dense layer's forward pass: query with key and value, attention, its output, and two of
the feed-forward."""

RING_KERNELS = 6
"""Launches of each part of ring attention, forward: two copies of slices, send and receive, attention, corrections of
the softmax's sum and of the output (Transformer Engine, context_parallel.py, AttnFuncWithCPAndKVP2P)."""

EXPERT_GEMMS = 2
"""GEMMs of an expert's forward pass: gate and up joined, and down."""

LAST_COLLECTIVE = 1 / 4
"""Share of the tensor-parallel collectives of a layer's forward pass that follows its last GEMM."""

Parts = dict[str, PassTimes]
"""Component -> seconds of one layer."""


@dataclass(frozen=True, kw_only=True)
class LayerTimes(Table):
    """One layer, or one rank's layers, for one micro-batch. Seconds."""

    forward_s: Array
    input_s: Array  # backward: input gradients, recomputation, exposed communication
    weight_s: Array  # backward: weight gradients

    @property
    def total_s(self) -> Array:
        return self.forward_s + self.input_s + self.weight_s


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """One layer of each kind, by component, and the two ends of the model."""

    dense: Parts
    moe: Parts
    embedding: PassTimes  # accumulation of its gradient; its look-up is in `head`, with which it was calibrated
    head: PassTimes
    host_dense_s: Array  # to issue one forward pass
    host_moe_s: Array


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Inputs that every function below shares: plan, model, batch and system."""

    model: ModelTable
    batch: BatchTable
    plan: PlanTable
    precision: PrecisionTable
    rates: SystemRates
    groups: Groups
    parameters: Parameters
    load_factor: Array = 1.0  # tokens of the busiest expert rank over the mean

    @property
    def tokens(self) -> Array:
        """Tokens of one micro-batch on one rank."""
        return self.batch.seq_len * self.plan.micro_batch / self.plan.context

    @property
    def num_micro_batches(self) -> Array:
        return self.batch.global_batch / (self.plan.micro_batch * self.plan.data)

    @property
    def shapes(self) -> LayerShapes:
        """Sizes of the work of one layer's kernels."""
        return LayerShapes(
            model=self.model, batch=self.batch, plan=self.plan, precision=self.precision, rates=self.rates.device,
            load_factor=self.load_factor,
        )  # fmt: skip

    def collective_s(self, wire_s: Array, group: Group, *, count: Array = 1) -> Array:
        """Seconds of `count` gathers or reductions of parameters, with the host work around each."""
        around = self.rates.data_collective_s * count * (group.size > 1)
        return wire_s * self.rates.data_collective_factor + around

    @property
    def gathers_layers(self) -> Array:
        """1 where FSDP gathers each layer in each micro-batch. A pipeline keeps parameters gathered, and
        gradients unreduced, over a step's micro-batches (torchtitan, Megatron-FSDP): `cost.update` counts
        their traffic. Where a stack `regathers`, each backward pass gathers its layers besides."""
        return ((self.plan.sharding == Sharding.PARAMETERS) & (self.plan.pipeline == 1)) * 1


def layer_parts(s: StepContext, compute: LayerCompute) -> LayerParts:
    """Every component of a dense and of a mixture-of-experts layer."""
    tensor = _tensor_parallel(s).times(s.rates.tensor_exposed_ratio)
    model = s.model
    common = {
        "attention_gemm": compute.attention_gemm,
        "attention_core": compute.attention_core,
        "indexer": compute.indexer,
        "context_parallel": _context_parallel(s, compute.attention_core),
        "adapters": compute.adapters,
        "state_space": compute.state_space,
        "linear_attention": compute.linear_attention,
    }
    dense = common | {
        "ffn": compute.dense_ffn,
        "casts": _casts(s, is_moe=False),
        "elementwise": compute.elementwise,
        "tensor_parallel": tensor.times(model.blocks),
    }
    shared = model.moe_share * np.where(model.shared_ffn > 0, 1.0, 0.0) + model.moe_ffn_share
    moe = common | {
        "ffn": compute.dense_ffn.times(model.single_block),
        "experts": compute.experts,
        "casts": _casts(s, is_moe=True),
        "router": compute.router,
        "elementwise": compute.moe_elementwise,
        # Routed experts are split by the all-to-all: only attention, and shared experts if any, gather and scatter.
        "tensor_parallel": tensor.times((model.attention_share + model.state_space_share + shared) / 2),
        "expert_parallel": _expert_parallel(s).times(s.rates.expert_exposed_ratio * model.moe_share),
    }
    p, t = s.parameters, s.plan.tensor
    moe_shared_weights = (p.attention_layer + p.shared_layer) / t + p.router_layer
    expert_weights = p.experts_layer / (s.plan.expert * s.plan.expert_tensor)
    least = 1 / np.minimum(general_factor(s), 1)  # what the factor on everything takes off must not undo the limit
    dense["power_limit"] = _throttled(dense, compute.dense_floor.times(least))
    moe["power_limit"] = _throttled(moe, compute.moe_floor.times(least))
    dense["recompute"] = _recomputed(s, compute, dense, is_moe=False)
    moe["recompute"] = _recomputed(s, compute, moe, is_moe=True)
    dense["offload"] = _offloaded(s, dense, model.ffn_share * model.ffn)
    moe["offload"] = _offloaded(
        s,
        moe,
        model.moe_share * (s.load_factor * model.top_k * model.expert_ffn + model.shared_ffn)
        + model.moe_ffn_share * model.ffn,
    )
    dense["hooks"] = moe["hooks"] = _hooks(s)
    dense["accumulation"] = accumulation(s, (p.attention_layer + p.dense_ffn_layer) / t)
    moe["accumulation"] = accumulation(s, moe_shared_weights + expert_weights)
    dense["gather"] = _gather(s, dense, (p.attention_layer + p.dense_ffn_layer) / t, 0.0)
    moe["gather"] = _gather(s, moe, moe_shared_weights, expert_weights)
    host_dense_s, host_moe_s = _host_s(s)
    return LayerParts(
        dense=dense,
        moe=moe,
        embedding=accumulation(s, p.embedding / t),
        head=compute.head + accumulation(s, p.head / t),
        host_dense_s=host_dense_s,
        host_moe_s=host_moe_s,
    )


def _casts(s: StepContext, *, is_moe: bool) -> PassTimes:
    streaming = s.rates.device.streaming_bytes_per_s
    casts = cast_passes(s.model, s.batch, s.plan, s.precision, s.parameters, s.tokens, streaming, is_moe=is_moe)
    return casts + dequantised(s, is_moe=is_moe)


def dequantised(s: StepContext, *, is_moe: bool) -> PassTimes:
    """Return the seconds in which the frozen matrices of a layer become whole, where they are in 8 or 4 bits."""
    return _dequantised(s, s.parameters.attention_layer / s.plan.tensor + _feed_forward_weights(s, is_moe=is_moe))


def _feed_forward_weights(s: StepContext, *, is_moe: bool) -> Array:
    """Weights of the feed-forward block of a layer on one rank, without the router."""
    p, plan = s.parameters, s.plan
    if not is_moe:
        return p.dense_ffn_layer / plan.tensor
    return p.shared_layer / plan.tensor + p.experts_layer / (plan.expert * plan.expert_tensor)


def _dequantised(s: StepContext, weights: Array) -> PassTimes:
    return dequantised_passes(s.model, s.precision, weights, s.rates.device.streaming_bytes_per_s)


def _host_s(s: StepContext) -> tuple[Array, Array]:
    """Host seconds to issue the forward pass of a dense layer and of one with a mixture."""
    rates, device = s.rates, s.rates.device
    age = np.exp(-rates.host_gain_per_year * rates.years)
    others = s.model.blocks - s.model.state_space_share / 2
    scans = s.model.state_space_share * launches() / (GEMM_KERNELS + device.elementwise_kernels)
    layer_s = device.host_layer_s * (rates.host_share * _launches(s) * others + rates.host_state_space_share * scans)
    experts_s = device.host_expert_s * rates.host_expert_share * _expert_launches(s)
    moe_s = s.model.moe_share * (device.host_moe_s * rates.host_moe_share + experts_s)
    dispatch_s = np.where(s.plan.sequence_parallel > 0, rates.dispatch_with_sequence_s, rates.dispatch_s)
    dense_s = layer_s * age + rates.dispatches_tensors * rates.host_share * dispatch_s * (s.plan.tensor > 1)
    return dense_s, dense_s + moe_s * age


def _launches(s: StepContext) -> Array:
    """Launches of a layer's forward pass over those without adapters and context parallelism."""
    parts = s.rates.ring_attention * s.plan.context * (s.plan.context > 1)
    more = NUM_GEMMS * s.model.num_adapters + RING_KERNELS * parts + KERNELS * s.model.linear_share
    more = more + added_kernels(s.model) + s.model.num_quantised
    return 1 + more / (GEMM_KERNELS + s.rates.device.elementwise_kernels)


def _expert_launches(s: StepContext) -> Array:
    """Kernels of the forward pass that a rank's experts start one by one: GEMMs and casts of their inputs."""
    local = s.model.num_experts / s.plan.expert
    dequantised = (s.model.quantised_bytes > 0) * 1
    casts = s.precision.cast_passes * (1 - s.rates.device.wide_experts)
    return EXPERT_GEMMS * local * (1 + casts + dequantised) * (1 - s.shapes.fused_experts)


def general_factor(s: StepContext) -> Array:
    """Maturity of the stack against 2025, with all unexplained time: a factor on everything but fixed time."""
    has_moe = s.model.num_moe_layers > 0
    gain = np.where(has_moe, s.rates.moe_gain_per_year, s.rates.dense_gain_per_year)
    return s.rates.general_factor * np.where(has_moe, s.rates.moe_factor, 1.0) * np.exp(-gain * s.rates.years)


def layer_times(parts: Parts, host_s: Array) -> LayerTimes:
    """All components of a layer together. The host issues a backward pass as fast as a forward one."""
    forward, weight = _sum(parts, "forward_s"), _sum(parts, "weight_s")
    backward = _sum(parts, "input_s") + weight
    host_backward_s = host_s * np.where(parts["recompute"].input_s > 0, 2.0, 1.0)
    return LayerTimes(
        forward_s=_paced(forward, host_s), input_s=_paced(backward, host_backward_s) - weight, weight_s=weight
    )


def paired_layer_s(s: StepContext, parts: Parts, host_s: Array) -> Array:
    """Seconds of the forward pass of one mixture layer and the backward pass of another as DualPipe overlaps them.

    Each one's all-to-alls run behind the other's kernels, on compute units that these then lack: DeepSeek-AI 2024,
    arXiv 2412.19437, section 3.2.1. Both "can be fully hidden" there, and 20 of 132 units send.
    """
    exchanged = _expert_parallel(s).times(1.0)
    kernels = sum(p.total_s for name, p in parts.items() if name != "expert_parallel")
    slowdown = 1 / (1 - DUALPIPE_SENDING_UNITS)
    device = kernels + exposed_s(exchanged.total_s, kernels, slowdown)
    return _paced(device, host_s * np.where(parts["recompute"].input_s > 0, 3.0, 2.0))


DUALPIPE_SENDING_UNITS = 20 / 132
"""Share of an H800's multiprocessors that send and receive: section 3.2.2 of the same report."""


def _sum(parts: Parts, part: str) -> Array:
    return total_of(getattr(p, part) for p in parts.values())


def _paced(device_s: Array, host_s: Array) -> Array:
    """Time of work that one side issues and the other runs: the longer of both, and up to a fifth more when they
    are equal, because neither runs evenly (the 4-norm)."""
    longer, shorter = np.maximum(device_s, host_s), np.minimum(device_s, host_s)
    ratio = shorter / np.maximum(longer, 1e-12)
    squared = ratio * ratio  # NumPy's power takes four times as long
    return longer * np.sqrt(np.sqrt(1 + squared * squared))


def _backward_free(forward_s: Array, input_s: Array) -> PassTimes:
    """Passes without weight gradients."""
    return PassTimes(forward_s=forward_s, input_s=input_s, weight_s=0.0)


def _throttled(parts: Parts, floor: PassTimes) -> PassTimes:
    """Time that the power limit adds where a layer would run its arithmetic faster than the device sustains."""

    def lacking(part: str) -> Array:
        return np.maximum(getattr(floor, part) - _sum(parts, part), 0.0)

    return PassTimes(forward_s=lacking("forward_s"), input_s=lacking("input_s"), weight_s=lacking("weight_s"))


def _tensor_parallel(s: StepContext) -> PassTimes:
    """Two gathers and two scatters per pass with sequence parallelism, two all-reduces without.

    Blocks in parallel scatter or reduce the sum of their outputs, and gather what they share once: EleutherAI's
    gpt-neox, megatron/model/transformer.py, `gpt_j_residual`.
    Korthikanti et al. 2022, arXiv 2205.05198, section 4.2. Backward gathers the saved inputs once more for the
    weight gradients, concurrently with the input-gradient GEMM. Stacks that cast before they gather send the narrow
    format, forward and backward; sums travel as between layers.
    """
    elements, rates = s.tokens * s.model.hidden, s.rates
    size = elements * s.precision.activation_bytes
    narrow = (rates.tensor_gather_bytes > 0) & (s.model.lora_column_inputs == 0)  # adapters read what is gathered
    gathered = np.where(narrow, elements * rates.tensor_gather_bytes, size)

    def around(wire_s: Array) -> Array:
        return wire_s * rates.tensor_collective_factor + rates.tensor_collective_s

    gather, scatter = around(all_gather_s(gathered, s.groups.tensor)), around(reduce_scatter_s(size, s.groups.tensor))
    whole = around(all_reduce_s(size, s.groups.tensor))

    def seconds(num_in: Array, num_out: Array) -> Array:
        split = num_in * gather + num_out * scatter
        return np.where(s.plan.tensor > 1, np.where(s.plan.sequence_parallel > 0, split, num_out * whole), 0.0)

    inputs, outputs = s.model.block_inputs, s.model.residual_sums
    return _backward_free(seconds(inputs, outputs), seconds(outputs, inputs))


def _context_parallel(s: StepContext, core: PassTimes) -> PassTimes:
    """Attention in as many parts as there are ranks, while keys and values of all other parts arrive.

    Backward also brings their gradients home. Layers with scans swap sequence for heads instead.
    """
    model, plan = s.model, s.plan
    width = gathered_width(model, plan)
    size = plan.context * s.tokens * width * s.precision.activation_bytes
    gather = all_gather_s(size, s.groups.context)
    gather = np.where(plan.context > 1, gather, 0.0) * model.attention_share
    slowdown = 1 + s.rates.overlap_slowdown_ratio
    loss = s.rates.context_loss_ratio * np.log2(plan.context) * CONTEXT_LOSS_TOKENS / s.batch.seq_len
    swap = 0.0
    if has_scans(model):
        swap = swap_s(
            model, plan, s.tokens, group=s.groups.context, element_bytes=s.precision.activation_bytes,
            element_s=s.shapes.element_s,
        )  # fmt: skip
    return _backward_free(
        swap + loss * core.forward_s + exposed_s(gather, core.forward_s, slowdown),
        swap + loss * core.input_s + exposed_s(2 * gather, core.input_s, slowdown),
    )


def _expert_parallel(s: StepContext) -> PassTimes:
    """Dispatch and combine forward, and both again backward.

    Ranks that hold parts of the same experts gather each other's tokens after an all-to-all, and
    reduce-scatter their results before the next. A dispatcher that merges copies, and a stack that
    `copies_rows`, send them to each of these ranks instead.
    """
    model, plan = s.model, s.plan
    copy = s.tokens / plan.tensor * model.expert_hidden * s.load_factor

    def all_to_all(element_bytes: Array) -> Array:
        sent = copy * model.top_k * element_bytes
        flat = all_to_all_s(sent, s.groups.expert)
        if np.any(plan.expert_tensor > 1):
            parts = sent * plan.expert_tensor
            copied = all_to_all_s(parts, s.groups.expert_parts)
            flat = np.where(s.rates.copies_rows > 0, copied, flat + all_gather_s(parts, s.groups.expert_tensor))
        merged = all_to_all_hierarchical_s(
            copy * element_bytes,
            s.groups.expert_parts,
            copies=np.maximum(model.top_k, 1) * plan.expert_tensor,
            max_domains=model.groups_per_token,
        )
        return np.where(s.rates.deduplicates > 0, np.minimum(flat, merged), flat)

    active = (plan.expert * plan.expert_tensor > 1) & (model.num_experts > 0)
    seconds = np.where(active, all_to_all(s.precision.dispatch_bytes) + all_to_all(2.0), 0.0)
    return _backward_free(seconds, seconds)


def _recomputed(s: StepContext, compute: LayerCompute, parts: Parts, *, is_moe: bool) -> PassTimes:
    """Forward work that the backward pass repeats, mean over a rank's layers.

    With early stop, recomputation leaves out the last GEMM of a dense layer and the operations after it. A
    mixture's last GEMM runs again: the gradients of the router's weights need the experts' outputs.
    """
    plan = s.plan
    last_s = 0.0
    whole_s = _dequantised(s, _feed_forward_weights(s, is_moe=is_moe)).forward_s
    if is_moe:
        activation_s, module, gemm_s = compute.moe_activation_s, "moe", compute.experts.forward_s + whole_s
        module_s = gemm_s + compute.router.forward_s + parts["expert_parallel"].forward_s
    else:
        activation_s, module, gemm_s = compute.activation_s, "mlp", compute.dense_ffn.forward_s + whole_s
        last_s = s.rates.stops_recompute * gemm_s / s.model.ffn_matrices
        module_s = gemm_s - last_s
        last_s = last_s + s.rates.stops_recompute * LAST_COLLECTIVE * parts["tensor_parallel"].forward_s
    attention_s = compute.attention_gemm.forward_s
    attention_s = attention_s + _dequantised(s, s.parameters.attention_layer / plan.tensor).forward_s
    chosen = (
        plan.recomputes("core_attention") * compute.attention_core.forward_s
        + plan.recomputes("norm") * compute.norm_s
        + plan.recomputes("activation") * activation_s
        + plan.recomputes("mla_up_projection") * (compute.latent_up.forward_s + _latent_up_whole_s(s))
        + plan.recomputes("alternate_matmuls") * 0.5 * (attention_s + gemm_s)
        + plan.recomputes(module) * module_s
    )
    per_rank = np.maximum(s.model.num_layers / plan.pipeline, 1)
    share = np.where(plan.recompute_layers >= 0, np.minimum(plan.recompute_layers / per_rank, 1.0), 1.0)
    whole = share * (_sum(parts, "forward_s") - last_s)
    again = np.where(plan.recompute == FULL, whole, np.where(plan.recompute == SELECTIVE, chosen, 0.0))
    return _backward_free(0.0, again)


def _latent_up_whole_s(s: StepContext) -> Array:
    """Seconds in which the matrices that expand latents become whole."""
    model, heads = s.model, s.model.num_heads / s.plan.tensor
    expanded = model.kv_rank * (model.qk_dim - model.rope_dim + model.v_dim) + model.q_rank * model.qk_dim
    return _dequantised(s, model.is_mla * heads * expanded).forward_s


_MADE_AGAIN = ("norm", "activation", "mlp", "moe")
"""Modules whose selective recomputation leaves less to offload."""


def _offloaded(s: StepContext, parts: Parts, ffn_width: Array) -> PassTimes:
    """Copies of saved activations to host memory and back, beside the kernels: what these do not hide.

    Saved are the inputs of norms, projections, attention and feed-forward, in the format of activations, but for what
    selective recomputation makes again: outputs of norms, the product of a feed-forward, or all of it.
    """
    if not np.any(s.rates.offloaded_activations):
        return _backward_free(0.0, 0.0)
    model, t = s.model, s.plan.tensor
    split = np.where(s.plan.sequence_parallel > 0, t, 1)
    heads = model.query_heads + model.kv_heads
    heads = heads * (model.qk_dim + model.v_dim)
    again = {name: (s.plan.recompute == SELECTIVE) * s.plan.recomputes(name) for name in _MADE_AGAIN}
    block = np.maximum(again["mlp"], again["moe"])
    num_wide = model.ffn_matrices * (1 - block) - np.where(block > 0, 0, again["activation"])
    normed = model.residual_sums + (1 - again["norm"]) * model.block_inputs
    width = normed * model.blocks * model.hidden / split
    linear = model.linear_share * (convolved(model) + 3 * model.linear_values)
    width = width + (model.attention_share * heads + linear + num_wide * ffn_width) / t
    width = np.where(s.plan.recompute == FULL, model.hidden / split, width)  # a recomputed layer keeps its input
    size = s.tokens * width * s.precision.activation_bytes * s.rates.offloaded_activations
    copy = size / s.rates.host_bytes_per_s
    slowdown = 1 + s.rates.overlap_slowdown_ratio
    backward = _sum(parts, "input_s") + _sum(parts, "weight_s")
    return _backward_free(exposed_s(copy, _sum(parts, "forward_s"), slowdown), exposed_s(copy, backward, slowdown))


def _gather(s: StepContext, parts: Parts, dense_weights: Array, expert_weights: Array) -> PassTimes:
    """FSDP per layer and micro-batch: gather and reduction that compute does not hide."""
    groups, precision, rates = s.groups, s.precision, s.rates
    trained = 1 - (s.model.lora_rank > 0) * 1
    has_experts = np.asarray(expert_weights) > 0

    def over_shards(collective: object, bytes_per_weight: Array) -> Array:
        run = all_gather_s if collective is all_gather_s else reduce_scatter_s
        dense = s.collective_s(run(dense_weights * bytes_per_weight, groups.shard), groups.shard)
        experts = s.collective_s(run(expert_weights * bytes_per_weight, groups.expert_shard), groups.expert_shard)
        return dense + np.where(has_experts, experts, 0.0)

    sent = np.where(s.model.quantised_bytes > 0, s.model.quantised_bytes, precision.gather_bytes)
    shard_bytes = dense_weights * precision.reduce_bytes / np.maximum(groups.shard.size, 1)
    copies = np.where(groups.replicate.size > 1, all_reduce_s(shard_bytes, groups.replicate), 0.0)
    gather = over_shards(all_gather_s, sent)
    reduce = (over_shards(reduce_scatter_s, precision.reduce_bytes) + copies) * trained
    active = s.gathers_layers
    again = np.maximum(active, rates.regathers * (s.plan.sharding == Sharding.PARAMETERS))
    slowdown = 1 + rates.overlap_slowdown_ratio

    def exposed(comm: Array, compute: Array) -> Array:
        return exposed_s(comm, compute * rates.gather_hidden_ratio, slowdown)

    backward = _sum(parts, "input_s") + _sum(parts, "weight_s")
    copied = (groups.shard.size > 1) * dense_weights + (groups.expert_shard.size > 1) * expert_weights
    out_s, in_s = shard_copies_s(s, copied)
    return _backward_free(
        active * out_s + exposed(active * gather, _sum(parts, "forward_s")),
        again * out_s + active * in_s + exposed(again * gather + active * reduce, backward),
    )


def shard_copies_s(s: StepContext, weights: Array) -> tuple[Array, Array]:
    """Seconds of copies of `weights` out of what FSDP gathered, and of their gradients into what it reduces."""
    trained = 1 - (s.model.lora_rank > 0) * 1
    sent = np.where(s.model.quantised_bytes > 0, s.model.quantised_bytes, s.precision.gather_bytes)
    summed = (s.precision.activation_bytes + s.precision.reduce_bytes) * trained
    seconds = s.rates.copies_shards * weights / s.rates.device.streaming_bytes_per_s
    return seconds * 2 * sent, seconds * summed


def _hooks(s: StepContext) -> PassTimes:
    """Host work around each layer's passes under data parallelism: the hooks that start collectives."""
    once = 0.5 * s.rates.data_layer_s * (s.plan.data * s.plan.context > 1)
    return _backward_free(once, once)


def accumulation(s: StepContext, weights: Array) -> PassTimes:
    """Gradients of a micro-batch, added to the fp32 sum of those before it: read, and the sum read and written.

    The first ones are the sum, or are copied into it where they are narrower.
    """
    trained = 1 - (s.model.lora_rank > 0) * 1
    element_bytes = s.precision.activation_bytes
    first = np.where(element_bytes < 4, element_bytes + 4, 0.0)
    n = s.num_micro_batches
    num_bytes = weights * trained * (first + (n - 1) * (element_bytes + 8)) / n
    seconds = num_bytes * s.rates.accumulation_passes / s.rates.device.streaming_bytes_per_s
    return PassTimes(forward_s=0.0, input_s=0.0, weight_s=seconds)
