"""Filters over whole tables: does it fit, could it fit, and could it be fast.

`CostModel.memory` is the memory model, `CostModel.least_bytes` the memory of the same plan on sequences of no tokens: a
lower bound for every micro-batch and recomputation. `CostModel.bound_s` is a lower bound of the step time. It is taken
from the cost model itself: a *relaxation* of a plan has the same shape and micro-batch but recomputes nothing,
shards nothing, and neither reduces gradients nor runs the optimizer. What a plan adds to its relaxation
(recomputation, FSDP gathers, gradient reduction, optimizer) is never negative, so

    bound = (step of the relaxation - data_parallel - optimizer - stragglers) x (1 + stragglers' share)

and one relaxation bounds all choices of sharding, replicas, recomputation and offload at once: a few hundred
plans for the price of one. Layers of shapes that differ in their pipelines' schedules alone are costed once
(`cost.step.without_updates_s`). A law in the tests holds the bound to the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Array, FloatArray, Mask
from meshwright.cost.memory import MemoryConstants, MemoryTable, estimate_memory, loss_chunks
from meshwright.cost.rates import SystemRates, system_rates
from meshwright.cost.step import StepTable, estimate_steps, without_updates_s
from meshwright.cost.tables import RECOMPUTES, PlanTable
from meshwright.planner.finalists import simulated_step_s, simulated_steps_s
from meshwright.planner.generations import mixed_step
from meshwright.planner.request import PlanRequest
from meshwright.specs.memory_budget import MemoryBudget
from meshwright.specs.plan import Plan, Recompute, Sharding


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The functions of the cost model that the search calls; every call takes and returns tables of equal length."""

    memory: Callable[[PlanTable], MemoryTable]
    least_bytes: Callable[[PlanTable], Array]  # never above the memory of plans that shard and offload the same
    steps: Callable[[PlanTable], StepTable]
    bound_s: Callable[[PlanTable], FloatArray]  # never above the step time of any plan with these shapes
    loss_chunks: Callable[[PlanTable, MemoryTable, float], tuple[Array, Array]]  # `cost.memory.loss_chunks`
    memory_budget: MemoryBudget
    host_bytes: Callable[[PlanTable], Array]  # of tensors that each plan keeps in host memory for its fullest device
    usable_host_bytes: float = float("inf")  # for each device
    refine: Callable[[Sequence[Plan], Sequence[StepTable]], Sequence[float | None]] = simulated_steps_s
    """Step times of finalists; None keeps the closed form's."""

    def fits(self, plan: PlanTable, reserved_bytes: Array) -> Mask:
        """True for plans that fit, in the memory of a device and in that of its host."""
        fits = np.asarray(self.memory_budget.fits(reserved_bytes))
        if self.usable_host_bytes == float("inf") or not np.any(fits):
            return fits
        return fits & (self.host_bytes(plan) <= self.usable_host_bytes)


def cost_model(request: PlanRequest) -> CostModel:
    """The cost model of `meshwright.cost` for one request."""
    rates = system_rates(
        request.cluster, request.precision, request.stack,
        calibration=request.calibration, routes=request.kernels.routes,
    )  # fmt: skip
    return cost_model_with(request, rates=rates, constants=request.memory_constants)


def cost_model_with(request: PlanRequest, *, rates: SystemRates, constants: MemoryConstants) -> CostModel:
    """Return this model with other rates and memory constants than the request's stack has."""
    facts = {"model": request.model_table, "batch": request.batch_table, "precision": request.precision_table}

    without_tokens = {**facts, "batch": replace(request.batch_table, seq_len=0)}

    def steps(plan: PlanTable) -> StepTable:
        return estimate_steps(plan=plan, rates=rates, **facts)

    def host_bytes(plan: PlanTable) -> Array:
        if not np.any(plan.offload_optimizer) and not np.any(constants.offloaded_activations):
            return 0.0
        here = replace(plan, offload_optimizer=np.zeros_like(plan.offload_optimizer))
        kept = replace(constants, offloaded_activations=0.0)
        on_device = estimate_memory(plan=here, constants=kept, **facts).allocated_bytes
        return on_device - estimate_memory(plan=plan, constants=constants, **facts).allocated_bytes

    return CostModel(
        memory=lambda plan: estimate_memory(plan=plan, constants=constants, **facts),
        least_bytes=lambda plan: estimate_memory(plan=plan, constants=constants, **without_tokens).reserved_bytes,
        host_bytes=host_bytes,
        usable_host_bytes=request.usable_host_bytes,
        steps=steps,
        loss_chunks=lambda plan, memory, usable_bytes: loss_chunks(
            plan=plan, constants=constants, memory=memory, usable_bytes=usable_bytes, **facts
        ),
        bound_s=lambda plan: np.asarray(without_updates_s(plan=relaxation(plan), rates=rates, **facts)),
        memory_budget=request.memory_budget,
        refine=partial(finalist_steps_s, request) if request.cluster.parts else simulated_steps_s,
    )


def finalist_steps_s(request: PlanRequest, plans: Sequence[Plan], steps: Sequence[StepTable]) -> Sequence[float | None]:
    """Step times of finalists on a cluster of several parts, with stages on their own parts if they can lie there."""
    all_mixed = [mixed_step(request, plan) for plan in plans]
    return [
        simulated_step_s(plan, row) if mixed is None else mixed.step_s
        for plan, row, mixed in zip(plans, steps, all_mixed, strict=True)
    ]


def no_event_graphs(plans: Sequence[Plan], steps: object) -> Sequence[None]:
    """For `CostModel.refine`: the search ranks by closed forms."""
    return [None] * len(plans)


def relaxation(plan: PlanTable) -> PlanTable:
    """The same shapes and micro-batches without recomputation, sharding and offload."""
    none = np.zeros_like(plan.tensor)
    return replace(
        plan,
        sharding=none + int(Sharding.NONE),
        data_shard=plan.data,
        data_replicate=none + 1,
        recompute=none + RECOMPUTES.index(Recompute.NONE),
        recompute_mask=none,
        recompute_layers=none - 1,
        offload_optimizer=none,
        loss_chunk=np.where(np.asarray(plan.loss_chunk) < 0, 0, plan.loss_chunk),
        # Stored activations add casts, and so does a weight cache that is off: what a node says bounds both.
    )


def step_rows(steps: StepTable, index: NDArray[np.intp]) -> StepTable:
    """The rows of `steps` at `index`."""
    return StepTable(
        step_s=_rows(steps.step_s, index),
        components_s={name: _rows(seconds, index) for name, seconds in steps.components_s.items()},
        stages=steps.stages.take(index),
        num_micro_batches=_rows(steps.num_micro_batches, index),
        tokens_per_s_per_device=_rows(steps.tokens_per_s_per_device, index),
        cpu_oversubscription=_rows(steps.cpu_oversubscription, index),
    )


def _rows(column: Array, index: NDArray[np.intp]) -> Array:
    return column[index] if isinstance(column, np.ndarray) and column.ndim else column
