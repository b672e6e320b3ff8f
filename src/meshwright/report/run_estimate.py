"""Everything that is said of one run: its plan, its step, and what the whole training takes."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.catalog.prices import Price
from meshwright.cost.goodput import Goodput
from meshwright.errors import InfeasibleError
from meshwright.planner import request_for, violations
from meshwright.planner.choice import best_plans, goal_of
from meshwright.planner.engines import Severity
from meshwright.planner.estimate import PlanEstimate, estimate_plan
from meshwright.planner.legality import setting_for
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import PlanResult
from meshwright.planner.training import Training, catalogue_price, goodput_at, hourly_price, training_at
from meshwright.report.quantities import memory as memory_text
from meshwright.specs.estimate import MemoryEstimate, Tier
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.units import JOULE_PER_KWH, gib

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "workspace")


@dataclass(frozen=True, kw_only=True)
class Economics:
    """What surrounds the step: failures, energy and money."""

    goodput: Goodput
    usd_per_device_hour: float | None
    price: Price | None  # where the catalogue's price was taken
    usd_per_million_tokens: float | None  # electricity included where it is paid apart
    joule_per_token: float | None  # at the facility's meter, failures included
    totals: Training | None  # when the run file says how long to train


@dataclass(frozen=True, kw_only=True, eq=False)
class RunEstimate:
    """`estimate_run`'s answer."""

    run: Run
    request: PlanRequest
    estimate: PlanEstimate
    economics: Economics
    chosen: PlanResult | None  # the search, when the run file left the plan to the planner
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        return self.estimate.plan


def estimate_run(run: Run) -> RunEstimate:
    """Estimate the run's plan, or the planner's best one where it says `parallel: auto`.

    Raises InfeasibleError when no plan is possible, or when the pinned one is illegal or does not fit.
    """
    request = request_for(run)
    chosen = None
    if run.plan is None:
        chosen = best_plans(request, goal=goal_of(run))
    plan = run.plan or chosen.plans[0].plan  # pyright: ignore[reportOptionalMemberAccess]
    warnings = require_legal(request, plan)
    estimate = estimate_plan(request, plan)
    require_fit(request, estimate)
    return RunEstimate(
        run=run,
        request=request,
        estimate=estimate,
        economics=_economics(run, request, estimate),
        chosen=chosen,
        notes=(*warnings, *_notes(request, estimate)),
    )


def require_legal(request: PlanRequest, plan: Plan) -> list[str]:
    """Warnings about `plan`. Raises InfeasibleError with every rule of the engine that it breaks."""
    found = violations(plan, setting=setting_for(request))
    refused = [v for v in found if v.severity is Severity.REFUSED]
    if refused:
        raise InfeasibleError(
            f"{plan.describe()} is no plan for engine {request.engine}: {'; '.join(map(str, refused))}",
            hint="`parallel: auto` lets the planner choose a legal plan",
        )
    return [str(v) for v in found]


def require_fit(request: PlanRequest, estimate: PlanEstimate) -> None:
    """Raises InfeasibleError with bytes needed and there when the plan exceeds device memory."""
    memory = estimate.step.memory
    if memory.fits:
        return
    parts = ", ".join(f"{n} {gib(b):.1f}" for n, b in memory_parts(memory).items() if b > 0)
    raise InfeasibleError(
        f"device memory: {estimate.plan.describe()} needs {gib(memory.reserved_bytes):.1f} GiB on pipeline "
        f"stage {memory.stage}, {request.cluster.accelerator.name} has {gib(memory.capacity_bytes):.1f} GiB",
        hint=f"of these GiB, {parts}; `meshwright plan` finds what fits",
    )


def memory_parts(memory: MemoryEstimate) -> dict[str, float]:
    """Bytes of each part of the fullest stage; they add up to what is reserved."""
    parts = {name: getattr(memory, f"{name}_bytes") for name in MEMORY_PARTS}
    parts["beside the allocator"] = memory.reserved_bytes - memory.allocated_bytes
    return parts


def _notes(request: PlanRequest, estimate: PlanEstimate) -> list[str]:
    notes, memory = [], estimate.step.memory
    if memory.reserved_bytes > request.usable_bytes:
        notes.append(
            f"memory is tight: {memory_text(memory.reserved_bytes, memory.capacity_bytes)}, less than the "
            f"{request.memory_margin:.0%} that the planner leaves free".replace("%", " %")
        )
    if estimate.step.step.tier is Tier.GUESSED:
        notes.append("nothing was measured on this accelerator with this software: the interval is wide")
    return notes


# --- failures, energy, money ---


def _economics(run: Run, request: PlanRequest, estimate: PlanEstimate) -> Economics:
    accelerator, goodput = request.cluster.accelerator.name, goodput_at(request)

    def training(num_tokens: float) -> Training:
        return training_at(request, estimate.step, num_tokens=num_tokens, goodput=goodput, costs=run.costs)

    million = training(1e6)
    return Economics(
        goodput=goodput,
        usd_per_device_hour=hourly_price(accelerator, run.costs),
        price=catalogue_price(accelerator) if run.costs.usd_per_device_hour is None else None,
        usd_per_million_tokens=million.cost and million.cost.value,
        joule_per_token=million.energy and million.energy.value * 1000 * JOULE_PER_KWH / 1e6,
        totals=None if run.num_steps is None else training(run.num_steps * run.tokens_per_step),
    )
