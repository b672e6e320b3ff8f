"""Everything that is said of one run: its plan, its step, and what the whole training takes.

    wall time = steps x step time / goodput        energy = facility power x wall time
    interval  = value x exp(+- sqrt(d_step^2 + d_goodput^2)),  d: distance of an end in logarithms

The two intervals are independent: one comes from the calibration of the step, the other from the published
range of failure rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwright.catalog.prices import Price, price_per_device_hour
from meshwright.cost.energy import activity_ratio, run_energy
from meshwright.cost.flops import count_parameters
from meshwright.cost.goodput import Goodput, goodput_of_run, wall_s
from meshwright.cost.money import run_cost, usd_per_million_tokens
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner import explain_infeasible, request_for, search, violations
from meshwright.planner.estimate import PlanEstimate, estimate_plan
from meshwright.planner.legality import setting_for
from meshwright.planner.objective import INTENSITY_RATIO, Goal, goal_for
from meshwright.planner.request import PlanRequest
from meshwright.planner.rules import Severity
from meshwright.planner.search import PlanResult
from meshwright.report.quantities import memory as memory_words
from meshwright.specs.estimate import Estimate, MemoryEstimate, Tier
from meshwright.specs.plan import Plan
from meshwright.specs.run import Objective, Run
from meshwright.units import JOULE_PER_KWH, gib

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "workspace")


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The whole training. What has no price or no power is None."""

    num_tokens: int
    num_steps: int
    wall: Estimate  # s, failures included
    cost: Estimate | None  # USD
    energy: Estimate | None  # MWh at the facility's meter


@dataclass(frozen=True, kw_only=True)
class Economics:
    """What surrounds the step: failures, energy and money."""

    goodput: Goodput
    usd_per_device_hour: float | None
    price: Price | None  # where the catalogue's price was taken
    usd_per_million_tokens: float | None  # electricity included where it is paid apart
    joule_per_token: float | None  # at the facility's meter, failures included
    totals: Totals | None  # when the run file says how long to train


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
        notes=(*warnings, *_notes(request, plan, estimate)),
    )


def free_request(run: Run) -> PlanRequest:
    """What the planner is asked when it may choose the whole plan, also of a run that pins one."""
    request = request_for(run)
    # A pinned plan comes with a micro-batch, which would hold the search to it.
    return request if run.plan is None else replace(request, fixed={})


def goal_of(run: Run) -> Goal:
    """The run's objective with its prices; the cluster must be known."""
    cluster = request_for(run).cluster
    return goal_for(run.objective, cluster=cluster, costs=run.costs, num_steps=run.num_steps)


def best_plans(request: PlanRequest, *, goal: Goal, top: int = 1, slack: float = 0.0) -> PlanResult:
    """The search's result, which holds at least one plan. Raises InfeasibleError with what is missing."""
    result = search(request, top=top, goal=goal, slack=slack)
    if result.best is None:
        why = explain_infeasible(result)
        raise InfeasibleError(why.binding, hint="; ".join(why.suggestions) or None)
    return result


def require_legal(request: PlanRequest, plan: Plan) -> list[str]:
    """Warnings about `plan`. Raises InfeasibleError with every rule of the engine that it breaks."""
    found = violations(plan, setting=setting_for(request))
    refused = [v for v in found if v.severity is Severity.REFUSED]
    if refused:
        raise InfeasibleError(
            f"{plan.describe()} cannot run on engine {request.engine.value}: {'; '.join(map(str, refused))}",
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


def _notes(request: PlanRequest, plan: Plan, estimate: PlanEstimate) -> list[str]:
    notes, memory = [], estimate.step.memory
    if memory.reserved_bytes > request.usable_bytes:
        notes.append(
            f"memory is tight: {memory_words(memory.reserved_bytes, memory.capacity_bytes)}, less than the "
            f"{request.memory_margin:.0%} that the planner leaves free".replace("%", " %")
        )
    if plan.layers_per_stage is not None:
        notes.append("layers_per_stage is not costed: the estimate splits layers as evenly as can be")
    if estimate.step.step.tier is Tier.GUESSED:
        notes.append("nothing was measured on this accelerator with this software: the interval is wide")
    return notes


# --- failures, energy, money ---


def _economics(run: Run, request: PlanRequest, estimate: PlanEstimate) -> Economics:
    goal = goal_for(Objective.THROUGHPUT, cluster=request.cluster, costs=run.costs)
    goodput = goodput_of_run(
        num_devices=request.num_devices, bytes_per_device=_checkpoint_bytes(request) / request.num_devices
    )
    price = None if run.costs.usd_per_device_hour is not None else _known_price(request)
    hourly = price.usd_per_device_hour if price else run.costs.usd_per_device_hour
    joule = _joule_per_token(request, estimate, goodput, goal)
    rate = estimate.step.tokens_per_s_per_device.value
    usd = None
    if hourly is not None:
        usd = usd_per_million_tokens(
            usd_per_device_hour=hourly, tokens_per_s_per_device=rate, goodput_ratio=goodput.value
        )
        usd += (joule or 0.0) * 1e6 / JOULE_PER_KWH * goal.usd_per_kwh
    return Economics(
        goodput=goodput,
        usd_per_device_hour=hourly,
        price=price,
        usd_per_million_tokens=usd,
        joule_per_token=joule,
        totals=_totals(run, request, estimate, goodput, hourly, joule, goal),
    )


def _checkpoint_bytes(request: PlanRequest) -> float:
    """Weights, master weights and moments of what is trained, each once."""
    parameters, precision = count_parameters(request.model_table), request.precision
    lora = request.model.num_layers * parameters.lora_layer
    trained = lora if request.lora is not None else parameters.total
    return float(trained) * (precision.weight_bytes + precision.master_bytes + precision.moment_bytes)


def _known_price(request: PlanRequest) -> Price | None:
    try:
        return price_per_device_hour(request.cluster.accelerator.name)
    except InputError:
        return None


def _joule_per_token(
    request: PlanRequest, estimate: PlanEstimate, goodput: Goodput, goal: Goal
) -> float | None:
    if goal.power is None:
        return None
    step, num_tokens = estimate.step, request.global_batch * request.seq_len
    energy = run_energy(
        power=goal.power,
        activity_ratio=activity_ratio(components_s=step.components_s, intensity_ratio=INTENSITY_RATIO),
        num_devices=request.num_devices,
        wall_s=wall_s(productive_s=step.step.value, goodput_ratio=goodput.value),
        num_tokens=num_tokens,
        idle_ratio=goodput.losses.restart_ratio + goodput.losses.spares_ratio,
    )
    return float(energy.facility_j_per_token)


def _totals(
    run: Run,
    request: PlanRequest,
    estimate: PlanEstimate,
    goodput: Goodput,
    hourly: float | None,
    joule: float | None,
    goal: Goal,
) -> Totals | None:
    if run.num_steps is None:
        return None
    num_tokens, step = run.num_steps * run.tokens_per_step, estimate.step.step
    wall = wall_s(productive_s=run.num_steps * step.value, goodput_ratio=goodput.value)
    tier = max(step.tier, goodput.tier)
    longer = math.exp(math.hypot(math.log(step.high / step.value), math.log(goodput.value / goodput.low)))
    shorter = math.exp(-math.hypot(math.log(step.value / step.low), math.log(goodput.high / goodput.value)))

    def around(value: float, unit: str) -> Estimate:
        return Estimate(value=value, low=value * shorter, high=value * longer, unit=unit, tier=tier)

    cost = energy_mwh = None
    if joule is not None:
        energy_mwh = joule * num_tokens / (1000 * JOULE_PER_KWH)
    if hourly is not None:
        rent = run_cost(
            num_devices=request.num_devices, wall_s=wall, num_tokens=num_tokens, usd_per_device_hour=hourly
        )
        cost = float(rent.usd) + (energy_mwh or 0.0) * 1000 * goal.usd_per_kwh
    return Totals(
        num_tokens=num_tokens,
        num_steps=run.num_steps,
        wall=around(float(wall), "s"),
        cost=None if cost is None else around(cost, "USD"),
        # Power is nearly constant, so energy is as uncertain as wall time.
        energy=None if energy_mwh is None else around(energy_mwh, "MWh"),
    )
