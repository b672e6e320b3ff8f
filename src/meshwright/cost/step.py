"""Seconds of one training step, by component.

    step = (pipeline(F, B, W of each stage) + exposed data-parallel traffic + optimizer + fixed) x stragglers

A stage's forward pass is the sum over its layers of max(kernels + exposed communication, host): kernels by
`cost.compute`, collectives by `cost.collectives`. What is hidden, and behind what:

    tensor parallel    a calibrated share overlaps with its GEMMs
    context parallel   keys and values travel while the attention of the part before runs
    expert parallel    a calibrated share of the all-to-all overlaps
    FSDP               a layer's gather behind the layer before it; gather and reduction share the wire backward
    ZeRO and DDP       gradient reduction behind the last backward pass, parameter gather behind the first forward
    pipeline           a calibrated share of each transfer delays its receiver, where the schedule has no slack

Components are seconds of the step that would vanish with them, so they add up to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.collectives import (
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_hierarchical_s,
    all_to_all_s,
    group,
    reduce_scatter_s,
    send_receive_s,
)
from meshwright.cost.compute import LayerCompute, Passes, layer_compute
from meshwright.cost.flops import Parameters, count_parameters
from meshwright.cost.pipeline.closed_form import waiting_s
from meshwright.cost.rates import SystemRates
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
from meshwright.specs.plan import Recompute, Sharding

FULL = RECOMPUTES.index(Recompute.FULL)
SELECTIVE = RECOMPUTES.index(Recompute.SELECTIVE)
OPTIMIZER_BYTES = 34.0
"""Per parameter: master and both moments read and written (24), gradient read twice for norm and update (8),
16-bit weight written (2)."""


@dataclass(frozen=True, kw_only=True)
class LayerTimes(Table):
    """One layer of one kind on one rank for one micro-batch, communication included. Seconds."""

    forward_s: Array
    input_s: Array  # backward: input gradients, recomputation, exposed communication
    weight_s: Array  # backward: weight gradients


@dataclass(frozen=True, kw_only=True)
class StageTimes(Table):
    """One micro-batch on the first, a middle and the last pipeline rank. Seconds."""

    first: LayerTimes
    middle: LayerTimes
    last: LayerTimes
    transfer_s: Array  # one hop between neighbouring ranks


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Steps of many plans. `components_s` add up to `step_s`."""

    step_s: Array
    components_s: dict[str, Array]
    stages: StageTimes
    num_micro_batches: Array
    tokens_per_s_per_device: Array


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Every communicator a rank takes part in."""

    tensor: Group
    context: Group
    expert: Group
    shard: Group  # over which dense parameters or optimizer states are sharded: data_shard x context
    replicate: Group
    expert_shard: Group
    neighbours: Group  # pipeline


def groups_of(plan: PlanTable, rates: SystemRates) -> Groups:
    """Ranks are laid out tensor, context, data, pipeline, innermost first; experts fold over the first three."""
    t, c, net = plan.tensor, plan.context, rates.network
    expert_width = plan.expert * plan.expert_tensor
    expert_data = np.maximum(plan.expert_data // np.maximum(plan.data_replicate, 1), 1)
    inner = t * c * plan.data
    return Groups(
        tensor=group(size=t, stride=1, net=net),
        context=group(size=c, stride=t, net=net),
        expert=group(size=plan.expert, stride=plan.expert_tensor, net=net),
        shard=group(size=plan.data_shard * c, stride=t, net=net),
        replicate=group(size=plan.data_replicate, stride=t * c * plan.data_shard, net=net),
        expert_shard=group(size=expert_data, stride=expert_width, net=net),
        neighbours=group(size=plan.pipeline, stride=inner, net=net),
    )


def estimate_steps(
    *,
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    rates: SystemRates,
    load_factor: Array = 1.0,
) -> StepTable:
    """Step times; every argument's fields are numbers or arrays that broadcast.

    load_factor: tokens of the busiest expert rank over the mean; 1.0 is forced balance, as in benchmarks.
    """
    parameters = count_parameters(model)
    compute = layer_compute(
        model=model, batch=batch, plan=plan, precision=precision, rates=rates.device, load_factor=load_factor
    )
    groups = groups_of(plan, rates)
    layers = split_layers(model, plan)
    num_micro = batch.global_batch / (plan.micro_batch * plan.data)
    # Software older or newer than 2025 runs slower or faster by what its lineage gains in a year.
    has_moe = model.num_moe_layers > 0
    gain = np.where(has_moe, rates.moe_gain_per_year, rates.dense_gain_per_year)
    factor = rates.general_factor * np.where(has_moe, rates.moe_factor, 1.0) * np.exp(-gain * rates.years)

    parts = _layer_parts(model, batch, plan, precision, rates, compute, groups, parameters)
    stages = _stages(plan, rates, compute, layers, parts, model)
    stages = _with_transfer(stages, model, batch, plan, groups)
    pipeline, bubble = _pipeline_s(stages, plan, rates, num_micro)
    reduction = _data_parallel_s(model, plan, precision, rates, groups, parameters, layers, stages)
    optimizer = _optimizer_s(model, plan, precision, rates, parameters, layers)
    fixed = rates.step_s
    nodes = np.maximum(plan.num_devices / np.maximum(rates.network.domain, 1), 1)
    straggle = 1 + rates.slowdown_per_doubling * np.log2(nodes)
    core = pipeline + bubble + reduction + optimizer
    step = (core * factor + fixed) * straggle

    weights = _component_weights(plan, layers, parts, num_micro, model)
    busy = sum(weights.values())
    scale = pipeline * factor / busy
    components = {name: value * scale for name, value in weights.items()}
    components["bubble"] = bubble * factor
    components["data_parallel"] = reduction * factor
    components["optimizer"] = optimizer * factor
    components["fixed"] = fixed * 1.0
    components["stragglers"] = step - sum(components.values())
    tokens = batch.global_batch * batch.seq_len
    return StepTable(
        step_s=step,
        components_s=components,
        stages=stages,
        num_micro_batches=num_micro,
        tokens_per_s_per_device=tokens / (step * plan.num_devices),
    )


@dataclass(frozen=True, kw_only=True)
class _LayerParts:
    """Times of one layer of each kind, by component, and the head."""

    dense: dict[str, Passes]
    moe: dict[str, Passes]
    head: Passes
    recompute_dense: Array  # forward seconds run again in the backward pass
    recompute_moe: Array
    host_dense_s: Array
    host_moe_s: Array


def _throttled(parts: dict[str, Passes], floor: Passes) -> Passes:
    """What the power limit adds when a layer's parts together would run its arithmetic faster than it sustains."""

    def lacking(name: str) -> Array:
        return np.maximum(getattr(floor, name) - sum(getattr(p, name) for p in parts.values()), 0.0)

    return Passes(forward_s=lacking("forward_s"), input_s=lacking("input_s"), weight_s=lacking("weight_s"))


def _only(forward_s: Array, input_s: Array) -> Passes:
    return Passes(forward_s=forward_s, input_s=input_s, weight_s=0.0 * forward_s)


def _layer_parts(
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    rates: SystemRates,
    compute: LayerCompute,
    groups: Groups,
    parameters: Parameters,
) -> _LayerParts:
    tokens = batch.seq_len * plan.micro_batch / plan.context
    tensor = _tensor_comm(model, plan, groups, tokens).times(rates.tensor_exposed_ratio)
    context = _context_comm(model, plan, groups, tokens, compute.attention_core)
    expert = _expert_comm(model, plan, precision, rates, groups, tokens).times(rates.expert_exposed_ratio)
    common = {"attention_gemm": compute.attention_gemm, "attention_core": compute.attention_core}
    dense = common | {
        "ffn": compute.dense_ffn,
        "elementwise": compute.elementwise,
        "tensor_parallel": tensor,
        "context_parallel": context,
    }
    moe = common | {
        "experts": compute.experts,
        "router": compute.router,
        "elementwise": compute.moe_elementwise,
        # Only attention, and shared experts if any, run tensor-parallel collectives in a mixture of experts.
        "tensor_parallel": tensor.times(np.where(model.shared_ffn > 0, 1.0, 0.5)),
        "context_parallel": context,
        "expert_parallel": expert,
    }
    dense["power_limit"] = _throttled(dense, compute.dense_floor)
    moe["power_limit"] = _throttled(moe, compute.moe_floor)
    again_dense = _recomputed(plan, compute, dense, is_moe=False)
    again_moe = _recomputed(plan, compute, moe, is_moe=True)
    dense["recompute"] = _only(0.0 * again_dense, again_dense)
    moe["recompute"] = _only(0.0 * again_moe, again_moe)
    sharded = plan.sharding == Sharding.PARAMETERS
    dense_layer = (parameters.attention_layer + parameters.dense_ffn_layer) / plan.tensor
    moe_dense_part = (parameters.attention_layer + parameters.shared_layer) / plan.tensor + parameters.router_layer
    expert_part = parameters.experts_layer / (plan.expert * plan.expert_tensor)
    trained = 1 - (model.lora_rank > 0) * 1
    dense["gather"] = _gather_exposed(precision, rates, groups, dense_layer, 0.0, dense, sharded, trained)
    moe["gather"] = _gather_exposed(precision, rates, groups, moe_dense_part, expert_part, moe, sharded, trained)
    return _LayerParts(
        dense=dense,
        moe=moe,
        head=compute.head,
        recompute_dense=again_dense,
        recompute_moe=again_moe,
        host_dense_s=rates.device.host_layer_s,
        host_moe_s=rates.device.host_layer_s + rates.device.host_moe_s,
    )


def _tensor_comm(model: ModelTable, plan: PlanTable, groups: Groups, tokens: Array) -> Passes:
    """Two gathers and two scatters per pass with sequence parallelism, two all-reduces without (Korthikanti 2022).

    Backward gathers the saved inputs once more for the weight gradients, beside the input-gradient GEMM.
    """
    size = tokens * model.hidden * 2.0
    gather, scatter = all_gather_s(size, groups.tensor), reduce_scatter_s(size, groups.tensor)
    reduce = all_reduce_s(size, groups.tensor)
    split = plan.sequence_parallel > 0
    active = plan.tensor > 1
    forward = np.where(active, np.where(split, 2 * (gather + scatter), 2 * reduce), 0.0)
    return _only(forward, forward)


def _context_comm(model: ModelTable, plan: PlanTable, groups: Groups, tokens: Array, core: Passes) -> Passes:
    """Keys and values of all other parts; backward also brings their gradients home."""
    size = plan.context * tokens * model.num_kv_heads / plan.tensor * (model.qk_dim + model.v_dim) * 2.0
    gather = np.where(plan.context > 1, all_gather_s(size, groups.context), 0.0)
    return _only(np.maximum(gather - core.forward_s, 0.0), np.maximum(2 * gather - core.input_s, 0.0))


def _expert_comm(
    model: ModelTable,
    plan: PlanTable,
    precision: PrecisionTable,
    rates: SystemRates,
    groups: Groups,
    tokens: Array,
) -> Passes:
    """Dispatch and combine forward, and both again backward."""
    local = tokens / plan.tensor * plan.expert_tensor
    copy = local * model.hidden

    def exchange(element_bytes: Array) -> Array:
        flat = all_to_all_s(copy * model.top_k * element_bytes, groups.expert)
        merged = all_to_all_hierarchical_s(
            copy * element_bytes, groups.expert, copies=np.maximum(model.top_k, 1), max_domains=model.groups_per_token
        )
        return np.where(rates.deduplicates > 0, np.minimum(flat, merged), flat)

    active = (plan.expert > 1) & (model.num_experts > 0)
    dispatch = np.where(active, exchange(precision.dispatch_bytes), 0.0)
    combine = np.where(active, exchange(2.0), 0.0)
    return _only(dispatch + combine, dispatch + combine)


def _recomputed(plan: PlanTable, compute: LayerCompute, parts: dict[str, Passes], *, is_moe: bool) -> Array:
    """Forward seconds that run a second time."""
    whole = sum(p.forward_s for p in parts.values())
    elementwise = compute.moe_elementwise if is_moe else compute.elementwise
    ffn = compute.experts if is_moe else compute.dense_ffn
    module = "moe" if is_moe else "mlp"
    exchange = parts["expert_parallel"].forward_s if is_moe else 0.0
    part = (
        plan.recomputes("core_attention") * compute.attention_core.forward_s
        + plan.recomputes("norm") * 0.4 * elementwise.forward_s
        + plan.recomputes("activation") * 0.3 * elementwise.forward_s
        + plan.recomputes("mla_up_projection") * compute.latent_up.forward_s
        + plan.recomputes(module) * (ffn.forward_s + exchange)
    )
    return np.where(plan.recompute == FULL, whole, np.where(plan.recompute == SELECTIVE, part, 0.0))


def _gather_exposed(
    precision: PrecisionTable,
    rates: SystemRates,
    groups: Groups,
    dense_parameters: Array,
    expert_parameters: Array,
    parts: dict[str, Passes],
    sharded: Array,
    trained: Array,
) -> Passes:
    """FSDP per layer and micro-batch: what is left of gather and reduction after hiding behind compute."""

    def wire(operation: object, per_parameter: Array) -> Array:
        run = all_gather_s if operation is all_gather_s else reduce_scatter_s
        dense = run(dense_parameters * per_parameter, groups.shard)
        expert = run(expert_parameters * per_parameter, groups.expert_shard)
        return dense + np.where(np.asarray(expert_parameters) > 0, expert, 0.0)

    gather = wire(all_gather_s, precision.gather_bytes)
    reduce = wire(reduce_scatter_s, precision.reduce_bytes) * trained
    size = dense_parameters * precision.reduce_bytes / np.maximum(groups.shard.size, 1)
    replicas = np.where(groups.replicate.size > 1, all_reduce_s(size, groups.replicate), 0.0) * trained
    forward = sum(p.forward_s for p in parts.values()) * rates.gather_hidden_ratio
    backward = sum(p.input_s + p.weight_s for p in parts.values()) * rates.gather_hidden_ratio
    return _only(
        np.where(sharded, np.maximum(gather - forward, 0.0), 0.0),
        np.where(sharded, np.maximum(gather + reduce + replicas - backward, 0.0), 0.0),
    )


def _layer_total(parts: dict[str, Passes], host_s: Array) -> LayerTimes:
    """Kernels, exposed communication and host of one layer. The host issues backward about as fast as forward."""
    forward = sum(p.forward_s for p in parts.values())
    weight = sum(p.weight_s for p in parts.values())
    whole = sum(p.input_s for p in parts.values())
    again = parts["recompute"].input_s > 0
    host_backward = host_s * np.where(again, 2.0, 1.0)
    late = np.maximum(host_backward - whole - weight, 0.0)
    return LayerTimes(forward_s=np.maximum(forward, host_s), input_s=whole + late, weight_s=weight)


def _stages(
    plan: PlanTable,
    rates: SystemRates,
    compute: LayerCompute,
    layers: StageLayers,
    parts: _LayerParts,
    model: ModelTable,
) -> StageTimes:
    dense, moe = _layer_total(parts.dense, parts.host_dense_s), _layer_total(parts.moe, parts.host_moe_s)
    share = np.where(
        (plan.recompute == FULL) & (plan.recompute_layers >= 0),
        np.minimum(plan.recompute_layers / np.maximum(model.num_layers / plan.pipeline, 1), 1.0),
        1.0,
    )
    saved_dense = (1 - share) * parts.recompute_dense
    saved_moe = (1 - share) * parts.recompute_moe

    def rank(num_dense: Array, num_moe: Array, *, head: Array) -> LayerTimes:
        num_moe = num_moe + head * model.num_mtp_layers * (model.num_moe_layers > 0)
        heads = head * (1 + model.num_mtp_layers)
        return LayerTimes(
            forward_s=num_dense * dense.forward_s + num_moe * moe.forward_s + heads * parts.head.forward_s,
            input_s=num_dense * (dense.input_s - saved_dense)
            + num_moe * (moe.input_s - saved_moe)
            + heads * parts.head.input_s,
            weight_s=num_dense * dense.weight_s + num_moe * moe.weight_s + heads * parts.head.weight_s,
        )

    alone = (plan.pipeline == 1) * 1.0
    return StageTimes(
        first=rank(layers.first_dense, layers.first_moe, head=alone),
        middle=rank(layers.middle_dense, layers.middle_moe, head=alone),
        last=rank(layers.last_dense, layers.last_moe, head=1.0),
        transfer_s=0.0,
    )


def _with_transfer(
    stages: StageTimes, model: ModelTable, batch: BatchTable, plan: PlanTable, groups: Groups
) -> StageTimes:
    split = np.where(plan.sequence_parallel > 0, plan.tensor, 1)
    size = batch.seq_len * plan.micro_batch / plan.context * model.hidden * 2.0 / split
    hop = np.where(plan.pipeline > 1, send_receive_s(size, groups.neighbours), 0.0)
    return StageTimes(first=stages.first, middle=stages.middle, last=stages.last, transfer_s=hop)


def _total(times: LayerTimes) -> Array:
    return times.forward_s + times.input_s + times.weight_s


def _pipeline_s(
    stages: StageTimes, plan: PlanTable, rates: SystemRates, num_micro: Array
) -> tuple[Array, Array]:
    """(work of the slowest rank, bubble and exposed transfers).

    The slowest rank never waits in the steady state; filling and draining goes through all ranks, so what it waits
    for is the closed form of the schedule at the ranks' mean times.
    """
    p = plan.pipeline
    slowest = np.maximum(np.maximum(_total(stages.first), _total(stages.last)), _total(stages.middle))

    def mean(part: str) -> Array:
        first, middle, last = (getattr(s, part) for s in (stages.first, stages.middle, stages.last))
        return np.where(p > 1, (first + last + np.maximum(p - 2, 0) * middle) / p, middle)

    waiting = waiting_s(
        plan.schedule,
        p,
        plan.virtual_pipeline,
        num_micro,
        forward_s=mean("forward_s"),
        backward_input_s=mean("input_s"),
        backward_weight_s=mean("weight_s"),
        transfer_s=stages.transfer_s * rates.pipeline_exposed_ratio,
    )
    return num_micro * slowest, np.where(p > 1, np.maximum(waiting, 0.0), 0.0)


def _rank_parameters(
    model: ModelTable, plan: PlanTable, parameters: Parameters, layers: StageLayers
) -> tuple[Array, Array]:
    """(dense, expert) parameters of the rank that holds most."""
    num_layers = np.maximum(layers.first, layers.middle)
    moe = np.maximum(layers.first_moe, layers.middle_moe)
    dense_ffn = np.maximum(num_layers - moe, 0)
    table = (parameters.embedding + np.where(plan.pipeline > 1, 0, parameters.head)) / plan.tensor
    dense = num_layers * parameters.attention_layer / plan.tensor + dense_ffn * parameters.dense_ffn_layer / plan.tensor
    dense = dense + moe * (parameters.shared_layer / plan.tensor + parameters.router_layer) + table
    expert = moe * parameters.experts_layer / (plan.expert * plan.expert_tensor)
    lora = num_layers * parameters.lora_layer / plan.tensor
    frozen = model.lora_rank > 0
    return np.where(frozen, lora, dense), np.where(frozen, 0, expert)


def _data_parallel_s(
    model: ModelTable,
    plan: PlanTable,
    precision: PrecisionTable,
    rates: SystemRates,
    groups: Groups,
    parameters: Parameters,
    layers: StageLayers,
    stages: StageTimes,
) -> Array:
    """Once a step: reduce gradients and, when optimizer states are sharded, gather parameters. Exposed seconds."""
    dense, expert = _rank_parameters(model, plan, parameters, layers)
    sharded = plan.sharding > Sharding.NONE
    whole = group(
        size=plan.data * plan.context, stride=plan.tensor, net=rates.network
    )
    expert_whole = group(
        size=np.maximum(plan.expert_data, 1), stride=plan.expert * plan.expert_tensor, net=rates.network
    )

    def reduce(count: Array, shard: Group, full: Group) -> Array:
        bytes_total = count * precision.reduce_bytes
        return np.where(sharded, reduce_scatter_s(bytes_total, shard), all_reduce_s(bytes_total, full))

    def gather(count: Array, shard: Group) -> Array:
        return np.where(sharded, all_gather_s(count * precision.gather_bytes, shard), 0.0)

    several = plan.data * plan.context > 1
    has_expert = np.asarray(expert) > 0
    expert_several = has_expert & (plan.expert_data > 1)
    reduction = np.where(several, reduce(dense, groups.shard, whole), 0.0)
    reduction = reduction + np.where(expert_several, reduce(expert, groups.expert_shard, expert_whole), 0.0)
    gathering = np.where(several, gather(dense, groups.shard), 0.0)
    gathering = gathering + np.where(expert_several, gather(expert, groups.expert_shard), 0.0)
    hidden = rates.data_hidden_ratio * rates.overlaps_data
    backward = stages.middle.input_s + stages.middle.weight_s
    exposed = reduction - np.minimum(reduction * hidden, backward * hidden)
    exposed = exposed + gathering - np.minimum(gathering * hidden, stages.middle.forward_s * hidden)
    return np.where(plan.sharding == Sharding.PARAMETERS, 0.0, exposed)


def _optimizer_s(
    model: ModelTable,
    plan: PlanTable,
    precision: PrecisionTable,
    rates: SystemRates,
    parameters: Parameters,
    layers: StageLayers,
) -> Array:
    """One pass over gradients, master weights and moments of the rank's share."""
    dense, expert = _rank_parameters(model, plan, parameters, layers)
    sharded = plan.sharding > Sharding.NONE
    dense = dense / np.where(sharded, plan.data_shard * plan.context, 1)
    expert = expert / np.where(sharded, np.maximum(plan.expert_data / np.maximum(plan.data_replicate, 1), 1), 1)
    streaming = rates.device.memory_bytes_per_s * rates.device.memory_ratio
    on_device = (dense + expert) * OPTIMIZER_BYTES * rates.optimizer_passes / streaming
    on_host = (dense + expert) * (precision.master_bytes + precision.moment_bytes) / rates.host_bytes_per_s
    return np.where(plan.offload_optimizer > 0, np.maximum(on_device, on_host), on_device)


def _component_weights(
    plan: PlanTable, layers: StageLayers, parts: _LayerParts, num_micro: Array, model: ModelTable
) -> dict[str, Array]:
    """Relative seconds of each component of a middle rank, host-bound waiting apart."""
    num_dense, num_moe = layers.middle_dense, layers.middle_moe
    weights: dict[str, Array] = {}
    for count, kind in ((num_dense, parts.dense), (num_moe, parts.moe)):
        for name, passes in kind.items():
            weights[name] = weights.get(name, 0.0) + num_micro * count * passes.total_s
    on_rank = np.where(plan.pipeline == 1, 1.0, 1.0 / plan.pipeline)
    weights["head"] = num_micro * on_rank * parts.head.total_s * (1 + model.num_mtp_layers)
    idle = num_dense * _waiting(parts.dense, parts.host_dense_s) + num_moe * _waiting(parts.moe, parts.host_moe_s)
    weights["host"] = num_micro * idle
    return weights


def _waiting(parts: dict[str, Passes], host_s: Array) -> Array:
    kernels = sum(p.total_s for p in parts.values())
    return _total(_layer_total(parts, host_s)) - kernels
