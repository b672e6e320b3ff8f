"""Seconds of one training step, by component.

    step = ((work of the slowest rank + bubble + exposed data parallelism + optimizer) x factor + fixed) x stragglers

Work is the micro-batches times a rank's layers (`cost.layers`); the bubble is what a schedule's filling and draining
adds (`cost.pipeline`); data parallelism and the optimizer run once a step (`cost.update`). `factor` is what the
stack's maturity and everything unexplained multiply, stragglers grow with the number of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.arrays import Array, Table
from meshwright.cost.collectives import send_receive_s
from meshwright.cost.compute import layer_compute
from meshwright.cost.flops import count_parameters
from meshwright.cost.groups import groups_of
from meshwright.cost.layers import LayerParts, LayerTimes, Parts, StepContext, layer_parts, layer_times
from meshwright.cost.pipeline.closed_form import waiting_s
from meshwright.cost.rates import SystemRates
from meshwright.cost.stages import StageLayers, split_layers
from meshwright.cost.tables import BatchTable, ModelTable, PlanTable, PrecisionTable
from meshwright.cost.update import data_parallel_s, optimizer_s


@dataclass(frozen=True, kw_only=True)
class RankTimes(Table):
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
    stages: RankTimes
    num_micro_batches: Array
    tokens_per_s_per_device: Array
    cpu_oversubscription: Array  # of the ranks, as in `SystemRates`


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
    context = StepContext(
        model=model,
        batch=batch,
        plan=plan,
        precision=precision,
        rates=rates,
        groups=groups_of(plan, rates.network),
        parameters=count_parameters(model),
    )
    compute = layer_compute(
        model=model, batch=batch, plan=plan, precision=precision, rates=rates.device, load_factor=load_factor
    )
    parts = layer_parts(context, compute)
    layers = split_layers(model, plan)
    stages = _stages(context, layers, parts)
    num_micro = context.num_micro_batches

    work, bubble = _pipeline_s(stages, plan, rates, num_micro)
    factor = _factor(context)
    once = {
        "bubble": bubble * factor,
        "data_parallel": data_parallel_s(context, layers, stages.middle) * factor,
        "optimizer": optimizer_s(context, layers) * factor,
        "fixed": rates.step_s * 1.0,
    }
    nodes = np.maximum(plan.num_devices / np.maximum(rates.network.domain, 1), 1)
    unhindered = work * factor + sum(once.values())
    stragglers = unhindered * rates.slowdown_per_doubling * np.log2(nodes)
    step = unhindered + stragglers

    shares = _component_seconds(context, layers, parts)
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


def _factor(s: StepContext) -> Array:
    """Maturity of the stack against 2025, and what no other term explains."""
    has_moe = s.model.num_moe_layers > 0
    gain = np.where(has_moe, s.rates.moe_gain_per_year, s.rates.dense_gain_per_year)
    return s.rates.general_factor * np.where(has_moe, s.rates.moe_factor, 1.0) * np.exp(-gain * s.rates.years)


def _stages(s: StepContext, layers: StageLayers, parts: LayerParts) -> RankTimes:
    dense, moe = layer_times(parts.dense, parts.host_dense_s), layer_times(parts.moe, parts.host_moe_s)
    num_mtp = s.model.num_mtp_layers

    def rank(num_dense: Array, num_moe: Array, *, head: Array) -> LayerTimes:
        with_mtp = num_moe + head * num_mtp * (s.model.num_moe_layers > 0)
        heads = head * (1 + num_mtp)

        def total(part: str) -> Array:
            return (
                num_dense * getattr(dense, part)
                + with_mtp * getattr(moe, part)
                + heads * getattr(parts.head, part)
            )

        return LayerTimes(forward_s=total("forward_s"), input_s=total("input_s"), weight_s=total("weight_s"))

    holds_head = (s.plan.pipeline == 1) * 1.0
    split = np.where(s.plan.sequence_parallel > 0, s.plan.tensor, 1)
    message = s.tokens * s.model.hidden * s.precision.activation_bytes / split
    hop = send_receive_s(message, s.groups.neighbours) + s.rates.pipeline_transfer_s
    return RankTimes(
        first=rank(layers.first_dense, layers.first_moe, head=holds_head),
        middle=rank(layers.middle_dense, layers.middle_moe, head=holds_head),
        last=rank(layers.last_dense, layers.last_moe, head=1.0),
        transfer_s=np.where(s.plan.pipeline > 1, hop, 0.0),
    )


def _pipeline_s(
    stages: RankTimes, plan: PlanTable, rates: SystemRates, num_micro: Array
) -> tuple[Array, Array]:
    """(work of a rank, bubble and exposed transfers).

    The slowest rank never waits in the steady state; filling and draining goes through all ranks, so what it waits
    for is the closed form of the schedule at the ranks' mean times. Of each transfer a calibrated share is felt.
    """
    p = plan.pipeline
    slowest = np.maximum(np.maximum(stages.first.total_s, stages.last.total_s), stages.middle.total_s)
    mean = {part: mean_of_ranks(stages, p, part) for part in ("forward_s", "input_s", "weight_s")}
    waiting = waiting_s(
        plan.schedule,
        p,
        plan.virtual_pipeline,
        num_micro,
        forward_s=mean["forward_s"],
        backward_input_s=mean["input_s"],
        backward_weight_s=mean["weight_s"],
        transfer_s=stages.transfer_s * rates.pipeline_exposed_ratio,
    )
    longest = num_micro * slowest + np.where(p > 1, np.maximum(waiting, 0.0), 0.0)
    work = num_micro * np.where(rates.cpu_oversubscription > 1, sum(mean.values()), slowest)
    return work, oversubscribed_s(longest, work, rates.cpu_oversubscription) - work


def mean_of_ranks(stages: RankTimes, p: Array, part: str) -> Array:
    """Seconds of one pass on the mean pipeline rank."""
    first, middle, last = (getattr(rank, part) for rank in (stages.first, stages.middle, stages.last))
    return np.where(p > 1, (first + last + np.maximum(p - 2, 0) * middle) / p, middle)


def oversubscribed_s(longest_s: Array, work_s: Array, cpu_oversubscription: Array) -> Array:
    """End of ranks whose longest chain is `longest_s` and whose work is `work_s` each.

    With `cpu_oversubscription` n, n ranks run on one processor. A rank that waits leaves its time to the others, so the
    longest chain takes 1/n of its length, but the step is never shorter than the work of all.
    """
    return np.maximum(longest_s / cpu_oversubscription, work_s)


def _component_seconds(s: StepContext, layers: StageLayers, parts: LayerParts) -> dict[str, Array]:
    """Seconds of each component of a middle rank in one micro-batch; waiting for the host apart."""
    num_dense, num_moe = layers.middle_dense, layers.middle_moe
    seconds: dict[str, Array] = {}
    for count, kind in ((num_dense, parts.dense), (num_moe, parts.moe)):
        for name, passes in kind.items():
            seconds[name] = seconds.get(name, 0.0) + count * passes.total_s
    seconds["head"] = parts.head.total_s * (1 + s.model.num_mtp_layers) / s.plan.pipeline
    seconds["host"] = num_dense * _host_wait(parts.dense, parts.host_dense_s) + num_moe * _host_wait(
        parts.moe, parts.host_moe_s
    )
    return seconds


def _host_wait(parts: Parts, host_s: Array) -> Array:
    return np.maximum(layer_times(parts, host_s).total_s - sum(p.total_s for p in parts.values()), 0.0)
