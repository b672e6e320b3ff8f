"""Estimate of one pinned plan: step time with interval, components, memory by rank, pipeline timeline.

The cost model gives the step, with the pipeline simulated as an event graph (`finalists`); its interval carries
the calibration's spread through the model (`cost.uncertainty`) and says which uncertainty weighs most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import scalar
from meshwright.calibration.parameters import Calibration, Factors, fitted
from meshwright.catalog.accelerators import accelerator, accelerator_names
from meshwright.catalog.engines import ANY
from meshwright.catalog.stacks import stack_facts, stack_for_engine
from meshwright.cost.flops import model_flops_per_token
from meshwright.cost.memory import MemoryTable, estimate_memory, memory_details
from meshwright.cost.mfu import mfu
from meshwright.cost.pipeline.simulate import Timeline
from meshwright.cost.rates import bf16_factors, factors_of, rates_from_etas, system_rates
from meshwright.cost.step import StepTable, estimate_steps, step_details
from meshwright.cost.tables import PlanTable, plan_row
from meshwright.cost.uncertainty import Etas, derivatives, kinds_of, log_variances, spread
from meshwright.planner.finalists import simulate_pipeline, simulated_step_s
from meshwright.planner.generations import MixedStep, PartShare, mixed_step
from meshwright.planner.request import UNCOUNTED_GENERATION, PlanRequest
from meshwright.planner.search import RankedPlan
from meshwright.planner.space import plan_table
from meshwright.specs.estimate import Estimate, MemoryEstimate, StepEstimate, Tier
from meshwright.specs.hardware import THIS_MACHINE, Stack
from meshwright.specs.memory_budget import MemoryBudget
from meshwright.specs.plan import Plan

Details = dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanEstimate:
    """`estimate_plan`'s answer. `uncertainty` maps a calibrated parameter to its share of the variance."""

    plan: Plan
    step: StepEstimate
    steps: StepTable
    memory: MemoryTable
    uncertainty: dict[str, float]
    mixed: MixedStep | None = None  # where every stage lies on one part of a cluster of several

    @property
    def shares(self) -> tuple[PartShare, ...]:
        """Stages of each part of a cluster of several, where each lies on one."""
        return () if self.mixed is None else self.mixed.shares

    @cached_property
    def timeline(self) -> Timeline | None:
        """None without a pipeline."""
        return simulate_pipeline(self.plan, self.steps) if self.mixed is None else self.mixed.timeline


def estimate_plan(
    request: PlanRequest, plan: Plan, *, calibration: Calibration | None = None, load_factor: float = 1.0
) -> PlanEstimate:
    """Cost one plan. `load_factor`: tokens of the busiest expert rank over the mean (1.0: balanced routing)."""
    calibration = calibration or request.calibration or fitted()
    steps, variances = steps_and_variances(request, plan_row(plan), calibration=calibration, load_factor=load_factor)
    closed_s = scalar(steps.step_s)
    found = RankedPlan(
        plan=plan,
        value=closed_s,
        step_s=simulated_step_s(plan, steps) or closed_s,
        closed_form_s=closed_s,
        is_simulated=False,
        steps=steps,
        memory=_memory_table(request, plan_row(plan)),
    )
    return _estimate(request, found, variances, calibration=calibration, load_factor=load_factor)


def estimate_ranked(request: PlanRequest, ranked: Sequence[RankedPlan]) -> tuple[PlanEstimate, ...]:
    """`estimate_plan` of plans that a search has costed and simulated: their intervals are computed together."""
    calibration = request.calibration or fitted()
    _, variances = steps_and_variances(request, plan_table([r.plan for r in ranked]), calibration=calibration)
    rows = {name: np.broadcast_to(column, len(ranked)) for name, column in variances.items()}
    return tuple(
        _estimate(request, found, {name: row[[i]] for name, row in rows.items()}, calibration=calibration)
        for i, found in enumerate(ranked)
    )


def _estimate(
    request: PlanRequest,
    found: RankedPlan,
    variances: Mapping[str, NDArray[np.float64]],
    *,
    calibration: Calibration,
    load_factor: float = 1.0,
) -> PlanEstimate:
    plan, steps, step_s, closed = found.plan, found.steps, found.step_s, found.closed_form_s
    row = plan_row(plan)
    factors = factors_of(request.cluster, request.precision, request.stack)
    factor = float(spread(variances)[0])
    memory, budget = found.memory, request.memory_budget
    mixed = mixed_step(request, plan)
    if mixed is not None:
        steps, step_s, closed = mixed.steps, mixed.step_s, mixed.step_s
        memory, budget = mixed.fullest.memory, mixed.fullest.budget
    details_s, details_bytes = ({}, {}) if mixed else _details(request, row, calibration, steps, memory, load_factor)
    components = {name: float(np.ravel(value)[0]) for name, value in steps.components_s.items()}
    components["bubble"] += step_s - closed
    total = sum(float(v[0]) for v in variances.values())
    tokens_per_s = request.global_batch * request.seq_len / plan.num_devices / step_s
    flops = float(model_flops_per_token(request.model_table, seq_len=request.seq_len))
    utilization = mfu(
        tokens_per_s_per_device=tokens_per_s, flops_per_token=flops, peak_flops_per_s=request.peak_flops_per_s
    )
    tier = _tier(calibration, factors)

    def around(value: float, unit: str) -> Estimate:
        return Estimate(value=value, low=value / factor, high=value * factor, unit=unit, tier=tier)

    return PlanEstimate(
        plan=plan,
        step=StepEstimate(
            step=around(step_s, "s"),
            tokens_per_s_per_device=around(tokens_per_s, "tokens/s"),
            mfu=around(float(utilization), "ratio"),
            model_flops_per_token=flops,
            components_s=components,
            memory=replace(_memory(memory, budget), details_bytes=details_bytes),
            details_s=details_s,
        ),
        steps=steps,
        memory=memory,
        mixed=mixed,
        uncertainty={name: float(v[0]) / total for name, v in variances.items()},
    )


def steps_and_variances(
    request: PlanRequest, rows: PlanTable, *, calibration: Calibration, load_factor: float = 1.0
) -> tuple[StepTable, dict[str, NDArray[np.float64]]]:
    """Steps of plans, one row each, and the variance of their log step time by where it comes from."""
    facts = request.system_facts
    factors = factors_of(request.cluster, request.precision, request.stack)
    etas, bf16 = calibration.etas([factors]), calibration.etas([bf16_factors(factors)])

    def steps_at(etas: Etas, bf16: Etas) -> StepTable:
        return estimate_steps(
            model=request.model_table,
            batch=request.batch_table,
            plan=rows,
            precision=request.precision_table,
            rates=rates_from_etas(calibration, facts, etas, bf16),
            load_factor=load_factor,
        )

    def log_step(etas: Etas, bf16: Etas) -> NDArray[np.float64]:
        return np.log(steps_at(etas, bf16).step_s)

    slopes = derivatives(log_step, etas, bf16)
    kinds = np.atleast_1d(kinds_of(request.model_table))
    variances = log_variances(slopes, calibration, [factors], kinds=kinds, clock_width=facts.clock_width)
    return steps_at(etas, bf16), variances


def _details(
    request: PlanRequest,
    row: PlanTable,
    calibration: Calibration,
    steps: StepTable,
    memory: MemoryTable,
    load_factor: float,
) -> tuple[Details, Details]:
    """(seconds of components by name, bytes of parts by name) of one plan."""
    facts = {
        "model": request.model_table,
        "batch": request.batch_table,
        "plan": row,
        "precision": request.precision_table,
    }
    rates = system_rates(
        request.cluster, request.precision, request.stack, calibration=calibration, routes=request.kernels.routes
    )
    seconds = step_details(rates=rates, steps=steps, load_factor=load_factor, **facts)
    sizes = memory_details(constants=request.memory_constants, memory=memory, **facts)
    return seconds, {
        part: {name: size for name, value in names.items() if (size := float(np.ravel(value)[0]))}
        for part, names in sizes.items()
    }


def _tier(calibration: Calibration, factors: Factors) -> Tier:
    """Interpolated where the device itself was measured or both it and its software have rows, datasheet where one of
    them has, guessed where neither has."""
    if calibration.corrections:
        return Tier.INTERPOLATED
    known = [calibration.num_rows(level, factors[level]) > 0 for level in ("device_format", "framework")]
    return (Tier.GUESSED, Tier.DATASHEET, Tier.INTERPOLATED)[sum(known)]


@cache
def num_measured(engine: str, vendor: str) -> int:
    """Return how many measured runs of `engine`, or of its relatives, on accelerators of `vendor` inform estimates."""
    facts = stack_facts(stack_for_engine(engine, vendor=vendor).framework)
    if facts.rates_of:
        return 0
    devices = [device for device in map(accelerator, accelerator_names()) if device.vendor == vendor]
    families = {device.rates_of or device.architecture for device in devices}
    return sum(fitted().num_rows("architecture_lineage", f"{family}/{facts.lineage}") for family in families)


def notes_on_gaps(request: PlanRequest) -> list[str]:
    """Notes on parts of the run that the prediction lacks, and on software that nobody measured there."""
    return [*([UNCOUNTED_GENERATION] if request.grpo else []), *notes_on_software(request)]


def notes_on_software(request: PlanRequest) -> list[str]:
    """Note on an engine whose speed on this architecture no measured run tells, and on what was measured instead."""
    calibration, cluster = request.calibration or fitted(), request.cluster
    if cluster.accelerator.vendor in ("generic", THIS_MACHINE) or calibration.corrections:
        return []

    def num_runs(stack: Stack) -> int:
        factors = factors_of(cluster, request.precision, stack)
        return calibration.num_rows("architecture_lineage", factors["architecture_lineage"])

    facts, architecture = stack_facts(request.stack.framework), cluster.accelerator.architecture
    if facts.rates_of:
        said = f"{facts.title} was never measured on {architecture}; its rates here are from {facts.rates_of}"
        said += "" if num_runs(request.stack) else ", which was not measured on it either"
    elif not num_runs(request.stack):
        said = f"no measured run on {architecture} of {facts.title}, or of its relatives, informs this estimate"
    else:
        return []
    own, usual = (stack_for_engine(engine, vendor=cluster.accelerator.vendor) for engine in (request.engine, ANY))
    if own.framework == facts.name and request.engine != ANY and (count := num_runs(usual)):
        said += f"; engine: {ANY} estimates {stack_facts(usual.framework).title} ({count} measured runs of its kind)"
    return [said]


def _memory_table(request: PlanRequest, row: PlanTable) -> MemoryTable:
    return estimate_memory(
        model=request.model_table,
        batch=request.batch_table,
        plan=row,
        precision=request.precision_table,
        constants=request.memory_constants,
    )


def _memory(memory: MemoryTable, budget: MemoryBudget) -> MemoryEstimate:
    return MemoryEstimate(
        weights_bytes=scalar(memory.weights_bytes),
        gradients_bytes=scalar(memory.gradients_bytes),
        optimizer_bytes=scalar(memory.optimizer_bytes),
        activations_bytes=scalar(memory.activations_bytes),
        workspace_bytes=scalar(memory.workspace_bytes),
        allocated_bytes=scalar(memory.allocated_bytes),
        reserved_bytes=scalar(memory.reserved_bytes),
        budget=budget,
        stage=round(scalar(memory.rank)),
    )
