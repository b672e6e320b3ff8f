"""The fullest pipeline rank.

    allocated = states + n_flight Σ_layers kept + max(head, layer + live) + workspace
    reserved  = allocated + φ (activations + workspaces) + context + communicators

n_flight micro-batches are kept at once (`pipeline.closed_form.in_flight`): most on the first rank, one on the last
under 1F1B, which holds the head instead. When layers do not divide evenly the second rank may be the fullest.
head: logits, their gradient and the head's weight gradient at the start of the backward pass. layer: gradients that
are alive while one layer runs backward, and its largest frozen matrix as a GEMM reads it, where it is held in 8 or 4
bits. live: the activations that the layer has recomputed (max(head, layer) + live where a stack keeps the head's
tensors). φ is the allocator's fragmentation, a share of the tensors that come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from meshwright.arrays import Array, Mask, Table
from meshwright.calibration.memory import MemoryConstants
from meshwright.cost.flops import Parameters, count_parameters
from meshwright.cost.memory.activations import LayerBytes, layer_bytes, routed_copies
from meshwright.cost.memory.loss import LossBytes, largest_chunks, loss_bytes
from meshwright.cost.memory.states import RankLayers, StateRates, rank_parameters, state_bytes, state_rates
from meshwright.cost.pipeline.closed_form import in_flight as micro_batches_in_flight
from meshwright.cost.pipeline.schedules import Placement, column_of
from meshwright.cost.stages import StageLayers, split_layers
from meshwright.cost.tables import BatchTable, ModelTable, PlanTable, PrecisionTable, as_planned
from meshwright.kernels.traffic import LOOKED_UP_AT_ONCE, LOOKED_UP_BYTES

TINY_BYTES = 1e-12
"""Bytes of an element that count as none, to find the memory of 8-bit activations by leaving them out."""


@dataclass(frozen=True, kw_only=True)
class MemoryTable(Table):
    """Bytes per device; `allocated` is their sum on the fullest rank, `reserved` the memory that the device
    must have."""

    weights_bytes: Array
    gradients_bytes: Array
    optimizer_bytes: Array
    activations_bytes: Array
    workspace_bytes: Array
    allocated_bytes: Array
    reserved_bytes: Array
    without_loss_bytes: Array  # reserved on the rank with the head while its loss is computed, less the loss
    rank: Array  # the fullest pipeline rank of those that are compared: the first, the second and the last


@dataclass(frozen=True, kw_only=True)
class MomentsTable(Table):
    """Bytes per device of a rank that come and go during a step."""

    kept_bytes: Array  # activations of all micro-batches in flight at their most
    flights: Array  # micro-batches in flight at their most
    live_bytes: Array  # activations recomputed while a layer runs backward
    loss_bytes: Array  # of the head, from the logits to its weight gradient
    frees_loss: Array  # 0: they stay until the layers of the stage have run backward
    layer_bytes: Array  # gradients alive while a layer runs backward
    fixed_bytes: Array  # all the time


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Everything that is the same on all ranks of a plan."""

    model: ModelTable
    plan: PlanTable
    constants: MemoryConstants
    parameters: Parameters
    tokens: Array  # of a micro-batch on one rank
    num_micro: Array
    rates: StateRates
    kept: LayerBytes
    loss: LossBytes
    head_bytes: Array
    layer_bytes: Array
    waiting_bytes: Array
    fixed_bytes: Array
    stream_bytes: Array  # per element of the residual stream
    outside_allocator_bytes: Array


def estimate_memory(
    *, model: ModelTable, batch: BatchTable, plan: PlanTable, precision: PrecisionTable, constants: MemoryConstants
) -> MemoryTable:
    """Memory of the fullest rank of every plan; every argument's fields are numbers or arrays that broadcast."""
    case = _case_of(model, batch, plan, precision, constants)
    layers = split_layers(model, plan, by_cost=constants.splits_by_cost)
    first = _first(plan, layers)
    fullest = _rank(case, first, 0, in_flight=_mean_in_flight(plan, layers, first))
    if np.any(plan.pipeline > 1):
        second = (plan.pipeline > 2) & (layers.middle > layers.first)
        if np.any(second):
            middle = RankLayers(dense=layers.middle_dense, moe=layers.middle_moe, embedding=0, head=0)
            fullest = _fuller(fullest, _rank(case, middle, 1, in_flight=middle), second)
        end = _last(plan, layers)
        last = _rank(case, end, plan.pipeline - 1, in_flight=_mean_in_flight(plan, layers, end))
        fullest = _fuller(fullest, last, plan.pipeline > 1)
    return fullest


def loss_chunks(
    *,
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    constants: MemoryConstants,
    memory: MemoryTable,
    usable_bytes: Array,
) -> tuple[Array, Array]:
    """Chunks of the loss with which every plan is fastest in `usable_bytes`, and the bytes that it then reserves.

    `memory`: the plans' memory without that choice. A chunk of -1 is the engine's own.
    """
    factor = 1 + constants.fragmentation_ratio
    found = largest_chunks(
        model,
        plan,
        as_planned(precision, plan),
        constants,
        tokens=batch.seq_len * plan.micro_batch / plan.context,
        room_bytes=(usable_bytes - memory.without_loss_bytes) / factor,
    )
    reserved = np.maximum(memory.reserved_bytes, memory.without_loss_bytes + factor * found.head_bytes)
    changed = np.asarray(found.loss_chunk) >= 0
    return found.loss_chunk, np.where(changed, reserved, memory.reserved_bytes)


def rank_memory(
    *,
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    constants: MemoryConstants,
    layers: RankLayers,
    rank: Array,
    in_flight: RankLayers | None = None,
) -> tuple[MemoryTable, MomentsTable]:
    """Memory of pipeline ranks of a plan with the layers that each holds, in one direction, in all its stages.

    Its second part is the memory that comes and goes during a step.
    `in_flight`: the part of them that a mean micro-batch has passed; None: all, as without mirrored stages.
    """
    case = _case_of(model, batch, plan, precision, constants)
    passed = layers if in_flight is None else in_flight
    return _rank(case, layers, rank, in_flight=passed), _moments(case, layers, rank, in_flight=passed)


def usual_ranks(model: ModelTable, plan: PlanTable, constants: MemoryConstants) -> tuple[RankLayers, RankLayers]:
    """(layers, those that a mean micro-batch in flight has passed) of every rank of one plan with a pipeline, each [p].

    As `estimate_memory` compares ranks: those between the ends hold what the one before the last holds.
    """
    layers = split_layers(model, plan, by_cost=constants.splits_by_cost)
    first, last = _first(plan, layers), _last(plan, layers)
    between = [RankLayers(dense=layers.middle_dense, moe=layers.middle_moe, embedding=0, head=0)] * (
        int(np.max(plan.pipeline)) - 2
    )
    ends = (_mean_in_flight(plan, layers, first), _mean_in_flight(plan, layers, last))
    return _stacked([first, *between, last]), _stacked([ends[0], *between, ends[1]])


def _stacked(ranks: Sequence[RankLayers]) -> RankLayers:
    columns = {f.name: [float(np.ravel(getattr(r, f.name))[0]) for r in ranks] for f in fields(RankLayers)}
    return RankLayers(**{name: np.array(column) for name, column in columns.items()})


def memory_details(
    *,
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    constants: MemoryConstants,
    memory: MemoryTable,
) -> dict[str, dict[str, Array]]:
    """Bytes of the tensors of one plan's fullest rank, by part and name. The names of a part add up to it.

    `memory`: the plan's memory, from `estimate_memory`.
    """
    case = _case_of(model, batch, plan, precision, constants)
    layers, rank = split_layers(model, plan, by_cost=constants.splits_by_cost), np.max(memory.rank)
    held = _first(plan, layers)
    if rank > 0:
        middle = RankLayers(dense=layers.middle_dense, moe=layers.middle_moe, embedding=0, head=0)
        held = _last(plan, layers) if rank == np.max(plan.pipeline) - 1 else middle
    parameters = rank_parameters(model, case.parameters, plan, held)
    cached = (parameters.split - parameters.unit + parameters.expert) * case.rates.cached
    live = np.maximum((held.dense > 0) * case.kept.live_dense, (held.moe > 0) * case.kept.live_moe)
    is_loss = held.head * case.head_bytes > case.layer_bytes + live * (constants.frees_head > 0)
    recomputed = np.where(is_loss & (constants.frees_head > 0), 0.0, live)
    narrow = _narrow_bytes(case, precision, batch, held, rank)
    loss = {name: np.where(is_loss, size, 0.0) for name, size in case.loss.named().items()}
    whole = _dequantised_bytes(model, plan, precision)
    parts = {
        "weights": {"weights": memory.weights_bytes - cached, "cache of 8-bit weights": cached},
        "gradients": {"gradients": memory.gradients_bytes},
        "optimizer": {"optimizer": memory.optimizer_bytes},
        "activations": {
            "as computed": memory.activations_bytes - narrow - recomputed,
            "in 8 bits": narrow,
            "recomputed in a layer": recomputed,
        },
        "workspace": {
            **loss,
            "gradients in a layer": np.where(is_loss, 0.0, case.layer_bytes - whole),
            "dequantised matrix": np.where(is_loss, 0.0, whole),
            "gathered and waiting": case.waiting_bytes,
            "GEMMs and attention": case.fixed_bytes - case.waiting_bytes,
        },
    }
    return parts


def _narrow_bytes(case: _Case, precision: PrecisionTable, batch: BatchTable, held: RankLayers, rank: Array) -> Array:
    """Bytes of kept activations in 8 bits: all kept bytes less the bytes without them."""
    precision, model, plan = as_planned(precision, case.plan), case.model, case.plan
    if not np.any(precision.stored_ffn_bytes) and not np.any(precision.stored_norm_bytes):
        return 0.0
    nothing = {
        name: np.where(np.asarray(getattr(precision, name)) > 0, TINY_BYTES, 0.0)
        for name in ("stored_ffn_bytes", "stored_norm_bytes")
    }
    less = layer_bytes(model, batch, plan, replace(precision, **nothing), case.constants, case.tokens)
    flights = _flights(case, rank)
    return flights * (_kept_bytes(model, case.kept, held) - _kept_bytes(model, less, held))


def _flights(case: _Case, rank: Array) -> Array:
    """Micro-batches whose activations a pipeline rank keeps at once; one without a pipeline, in every schedule."""
    plan = case.plan
    found = micro_batches_in_flight(plan.schedule, plan.pipeline, plan.virtual_pipeline, case.num_micro, rank)
    return np.where(np.asarray(plan.pipeline) > 1, found, 1.0)


def _kept_bytes(model: ModelTable, kept: LayerBytes, held: RankLayers) -> Array:
    """Bytes that the layers and prediction modules of a rank keep of a micro-batch."""
    num_mtp = held.head * model.num_mtp_layers
    return held.dense * kept.dense + held.moe * kept.moe + num_mtp * kept.module


def _case_of(
    model: ModelTable, batch: BatchTable, plan: PlanTable, precision: PrecisionTable, constants: MemoryConstants
) -> _Case:
    parameters, precision = count_parameters(model), as_planned(precision, plan)
    tokens = batch.seq_len * plan.micro_batch / plan.context
    loss = loss_bytes(model, plan, precision, constants, tokens)
    waiting = _waiting_bytes(model, plan, constants, tokens)
    return _Case(
        model=model,
        plan=plan,
        constants=constants,
        parameters=parameters,
        tokens=tokens,
        num_micro=batch.global_batch / (plan.micro_batch * plan.data),
        rates=state_rates(model, batch, plan, precision, constants),
        kept=layer_bytes(model, batch, plan, precision, constants, tokens),
        loss=loss,
        head_bytes=loss.total,
        layer_bytes=_layer_workspace_bytes(model, plan, precision, constants, tokens),
        waiting_bytes=waiting,
        fixed_bytes=constants.workspace_bytes + waiting,
        outside_allocator_bytes=_outside_allocator_bytes(plan, constants),
        stream_bytes=precision.activation_bytes,
    )


def _first(plan: PlanTable, layers: StageLayers) -> RankLayers:
    """The first rank. It holds the head too in a V-shaped or mirrored placement."""
    both = (plan.pipeline == 1) | column_of(lambda r: r.placement is not Placement.LOOP, plan.schedule)
    return RankLayers(dense=layers.first_dense, moe=layers.first_moe, embedding=1, head=np.where(both, 1, 0))


def _mean_in_flight(plan: PlanTable, layers: StageLayers, held: RankLayers) -> RankLayers:
    """Layers and ends that a mean micro-batch in flight on an end rank has passed there: `held` but for mirrored ranks.

    These hold the first stage for one direction, where p micro-batches wait, and the last one for the other, where one
    does.
    """
    mirrored = column_of(lambda r: r.placement is Placement.MIRRORED, plan.schedule) & (plan.pipeline > 1)
    if not np.any(mirrored):
        return held
    on_last = 1 / (plan.pipeline + 1)
    mean = RankLayers(
        dense=layers.start_dense + 2 * on_last * (layers.first_dense - layers.start_dense),
        moe=layers.start_moe + 2 * on_last * (layers.first_moe - layers.start_moe),
        embedding=1 - on_last,
        head=on_last,
    )
    names = [f.name for f in fields(RankLayers)]
    return RankLayers(**{n: np.where(mirrored, getattr(mean, n), getattr(held, n)) for n in names})


def _last(plan: PlanTable, layers: StageLayers) -> RankLayers:
    """The last rank, with a copy of the embedding where the head is tied to it."""
    return RankLayers(
        dense=layers.last_dense,
        moe=layers.last_moe,
        embedding=column_of(lambda r: int(r.placement is Placement.MIRRORED), plan.schedule),
        head=column_of(lambda r: int(r.placement is not Placement.V), plan.schedule),
    )


def _rank(case: _Case, layers: RankLayers, rank: Array, *, in_flight: RankLayers) -> MemoryTable:
    """One pipeline rank. `in_flight`: the part of `layers` that a mean micro-batch in flight has passed."""
    model, plan, constants = case.model, case.plan, case.constants
    # A mirrored rank also holds the stage of the opposite rank. A micro-batch in flight is on one of them.
    num_stages = np.where(plan.pipeline > 1, column_of(lambda r: r.stages_held, plan.schedule), 1)
    resident = replace(layers, dense=num_stages * layers.dense, moe=num_stages * layers.moe)
    held = rank_parameters(model, case.parameters, plan, resident)
    states = state_bytes(case.rates, held, resident.total)
    moments = _moments(case, layers, rank, in_flight=in_flight)
    live, workspace = _at_fullest_moment(case, moments.loss_bytes, moments.live_bytes)
    activations = moments.kept_bytes + live
    gradients = _gradients_at_peak(case, states.gradients, activations)
    factor, outside = 1 + constants.fragmentation_ratio, case.outside_allocator_bytes
    states_bytes = states.weights + gradients + states.optimizer
    at_loss = states_bytes + factor * (activations - live + case.fixed_bytes) + outside
    return MemoryTable(
        weights_bytes=states.weights,
        gradients_bytes=gradients,
        optimizer_bytes=states.optimizer,
        activations_bytes=activations,
        workspace_bytes=workspace,
        allocated_bytes=states_bytes + activations + workspace,
        reserved_bytes=states_bytes + factor * (activations + workspace) + outside,
        without_loss_bytes=(layers.head > 0) * at_loss,
        rank=rank,
    )


def _moments(case: _Case, layers: RankLayers, rank: Array, *, in_flight: RankLayers) -> MomentsTable:
    kept, flights = case.kept, _flights(case, rank)
    embedded = in_flight.embedding * case.stream_bytes * case.tokens * case.model.hidden / case.plan.tensor
    per_micro = _kept_bytes(case.model, kept, in_flight)
    return MomentsTable(
        kept_bytes=flights * (per_micro + embedded) - _offloaded(case, flights * per_micro),
        flights=flights,
        live_bytes=np.maximum((layers.dense > 0) * kept.live_dense, (layers.moe > 0) * kept.live_moe),
        loss_bytes=layers.head * case.head_bytes,
        frees_loss=case.constants.frees_head > 0,
        layer_bytes=case.layer_bytes,
        fixed_bytes=case.fixed_bytes,
    )


def _at_fullest_moment(case: _Case, head: Array, live: Array) -> tuple[Array, Array]:
    """Recomputed activations and workspace when most is in memory: with the head, or while a layer runs backward.

    A stack that keeps the head's tensors has both at once.
    """
    freed, layer = case.constants.frees_head > 0, case.layer_bytes
    at_head = freed & (head > layer + live)
    workspace = np.where(at_head, head, np.where(freed, layer, np.maximum(head, layer)))
    return np.where(at_head, 0, live), workspace + case.fixed_bytes


def _offloaded(case: _Case, kept: Array) -> Array:
    """Bytes of kept activations that lie in host memory. Two layers stay: that which runs and that which is copied."""
    if not np.any(case.constants.offloaded_activations):
        return 0.0
    here = 2 * np.maximum(case.kept.dense, case.kept.moe)
    return case.constants.offloaded_activations * np.maximum(kept - here, 0.0)


def _gradients_at_peak(case: _Case, gradients: Array, activations: Array) -> Array:
    """Gradients that are there at the peak.

    Allocated during a single backward pass they replace activations one by one: what counts is the larger of both.
    """
    if not np.any(case.constants.gradients_as_they_come):
        return gradients
    replaced = (case.constants.gradients_as_they_come > 0) & (case.num_micro <= 1)
    return np.where(replaced, np.maximum(gradients - activations, 0), gradients) if np.any(replaced) else gradients


def _outside_allocator_bytes(plan: PlanTable, constants: MemoryConstants) -> Array:
    """Driver context and one communicator for every parallelism in use."""
    widths = (plan.tensor, plan.context, plan.data, plan.pipeline, plan.expert)
    return constants.context_bytes + sum((width > 1) * constants.communicator_bytes for width in widths)


def _fuller(one: MemoryTable, other: MemoryTable, exists: Mask) -> MemoryTable:
    """The fuller of two ranks; `other` only where it exists."""
    swap = (other.reserved_bytes > one.reserved_bytes) & exists
    fuller = {f.name: np.where(swap, getattr(other, f.name), getattr(one, f.name)) for f in fields(MemoryTable)}
    with_loss = np.maximum(one.without_loss_bytes, other.without_loss_bytes)
    return MemoryTable(**fuller | {"without_loss_bytes": np.where(exists, with_loss, one.without_loss_bytes)})


def _layer_workspace_bytes(
    model: ModelTable, plan: PlanTable, precision: PrecisionTable, constants: MemoryConstants, tokens: Array
) -> Array:
    """Gradients that are alive while one layer runs backward.

    They hold every matrix's activations and one weight, and the residual stream gathered over tensor ranks
    (norm output, its gradient, the layer's gradient). They hold keys and values of one other context rank and
    their gradients, or the gradients of all ranks if all ranks' keys are gathered.
    """
    t, h, m, e = plan.tensor, model.hidden, model.ffn_matrices, precision.activation_bytes
    weight = (model.lora_rank == 0) * e * (m - 1) * h * model.ffn
    dense = (e * m * tokens * model.ffn + weight) / t
    routed = routed_copies(model, plan, constants) * tokens / t
    moe = e * routed * (2 * model.expert_hidden + m * model.expert_ffn)
    ranks = np.where(constants.gathers_keys > 0, plan.context, 2)
    key_value = model.kv_heads * (model.qk_dim + model.v_dim) * tokens / t
    gradients = np.maximum(dense, moe) + (plan.context > 1) * e * ranks * key_value + 3 * e * tokens * h
    return gradients + _dequantised_bytes(model, plan, precision)


def _dequantised_bytes(model: ModelTable, plan: PlanTable, precision: PrecisionTable) -> Array:
    """A rank's part of the largest frozen matrix, whole for one GEMM; and, where PyTorch makes it so, parts of it."""
    weights = model.quantised_matrix / plan.tensor
    looked_up = (model.quantised_bytes < 1) * precision.dequantises_in_parts * LOOKED_UP_BYTES
    summed = 8.0 * model.dora_matrix / plan.tensor  # DoRA: the weight in fp32, and its sum with the update
    return weights * precision.activation_bytes + np.minimum(weights, LOOKED_UP_AT_ONCE) * looked_up + summed


def _waiting_bytes(model: ModelTable, plan: PlanTable, constants: MemoryConstants, tokens: Array) -> Array:
    """Residual streams gathered over tensor ranks whose memory waits for the stream that used them."""
    num = np.where(plan.pipeline > 1, constants.waiting_buffers_in_pipeline, constants.waiting_buffers)
    return (plan.tensor > 1) * num * 2 * model.hidden * tokens
