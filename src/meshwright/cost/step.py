"""Seconds of one training step, by component.

    step = ((work of the slowest rank + bubble + exposed data parallelism + optimizer) x factor + fixed) x stragglers

Work is the micro-batches times a rank's layers (`cost.layers`); the bubble is a schedule's filling and
draining (`cost.pipeline`); data parallelism and the optimizer run once a step (`cost.update`). `factor` is
the product of the stack's maturity and everything unexplained. Stragglers grow with the number of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Array, Table, distinct_rows, scalar
from meshwright.catalog.stacks import PADS_TO_CAPACITY
from meshwright.cost.casts import cast_passes
from meshwright.cost.collectives import send_receive_s
from meshwright.cost.compute import compute_details, layer_compute
from meshwright.cost.flops import count_parameters
from meshwright.cost.groups import groups_of
from meshwright.cost.layers import (
    LayerParts,
    LayerTimes,
    StepContext,
    accumulation,
    dequantised,
    general_factor,
    layer_parts,
    layer_times,
    paired_layer_s,
)
from meshwright.cost.passes import PassTimes, total_of
from meshwright.cost.pipeline.closed_form import waiting_s
from meshwright.cost.pipeline.schedules import column_of
from meshwright.cost.rates import SystemRates
from meshwright.cost.routing import busiest_rank_ratio
from meshwright.cost.stages import StageLayers, end_shares, split_layers
from meshwright.cost.tables import (
    BatchTable,
    ModelTable,
    PlanTable,
    PrecisionTable,
    WeightCache,
    as_planned,
    prediction_module,
)
from meshwright.cost.update import data_parallel_s, optimizer_s
from meshwright.specs.plan import Sharding


@dataclass(frozen=True, kw_only=True)
class RankTimes(Table):
    """One micro-batch on the first, a middle and the last pipeline rank, on their mean, and on each rank's
    layers. Seconds.

    A rank in a V or a mirrored placement adds up the time of all its passes over all its stages.
    """

    first: LayerTimes
    middle: LayerTimes  # of `StageLayers.middle`, or the fullest where a plan names its layers
    last: LayerTimes
    mean: LayerTimes
    dense: LayerTimes  # one layer
    moe: LayerTimes  # one layer
    start: LayerTimes  # of the first stage besides its layers: the embedding
    end: LayerTimes  # of the last stage: multi-token prediction, head and loss
    layer_saving_s: Array  # of a mixture layer: both its passes less an overlapped pair of them (DualPipe)
    rank_saving_s: Array  # of the layers of `middle`
    num_dense_layers: Array  # of the model
    num_moe_layers: Array
    transfer_s: Array  # one hop between neighbouring ranks


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Steps of many plans. `components_s` add up to `step_s`."""

    step_s: Array
    components_s: dict[str, Array]
    stages: RankTimes
    num_micro_batches: Array
    tokens_per_s_per_device: Array
    cpu_oversubscription: Array  # of the ranks, as in `SystemRates`


def step_context(
    *,
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    rates: SystemRates,
    load_factor: Array = 1.0,
) -> StepContext:
    """Return the values that all parts of a step share. Arguments are the same as for `estimate_steps`."""
    # A capacity leaves nothing for routers to decide.
    stated = rates.expert_imbalance * np.where(rates.pads_experts == PADS_TO_CAPACITY, 1.0, load_factor)
    return StepContext(
        model=model,
        batch=batch,
        plan=plan,
        precision=_on_the_wire(as_planned(precision, plan), plan, rates),
        rates=rates,
        groups=groups_of(plan, rates.network),
        parameters=count_parameters(model),
        load_factor=busiest_rank_ratio(model, plan, stated=stated, is_padded=rates.pads_experts),
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

    load_factor: tokens of the busiest expert rank over the mean, besides the imbalance that the stack states; 1.0 is
    forced balance, as in benchmarks.
    """
    context = step_context(
        model=model, batch=batch, plan=plan, precision=precision, rates=rates, load_factor=load_factor
    )
    parts = layer_parts(context, layer_compute(context.shapes))
    layers = split_layers(model, plan)
    pieces = _pieces(context, parts, _overlaps_pairs(plan))
    stages = _stages(model, plan, layers, pieces)
    num_micro = context.num_micro_batches

    work, bubble = _pipeline_s(stages, plan, rates, num_micro)
    factor = pieces.factor
    once = {
        "bubble": bubble * factor,
        "data_parallel": data_parallel_s(context, layers, stages.middle) * factor,
        "optimizer": optimizer_s(context, layers) * factor,
        "fixed": rates.step_s * 1.0,
    }
    unhindered = work * factor + sum(once.values())
    stragglers = unhindered * _straggling(plan, rates)
    step = unhindered + stragglers

    shares = _component_seconds(context, parts, stages)
    if np.any(stages.rank_saving_s):
        shares["expert_parallel"] = np.maximum(shares["expert_parallel"] - stages.rank_saving_s, 0.0)
    scale = work * factor / sum(shares.values())
    components: dict[str, Array] = {name: seconds * scale for name, seconds in shares.items()}
    components |= once | {"stragglers": stragglers}
    return StepTable(
        step_s=step,
        components_s=components,
        stages=stages,
        num_micro_batches=num_micro,
        tokens_per_s_per_device=batch.global_batch * batch.seq_len / (step * plan.num_devices),
        cpu_oversubscription=rates.cpu_oversubscription,
    )


PIPELINE_COLUMNS = ("virtual_pipeline", "schedule", "first_layers", "middle_layers", "last_layers", "fewest_layers")
"""Columns of a plan that say where layers lie and when they run, and change no layer's time."""


def without_updates_s(
    *, model: ModelTable, batch: BatchTable, plan: PlanTable, precision: PrecisionTable, rates: SystemRates
) -> Array:
    """Step times without the reduction of gradients and without the optimizer. Arguments: as for `estimate_steps`.

    Every field of `plan` is an array. Layers of plans that differ in `PIPELINE_COLUMNS` alone are costed once.
    """
    names = [f.name for f in fields(plan) if f.name not in PIPELINE_COLUMNS]
    first, kind = distinct_rows([getattr(plan, name) for name in names])
    context = step_context(model=model, batch=batch, plan=plan.take(first), precision=precision, rates=rates)
    parts = layer_parts(context, layer_compute(context.shapes))
    pieces = _pieces(context, parts, _overlaps_pairs(plan)).take(kind)
    stages = _stages(model, plan, split_layers(model, plan), pieces)
    work, bubble = _pipeline_s(stages, plan, rates, batch.global_batch / (plan.micro_batch * plan.data))
    return ((work + bubble) * pieces.factor + rates.step_s) * (1 + _straggling(plan, rates))


def _straggling(plan: PlanTable, rates: SystemRates) -> Array:
    """Seconds lost to stragglers over the others of a step."""
    nodes = np.maximum(plan.num_devices / np.maximum(rates.network.domain, 1), 1)
    return rates.slowdown_per_doubling * np.log2(nodes)


def _on_the_wire(precision: PrecisionTable, plan: PlanTable, rates: SystemRates) -> PrecisionTable:
    """`precision` with the formats in which the stack reduces gradients and gathers parameters, where it says so."""
    gradient, parameter = rates.wire_gradient_bytes, rates.wire_parameter_bytes
    narrow = (np.asarray(rates.wire_shard_bytes) > 0) & (plan.sharding >= Sharding.GRADIENTS)
    gradient = np.where(narrow, rates.wire_shard_bytes, gradient)
    return replace(
        precision,
        reduce_bytes=np.where(np.asarray(gradient) > 0, gradient, precision.reduce_bytes),
        gather_bytes=np.where(np.asarray(parameter) > 0, parameter, precision.gather_bytes),
    )


@dataclass(frozen=True, kw_only=True)
class _Pieces(Table):
    """Times of one micro-batch, wherever layers lie and whatever the schedule. Seconds."""

    dense: LayerTimes
    moe: LayerTimes
    start: LayerTimes
    end: LayerTimes
    pair_saving_s: Array  # of a mixture layer, where the schedule overlaps pairs of passes
    hop_s: Array
    factor: Array


def _pieces(s: StepContext, parts: LayerParts, overlaps: NDArray[np.bool_]) -> _Pieces:
    """`overlaps`: of all plans that have these layers, which have a schedule that overlaps pairs of passes."""
    dense, moe = layer_times(parts.dense, parts.host_dense_s), layer_times(parts.moe, parts.host_moe_s)
    embedding, head = _times_of(parts.embedding), _times_of(parts.head)
    dense, moe, embedding, head = (_with_reference(s, times) for times in (dense, moe, embedding, head))
    head = replace(head, input_s=head.input_s + s.batch.head_passes * parts.head.forward_s)
    num_mtp, split = s.model.num_mtp_layers, np.where(s.plan.sequence_parallel > 0, s.plan.tensor, 1)
    message = s.tokens * s.model.streams * s.model.hidden * s.precision.activation_bytes / split
    saving: Array = 0.0
    if np.any(overlaps):
        saving = np.clip(moe.total_s - paired_layer_s(s, parts.moe, parts.host_moe_s), 0.0, moe.forward_s)
    return _Pieces(
        dense=dense,
        moe=moe,
        start=embedding,
        end=_total((num_mtp, _module_times(s, dense, moe)), (1 + num_mtp, head)),
        pair_saving_s=saving,
        hop_s=send_receive_s(message, s.groups.neighbours) + s.rates.pipeline_transfer_s,
        factor=general_factor(s),
    )


def _with_reference(s: StepContext, times: LayerTimes) -> LayerTimes:
    """`times` with the forward passes of a reference, which no gradient follows; adapters, which it skips, included."""
    return replace(times, input_s=times.input_s + s.batch.reference_passes * times.forward_s)


def _stages(model: ModelTable, plan: PlanTable, layers: StageLayers, pieces: _Pieces) -> RankTimes:
    dense, moe, start, end = pieces.dense, pieces.moe, pieces.start, pieces.end
    starts, ends = end_shares(plan)

    def rank(num_dense: Array, num_moe: Array, index: int) -> LayerTimes:
        return _total((num_dense, dense), (num_moe, moe), (starts[index], start), (ends[index], end))

    p = plan.pipeline
    saving = np.where(_overlaps_pairs(plan) & (plan.expert > 1), pieces.pair_saving_s, 0.0)
    return RankTimes(
        first=rank(layers.first_dense, layers.first_moe, 0),
        middle=rank(layers.middle_dense, layers.middle_moe, 1),
        last=rank(layers.last_dense, layers.last_moe, 2),
        mean=_total((model.num_dense_layers / p, dense), (model.num_moe_layers / p, moe), (1 / p, start), (1 / p, end)),
        dense=dense,
        moe=moe,
        start=start,
        end=end,
        layer_saving_s=saving,
        rank_saving_s=layers.middle_moe * saving,
        num_dense_layers=model.num_dense_layers,
        num_moe_layers=model.num_moe_layers,
        transfer_s=np.where(p > 1, pieces.hop_s, 0.0),
    )


def _module_times(s: StepContext, dense: LayerTimes, moe: LayerTimes) -> LayerTimes:
    """A prediction module: a layer of the body (`dense`, `moe`), or the blocks of a hybrid's module."""
    module = prediction_module(s.model)
    if module is not s.model:
        own = replace(s, model=module, parameters=count_parameters(module))
        parts = layer_parts(own, layer_compute(own.shapes))
        dense, moe = layer_times(parts.dense, parts.host_dense_s), layer_times(parts.moe, parts.host_moe_s)
    is_moe = s.model.num_moe_layers > 0
    return _total((is_moe * 1, moe), (1 - is_moe * 1, dense))


def _overlaps_pairs(plan: PlanTable) -> NDArray[np.bool_]:
    return column_of(lambda record: record.overlaps_pairs, plan.schedule) & (plan.pipeline > 1)


def _times_of(passes: PassTimes) -> LayerTimes:
    return LayerTimes(forward_s=passes.forward_s, input_s=passes.input_s, weight_s=passes.weight_s)


def _total(*counted: tuple[Array, LayerTimes]) -> LayerTimes:
    def total(part: str) -> Array:
        return sum(count * getattr(times, part) for count, times in counted)

    return LayerTimes(forward_s=total("forward_s"), input_s=total("input_s"), weight_s=total("weight_s"))


def _pipeline_s(stages: RankTimes, plan: PlanTable, rates: SystemRates, num_micro: Array) -> tuple[Array, Array]:
    """(work of a rank, bubble and exposed transfers).

    The slowest rank never waits in the steady state; filling and draining goes through all ranks, so its wait
    is the schedule's closed form at the ranks' mean times. A calibrated share of each transfer is exposed.
    """
    p, mean = plan.pipeline, stages.mean
    slowest = np.maximum(np.maximum(stages.first.total_s, stages.last.total_s), stages.middle.total_s)
    waiting = waiting_s(
        plan.schedule,
        p,
        plan.virtual_pipeline,
        num_micro,
        forward_s=mean.forward_s,
        backward_input_s=mean.input_s,
        backward_weight_s=mean.weight_s,
        transfer_s=stages.transfer_s * rates.pipeline_exposed_ratio,
        pair_saving_s=stages.rank_saving_s,
    )
    # Pairs make the work less; micro-batches that have none, while the pipeline fills and drains, add to the bubble.
    slowest, waiting = slowest - stages.rank_saving_s, waiting + num_micro * stages.rank_saving_s
    longest = num_micro * slowest + np.where(p > 1, np.maximum(waiting, 0.0), 0.0)
    work = num_micro * np.where(rates.cpu_oversubscription > 1, mean.total_s, slowest)
    return work, oversubscribed_s(longest, work, rates.cpu_oversubscription) - work


def oversubscribed_s(longest_s: Array, work_s: Array, cpu_oversubscription: Array) -> Array:
    """End of ranks whose longest chain is `longest_s` and whose work is `work_s` each.

    With `cpu_oversubscription` n, n ranks run on one processor. A rank that waits leaves its time to the others, so the
    longest chain takes 1/n of its length, but the step is never shorter than the work of all.
    """
    return np.maximum(longest_s / cpu_oversubscription, work_s)


def _component_seconds(s: StepContext, parts: LayerParts, stages: RankTimes) -> dict[str, Array]:
    """Seconds of each component of the mean rank in one micro-batch; waiting for the host apart."""
    p = s.plan.pipeline
    num_dense, num_moe = s.model.num_dense_layers / p, s.model.num_moe_layers / p
    seconds: dict[str, Array] = {}
    host: Array = 0.0
    kinds = ((num_dense, parts.dense, stages.dense), (num_moe, parts.moe, stages.moe))
    for count, kind, layer in kinds:
        totals = {name: passes.total_s + s.batch.reference_passes * passes.forward_s for name, passes in kind.items()}
        for name, total_s in totals.items():
            seconds[name] = total_of((seconds.get(name, 0.0), _counted(count, total_s)))
        waiting = np.maximum(layer.total_s - total_of(totals.values()), 0.0)
        host = total_of((host, _counted(count, waiting)))
    head, again = parts.head, s.batch.head_passes + s.batch.reference_passes
    head_s = head.total_s + again * head.forward_s
    seconds["head"] = (parts.embedding.total_s + head_s * (1 + s.model.num_mtp_layers)) / p
    seconds["host"] = host
    return seconds


def _counted(count: Array, seconds: Array) -> Array:
    """`count` times `seconds`; the number zero where either is zero for all plans."""
    return count * seconds if np.any(count) and np.any(seconds) else 0.0


# --- what components spend their time on: the head and its loss, element-wise kernels, casts ---

# A component is calibrated as a whole. Its parts have the shares that the formulas of `compute` and `casts` give them.


def step_details(
    *,
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    rates: SystemRates,
    steps: StepTable,
    load_factor: float = 1.0,
) -> dict[str, dict[str, float]]:
    """Seconds of a step's components by name. `steps`: the row of the plan. The names of a component add up to it."""
    context = step_context(
        model=model, batch=batch, plan=plan, precision=precision, rates=rates, load_factor=load_factor
    )
    parts = compute_details(context.shapes)
    parts["head"]["accumulation of gradients"] = _accumulated(context)
    parts["casts"] = _casts(context)
    found = {}
    for component, seconds in parts.items():
        raw = {name: scalar(s) for name, s in seconds.items() if scalar(s)}
        scale = scalar(steps.components_s.get(component, 0.0)) / (sum(raw.values()) or 1.0)
        found[component] = {name: s * scale for name, s in raw.items()}
    return found


def _accumulated(s: StepContext) -> Array:
    """Seconds in which embedding and head add their gradients to the sum of earlier micro-batches."""
    tensor, num_heads = s.plan.tensor, 1 + s.model.num_mtp_layers
    embedding, head = (accumulation(s, p / tensor).total_s for p in (s.parameters.embedding, s.parameters.head))
    return embedding + num_heads * head


def _casts(s: StepContext) -> dict[str, Array]:
    """Casts of stored activations and of weights, and frozen weights made whole, of all layers and one micro-batch."""
    streaming = s.rates.device.streaming_bytes_per_s
    stored_only = replace(s.precision, weight_cache=WeightCache.CALIBRATED)

    kinds = ((s.model.num_dense_layers, False), (s.model.num_moe_layers, True))

    def of_layers(formats: PrecisionTable) -> Array:
        facts = (s.model, s.batch, s.plan, formats, s.parameters, s.tokens, streaming)
        return sum(count * cast_passes(*facts, is_moe=is_moe).total_s for count, is_moe in kinds if np.any(count))

    stored = of_layers(stored_only)
    whole = sum(count * dequantised(s, is_moe=is_moe).total_s for count, is_moe in kinds if np.any(count))
    return {
        "stored activations": stored,
        "weights": of_layers(s.precision) - stored,
        "dequantised frozen weights": whole,
    }
