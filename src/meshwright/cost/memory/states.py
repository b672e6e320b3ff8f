"""Weights, gradients and optimizer states of one pipeline rank, in bytes.

A parameter has w, g and o bytes of weight, gradient and optimizer states, sharded over D ranks:

    none          w + g + o
    optimizer     w + g + o / D                                     ZeRO-1
    gradients     w + (g + o) / D                                   ZeRO-2
    parameters    (w + g + o) / D + gathered and unreduced layers   ZeRO-3, FSDP; w is then the fp32 master

Expert parameters have a D of their own, the ranks that hold the same experts. Source: Rajbhandari et al. 2020,
arXiv 1910.02054, section 5; the bytes of mixed precision with Adam: section 3.1.

FSDP gathers a layer while it computes the one before, so two are there at once; embedding and head are gathered
as one unit that stays for the step. XLA gathers the operands of each GEMM: a matrix and the one after it. Frozen
matrices in 8 or 4 bits are gathered as they are held. A pipeline frees nothing between micro-batches (to gather again
for each would cost more than it saves; torchtitan's `reshard_after_forward: default`), so all weights are gathered, and
gradients are reduced once, after the last micro-batch. A layer's whole gradients go as its shard comes
(`foreach_reduce` of PyTorch's FSDP2): there is never more than the larger of both. The same holds under `reduces_once`
without a pipeline; the gradients then have the format of gathered parameters, to which autograd adds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.arrays import Array, Mask
from meshwright.calibration.memory import MemoryConstants
from meshwright.cost.casts import cache_bytes
from meshwright.cost.flops import Parameters, count_parameters
from meshwright.cost.tables import BatchTable, ModelTable, PlanTable, PrecisionTable, prediction_module
from meshwright.specs.plan import Sharding


@dataclass(frozen=True, kw_only=True)
class RankLayers:
    """Layers of one pipeline rank by kind, and 1 where it holds the embedding or the head."""

    dense: Array
    moe: Array
    embedding: Array
    head: Array

    @property
    def total(self) -> Array:
        return self.dense + self.moe


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Parameters of one rank by how they are split.

    Summed over t tensor ranks and e x z expert ranks a stage has t split + repeated + e z expert parameters.
    """

    split: Array  # over tensor ranks, `unit` included
    repeated: Array  # norms, routers, projections of multi-token prediction modules: on every tensor rank
    expert: Array  # over expert and expert tensor ranks
    unit: Array  # embedding and head, split over tensor ranks
    adapters: Array  # LoRA, split over tensor ranks; 0 when every parameter is trained
    saved: Array  # of `unit`, what is trained beside adapters

    @property
    def dense(self) -> Array:
        """All but the routed experts and the adapters."""
        return self.split + self.repeated


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of one rank, or bytes per parameter."""

    weights: Array
    gradients: Array
    optimizer: Array


@dataclass(frozen=True, kw_only=True)
class StateRates:
    """Bytes per parameter under a plan's sharding; the same on all its ranks."""

    dense: StateBytes
    expert: StateBytes
    adapters: StateBytes
    quantised: Array  # bytes that a dense layer's frozen weight in 8 or 4 bits takes less
    cached: Array  # quantised copies per weight of a layer's linear layers
    unit_extra: Array  # optimizer bytes that a parameter of embedding and head has more
    gathered: Array  # per parameter of a layer gathered at once
    gathered_unit: Array  # the same of embedding and head
    unreduced: Array  # per gradient waiting for its reduction
    whole: Array  # per gradient that is added up over micro-batches before its reduction; 0: shards are
    matrix: Array  # parameters of a rank's largest matrix, where matrices are gathered by themselves; inf: layers are
    head: Array  # of its part of the output head, likewise
    keeps_gathered: Array  # True: all of a rank's parameters are gathered at once


def rank_parameters(model: ModelTable, parameters: Parameters, plan: PlanTable, layers: RankLayers) -> RankParameters:
    """Parameters that one rank holds. A multi-token prediction module lies with the head."""
    share = 1 / plan.tensor
    # A tied head without the embedding beside it is a copy.
    head = parameters.head + (model.tied > 0) * (1 - layers.embedding) * model.vocab * model.hidden
    unit = (layers.embedding * parameters.embedding + layers.head * head) * share
    split, repeated, expert = _held(parameters, layers.dense, layers.moe)
    mtp, is_moe = layers.head * model.num_mtp_modules, np.where(model.num_experts > 0, 1, 0)
    if np.any(mtp):
        module = prediction_module(model)
        of_module = parameters if module is model else count_parameters(module)
        in_modules = _held(of_module, mtp * (1 - is_moe), mtp * is_moe)
        split, repeated, expert = (a + b for a, b in zip((split, repeated, expert), in_modules, strict=True))
    final_norm = layers.head * model.hidden * (1 + model.norm_bias)
    return RankParameters(
        split=split * share + unit,
        repeated=repeated + mtp * parameters.mtp_projection + final_norm,
        expert=expert / (plan.expert * plan.expert_tensor),
        unit=unit,
        adapters=layers.total * parameters.lora_layer * share,
        saved=(layers.embedding * parameters.embedding * model.saved_embedding + layers.head * head * model.saved_head)
        * share,
    )


def _held(p: Parameters, dense: Array, moe: Array) -> tuple[Array, Array, Array]:
    """Parameters of so many layers of each kind: (split over tensor ranks, on every one, of routed experts)."""
    split = (dense + moe) * p.attention_layer + dense * p.dense_ffn_layer + moe * p.shared_layer
    return split, (dense + moe) * p.norm_layer + moe * p.router_layer, moe * p.experts_layer


def state_rates(
    model: ModelTable, batch: BatchTable, plan: PlanTable, precision: PrecisionTable, constants: MemoryConstants
) -> StateRates:
    """Bytes per parameter of weights, gradients and optimizer states under each ZeRO stage."""
    sharded = plan.sharding == Sharding.PARAMETERS
    full = _unsharded(precision, constants, sharded=sharded)
    width = plan.data_shard * plan.context
    expert_width = np.maximum(1, width * plan.tensor / (plan.expert * plan.expert_tensor))
    resident = np.where(plan.offload_optimizer > 0, 0, 1)
    staying = np.where(
        sharded | ~keeps_masters(model, plan, constants.keeps_masters), 0.0, _master(precision, constants)
    )
    optimizer = np.where(resident, full.optimizer, staying)
    frozen = model.lora_rank > 0
    trained = 1 - frozen * 1
    # Frozen weights have no master to be rounded from: they are kept in the format they multiply in.
    narrow = np.minimum(precision.weight_bytes, precision.linear_input_bytes)
    frozen_weight = np.where(constants.frozen_in_16_bits > 0, precision.weight_bytes, narrow)
    frozen_weight = _stated(constants.frozen_bytes, frozen_weight)
    in_codes = model.quantised_bytes > 0
    second = constants.second_gradient_bytes * (full.gradients > 2) * (plan.data > 1) * (1 - sharded * 1)
    second = second + constants.bucket_gradient_bytes * (plan.data > 1) * (plan.sharding < Sharding.GRADIENTS)

    def share(stage: Sharding, ranks: Array) -> Array:
        return np.where(plan.sharding >= stage, 1 / ranks, 1.0)

    def shared_by(ranks: Array, frozen_bytes: Array) -> StateBytes:
        return StateBytes(
            weights=share(Sharding.PARAMETERS, ranks) * np.where(frozen, frozen_bytes, full.weights),
            gradients=(share(Sharding.GRADIENTS, ranks) * full.gradients + second) * trained,
            optimizer=share(Sharding.OPTIMIZER, ranks) * optimizer * trained,
        )

    shared = sharded & (width > 1)
    sent = _stated(constants.wire_parameter_bytes, precision.gather_bytes)
    return StateRates(
        dense=shared_by(width, frozen_weight),
        expert=shared_by(expert_width, np.where(in_codes, model.quantised_bytes, frozen_weight)),
        adapters=StateBytes(
            # Every rank keeps the whole first values of adapters that begin in their base, in fp32.
            weights=share(Sharding.PARAMETERS, width) * full.weights + 4 * plan.tensor * model.lora_in_base,
            gradients=share(Sharding.GRADIENTS, width) * full.gradients,
            optimizer=share(Sharding.OPTIMIZER, width) * optimizer,
        ),
        quantised=share(Sharding.PARAMETERS, width) * in_codes * (frozen_weight - model.quantised_bytes),
        cached=cache_bytes(model, batch, plan, precision, frozen_weight),
        unit_extra=np.where(plan.sharding >= Sharding.OPTIMIZER, 1 / width, 1.0)
        * precision.adamw_state_bytes
        * resident
        * trained,
        gathered=shared * np.where(in_codes, model.quantised_bytes, sent),
        gathered_unit=shared * sent,
        unreduced=shared * _stated(constants.wire_gradient_bytes, precision.reduce_bytes) * trained,
        whole=_adds_up_whole(batch, plan, constants) * (width > 1) * sent * trained,
        matrix=np.where(constants.gathers_matrices > 0, _largest_matrix(model, plan), np.inf),
        head=np.where(constants.gathers_matrices > 0, model.head_rows * model.hidden / plan.tensor, np.inf),
        keeps_gathered=plan.pipeline > 1,
    )


def _adds_up_whole(batch: BatchTable, plan: PlanTable, constants: MemoryConstants) -> Mask:
    """True where ranks that shard gradients reduce them once, after several micro-batches."""
    several = np.asarray(batch.global_batch) > plan.micro_batch * plan.data
    return (np.asarray(constants.reduces_once) > 0) & (plan.sharding >= Sharding.GRADIENTS) & several


def _largest_matrix(model: ModelTable, plan: PlanTable) -> Array:
    """Parameters of the largest matrix of a layer on one rank: one tensor has a matrix of all its experts."""
    dense = (model.num_dense_layers > 0) * model.hidden * model.ffn / plan.tensor
    experts = model.num_experts / (plan.expert * plan.expert_tensor) * model.expert_hidden * model.expert_ffn
    attention = model.hidden * model.num_heads * model.qk_dim / plan.tensor
    return np.maximum(np.maximum(dense, experts), attention)


def keeps_masters(model: ModelTable, plan: PlanTable, keeps: Array) -> Mask:
    """True where offloading leaves the masters on the device: FSDP `keeps` its shards there, and shards these.

    It does where several ranks hold the same layers, or experts apart from them.
    """
    apart = (np.asarray(model.num_experts) > 0) & (plan.tensor * plan.pipeline > 1)
    return (np.asarray(keeps) > 0) & ((plan.data * plan.context > 1) | apart)


def _master(precision: PrecisionTable, constants: MemoryConstants) -> Array:
    return np.where(constants.optimizer_in_16_bits > 0, 0.0, precision.master_bytes)


def _stated(wire_bytes: Array, of_recipe: Array) -> Array:
    """Bytes on the wire: the stack's where it states them, else the recipe's."""
    return np.where(np.asarray(wire_bytes) > 0, wire_bytes, of_recipe)


def _unsharded(precision: PrecisionTable, constants: MemoryConstants, *, sharded: Array) -> StateBytes:
    """Bytes per parameter of a stack on one rank. `sharded`: FSDP's one fp32 copy is both weight and master."""
    # recipes without masters state their own formats: fp32, and a run that says that all is in 16 bits
    narrow = (constants.optimizer_in_16_bits > 0) & (np.asarray(precision.master_bytes) > 0)
    master = _master(precision, constants)
    optimizer_states = np.where(narrow, 0.5, 1.0) * precision.optimizer_state_bytes
    most = np.where(narrow | (constants.accumulates_in_16_bits > 0), 2.0, np.inf)
    gradients = np.minimum(precision.grad_bytes, most)
    widened = np.where(gradients > 2, 0, constants.step_gradient_bytes)
    return StateBytes(
        weights=np.where(
            sharded, np.maximum(master, precision.weight_bytes), precision.weight_bytes + precision.weight_cache_bytes
        ),
        gradients=gradients,
        optimizer=np.where(sharded, optimizer_states, master + optimizer_states) + widened,
    )


def state_bytes(rates: StateRates, held: RankParameters, num_layers: Array) -> StateBytes:
    """Weights, gradients and optimizer states of one rank with `num_layers` layers."""
    dense, expert, adapters = held.dense, held.expert, held.adapters
    layer = (dense + expert - held.unit) / np.maximum(num_layers, 1)
    in_layers = 2 * np.minimum(layer, rates.matrix)
    at_once = np.where(rates.keeps_gathered, dense + expert - held.unit, in_layers)
    unit = np.where(rates.keeps_gathered, held.unit, np.minimum(held.unit, np.maximum(rates.head - in_layers, 0.0)))
    adapters_at_once = adapters * np.where(rates.keeps_gathered, 1.0, 2 / np.maximum(num_layers, 1))

    def total(name: str) -> Array:
        trained = adapters + held.saved
        parts = zip((dense - held.saved, expert, trained), (rates.dense, rates.expert, rates.adapters), strict=True)
        return sum(count * getattr(rate, name) for count, rate in parts)

    gradients = total("gradients")
    last = np.maximum(gradients, (dense + expert) * np.where(rates.whole > 0, rates.whole, rates.unreduced))
    return StateBytes(
        weights=total("weights")
        + at_once * rates.gathered
        + (unit + adapters_at_once) * rates.gathered_unit
        + (held.split - held.unit + expert) * rates.cached
        - (held.split - held.unit) * rates.quantised,
        gradients=np.where(
            np.logical_or(rates.keeps_gathered, rates.whole > 0),
            last,
            gradients + np.minimum(layer, rates.matrix) * rates.unreduced,
        ),
        optimizer=total("optimizer") + held.unit * rates.unit_extra,
    )
