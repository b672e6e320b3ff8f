"""Explanations: this plan against another, and the shortfall when nothing fits. Plain values, in ms and GiB.

Signs: a difference is the loser's number minus the winner's, so a positive one speaks for the winner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from meshwright.arrays import scalar
from meshwright.catalog.clusters import with_nodes
from meshwright.catalog.engines import ANY, planning_names
from meshwright.cost.memory import MEMORY_PARTS, MemoryTable, memory_parts
from meshwright.cost.plan_rows import plan_from_row
from meshwright.cost.tables import plan_row
from meshwright.planner.engines import Severity, engine_facts
from meshwright.planner.host_memory import LARGER_HOST, host_shortfall
from meshwright.planner.legality import Violation, broken_rules, legality_context, violations
from meshwright.planner.neighbours import neighbours
from meshwright.planner.objective import Goal
from meshwright.planner.remedies import PlanRemedy, forced_changes, remedies, with_fixed, word
from meshwright.planner.request import PlanRequest
from meshwright.planner.screen import cost_model
from meshwright.planner.search import PlanResult, RankedPlan, search
from meshwright.planner.software import search_with_software
from meshwright.planner.space import Space, choices, combine, num_rows, shapes
from meshwright.planner.switches import offloading, other_switches, reopened, with_rounded_gradients, with_values
from meshwright.specs.hardware import MAX_DEVICES, THIS_MACHINE
from meshwright.specs.model import Lora
from meshwright.specs.plan import Offload, Plan
from meshwright.units import gib, ms

SAMPLED_CANDIDATES = 20_000
MAX_GROWTH = 4096
"""A request that does not fit is tried on up to this many times its nodes."""
MOST_FOR_ADAPTERS = 8
"""A training of all parameters that does not fit on more devices has other ways than adapters."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One number of two plans."""

    name: str
    winner: float
    loser: float
    unit: str

    @property
    def delta(self) -> float:
        return self.loser - self.winner


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """Two plans side by side. `components_ms` and `memory_gib` have the largest difference first."""

    winner: RankedPlan
    loser: RankedPlan
    step_ms: Difference
    components_ms: tuple[Difference, ...]
    memory_gib: tuple[Difference, ...]
    headroom_gib: Difference

    @property
    def decided_by(self) -> Difference:
        """The component that sets the loser back most."""
        return max(self.components_ms, key=lambda d: d.delta)


class WhyNotVerdict(Enum):
    """Outcome of a why-not question."""

    BEST = "best"  # it is the winner, or as good
    SLOWER = "slower"
    TOO_LITTLE = "gains too little"  # faster, by less than the numbers that it rounds must gain
    DOES_NOT_FIT = "does not fit"
    ILLEGAL = "illegal"


@dataclass(frozen=True, kw_only=True)
class WhyNot:
    """The answer to "why not `fixed`?"."""

    fixed: Mapping[str, object]
    verdict: WhyNotVerdict
    comparison: PlanComparison | None = None  # of one that runs: the best plan with `fixed` against the winner
    binding: str = ""  # SLOWER: the memory or the rule that keeps it from the winner's choices; "": time alone
    infeasible: Infeasible | None = None  # DOES_NOT_FIT
    violations: tuple[Violation, ...] = ()  # ILLEGAL: the rules; otherwise warnings about the plan
    forced: tuple[str, ...] = ()  # SLOWER: the fewest other choices that have to differ from the winner's
    software: str = ""  # switches that the planner chose otherwise than for the winner
    remedies: tuple[PlanRemedy, ...] = ()  # DOES_NOT_FIT, ILLEGAL: the fewest changes with which it runs

    @property
    def reasons(self) -> tuple[str, ...]:
        """Other switches, the binding rule or memory, and the fewest changes that go with the plan or let it run."""
        software = f"with {self.software}" if self.software else ""
        forced = f"the rest can stay but for {', '.join(self.forced)}" if self.forced else ""
        return tuple(filter(None, (software, self.binding, forced, *map(str, self.remedies))))


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """No plan is possible: by memory (`needed_gib` of the least demanding legal plan) or by legality."""

    needed_gib: float | None
    available_gib: float
    binding: str
    nearest: RankedPlan | None  # the legal plan that needs least memory
    memory_gib: dict[str, float]
    violations: tuple[Violation, ...]
    suggestions: tuple[str, ...]


def compare(winner: RankedPlan, loser: RankedPlan, *, usable_bytes: float) -> PlanComparison:
    """Compare two plans: time by component, and the memory that each leaves of `usable_bytes`."""
    first, second = _components_s(winner), _components_s(loser)
    names = first | second
    times = [Difference(name=n, winner=ms(first.get(n, 0.0)), loser=ms(second.get(n, 0.0)), unit="ms") for n in names]
    one, other = memory_parts_gib(winner.memory), memory_parts_gib(loser.memory)
    parts = [Difference(name=n, winner=one[n], loser=other[n], unit="GiB") for n in one]
    free = [gib(usable_bytes - scalar(r.memory.reserved_bytes)) for r in (winner, loser)]
    return PlanComparison(
        winner=winner,
        loser=loser,
        step_ms=Difference(name="step", winner=ms(winner.step_s), loser=ms(loser.step_s), unit="ms"),
        components_ms=_largest_first(times),
        memory_gib=_largest_first(parts),
        headroom_gib=Difference(name="headroom", winner=free[0], loser=free[1], unit="GiB"),
    )


def nearest_losers(result: PlanResult, *, count: int = 3) -> tuple[PlanComparison, ...]:
    """The winner against the plans ranked next."""
    if result.best is None:
        return ()
    usable = result.request.usable_bytes
    return tuple(compare(result.best, loser, usable_bytes=usable) for loser in result.plans[1 : 1 + count])


def why_not(
    request: PlanRequest,
    fixed: Mapping[str, object],
    *,
    winner: RankedPlan,
    goal: Goal | None = None,
    brief: bool = False,
    is_exported: Callable[[Plan], bool] = lambda _: True,
) -> WhyNot:
    """The best plan with `fixed` against `winner`, or the rule or the memory that forbids every such plan.

    `fixed` maps fields of `specs.plan.Plan` to values, as in {"tensor": 8}. Switches chosen for `winner` are chosen
    anew, as `--fix` does. `brief`: without what binds and the ways on. `is_exported`: see `remedies`.
    """
    goal = goal or Goal(num_devices=request.num_devices)
    result = search_with_software(reopened(request).fixing(**fixed), goal=goal)
    restricted = result.request
    if result.best is None:
        infeasible = explain_infeasible(result, suggest=False)
        verdict = WhyNotVerdict.DOES_NOT_FIT if infeasible.nearest else WhyNotVerdict.ILLEGAL
        return WhyNot(
            fixed=fixed,
            verdict=verdict,
            infeasible=infeasible if infeasible.nearest else None,
            violations=infeasible.violations,
            remedies=()
            if brief
            else remedies(
                restricted, fixed, winner=winner, fits=verdict is WhyNotVerdict.ILLEGAL, goal=goal,
                is_exported=is_exported,
            ),
        )  # fmt: skip
    warnings = tuple(violations(result.best.plan, context=legality_context(restricted)))
    verdict = WhyNotVerdict.BEST
    if result.best.rank > winner.rank:
        is_slower = result.best.value >= winner.value
        verdict = WhyNotVerdict.SLOWER if is_slower else WhyNotVerdict.TOO_LITTLE
    is_bound = verdict is not WhyNotVerdict.BEST and not brief
    binding = _binding(restricted, fixed, result.best, winner) if is_bound else ""
    forced = forced_changes(restricted, fixed, winner=winner.plan, loser=result.best.plan) if binding else ()
    return WhyNot(
        fixed=fixed,
        verdict=verdict,
        binding=binding,
        forced=forced,
        software=other_switches(restricted, request),
        comparison=compare(winner, result.best, usable_bytes=request.usable_bytes),
        violations=warnings,
    )


RECOMPUTATION = {"recompute", "recompute_modules", "recompute_layers"}
"""Fields of a plan that only one kind of recomputation has together."""
_MEMORY = "recompute recompute_modules recompute_layers offload micro_batch stored_activations weight_cache"
MEMORY_CHOICES = (*_MEMORY.split(),)
"""Choices of a plan that trade time for memory."""


def _binding(request: PlanRequest, fixed: Mapping[str, object], loser: RankedPlan, winner: RankedPlan) -> str:
    """The memory or the rule that forbids the best plan with `fixed` in it; "" where that runs and takes longer."""
    if memory := _binding_memory(request, loser, winner):
        return memory
    plan = with_fixed(winner.plan, {"loss_chunk": None, **fixed}, request.num_devices)  # it adapts to the rest
    broken = _refused(violations(plan, context=legality_context(request)))
    if broken:
        return f"the rule of {broken[0].rule} binds: with the rest of the best plan {broken[0].message}"
    needed, available = gib(reserved_bytes(request, plan)), gib(request.usable_bytes)
    if needed <= available:
        return ""
    return f"memory binds: with the rest of the best plan it needs {needed:.1f} GiB of {available:.1f}"


def reserved_bytes(request: PlanRequest, plan: Plan) -> float:
    """Bytes that `plan` reserves on its fullest rank."""
    return scalar(cost_model(request).memory(plan_row(plan)).reserved_bytes)


def _binding_memory(request: PlanRequest, loser: RankedPlan, winner: RankedPlan) -> str:
    """The memory that `request` needs with the winner's recomputation, offloading and micro-batch; "" if it fits."""
    held = set(request.fixed)
    if held & RECOMPUTATION:
        held |= RECOMPUTATION  # its kind, modules and layers belong together
    choices = {name: getattr(winner.plan, name) for name in MEMORY_CHOICES if name not in held}
    if all(getattr(loser.plan, name) == value for name, value in choices.items()):
        return ""
    same = search(request.fixing(**choices), top=1)
    short = same.shortfall
    if same.best is not None or short is None:
        return ""
    return (
        f"memory binds: with the recomputation, offloading and micro-batch of the best plan it needs "
        f"{short.needed:.1f} GiB of {short.available:.1f}"
    )


def explain_infeasible(result: PlanResult, *, suggest: bool = True, goal: Goal | None = None) -> Infeasible:
    """Explain a search that found no plan: memory or rules; with `suggest` also changes that would make one fit.

    `goal`: by which the best of these changes is chosen; throughput if not given.
    """
    request, nearest = result.request, result.least_memory
    available = gib(request.usable_bytes)
    short = 1.0 if nearest is None else nearest.reserved_bytes / request.usable_bytes
    suggestions = _suggestions(request, short=short) if suggest else ()
    if nearest is None:
        rules = forbidding_rules(request, result.space)
        held = ", ".join(f"{name}={word(name, value)}" for name, value in request.fixed.items())
        together = " at once" if len(request.fixed) > 1 else ""
        reason = "; ".join(map(str, rules)) or f"none on {request.num_devices} devices has {held}{together}"
        if suggest and not suggestions:
            suggestions = tuple(map(str, neighbours(request, best=None, goal=goal)))
        return Infeasible(
            needed_gib=None,
            available_gib=available,
            binding=f"no legal plan: {reason}",
            nearest=None,
            memory_gib={},
            violations=rules,
            suggestions=suggestions,
        )
    needed = gib(scalar(nearest.memory.reserved_bytes))
    on_host = host_shortfall(request, nearest.plan) if result.lacks_host_memory else None
    parts = memory_parts_gib(nearest.memory)
    largest = max(MEMORY_PARTS, key=parts.__getitem__)
    return Infeasible(
        needed_gib=needed,
        available_gib=available,
        binding=on_host
        or (
            f"device memory: {request.model.name} needs at least {needed:.1f} GiB per device "
            f"({nearest.plan.describe()}), there are {available:.1f} GiB; largest part: {largest}, "
            f"{parts[largest]:.1f} GiB"
        ),
        nearest=nearest,
        memory_gib=parts,
        violations=(),
        suggestions=(LARGER_HOST, *suggestions) if on_host else suggestions,
    )


def forbidding_rules(request: PlanRequest, space: Space) -> tuple[Violation, ...]:
    """The rules that the most nearly legal candidate of `space` breaks."""
    context = legality_context(request)
    shape_table = shapes(space)
    if num_rows(shape_table) == 0:
        return _refused(violations(_as_fixed(request), context=context))
    choice_table = choices(space)
    best_shapes = np.argsort(broken_rules(shape_table, context=context), kind="stable")
    count = max(1, SAMPLED_CANDIDATES // len(choice_table))
    row = np.repeat(best_shapes[:count], len(choice_table))
    choice = np.tile(np.arange(len(choice_table)), len(row) // len(choice_table))
    plan = combine(shape_table.take(row), choice_table.take(choice))
    index = int(np.argmin(broken_rules(plan, context=context)))
    nearest = plan_from_row(plan.take(index), splits=space.splits)
    # A candidate may break no rule but the fixed data width, which no row of the space has.
    return _refused(violations(nearest, context=context)) or _refused(violations(_as_fixed(request), context=context))


def _refused(found: list[Violation]) -> tuple[Violation, ...]:
    return tuple(v for v in found if v.severity is Severity.REFUSED)


def _as_fixed(request: PlanRequest) -> Plan:
    """A plan with the fixed fields; the data width, where free, comes nearest to the devices.

    The sharding, where free, is one that the engine has.
    """
    offered, usual = engine_facts(request.engine).shardings, Plan().sharding
    free = {"sharding": usual if usual in offered else offered[-1]}
    plan = Plan(**{**free, **request.fixed})  # pyright: ignore[reportArgumentType]
    if "data_shard" in request.fixed:
        return plan
    inner = plan.tensor * plan.context * plan.pipeline * plan.data_replicate
    return replace(plan, data_shard=max(1, request.num_devices // inner))


def _suggestions(request: PlanRequest, *, short: float) -> tuple[str, ...]:
    """The nearest requests that are feasible: fewer fixed fields, offloaded activations, more devices, adapters.

    short: memory that the least demanding plan needs over the memory of a device; 1 if no plan is legal.
    """
    found = []
    for name, value in request.fixed.items():
        freed = replace(request, fixed={k: v for k, v in request.fixed.items() if k != name})
        best = _first_plan(freed)
        if best is not None:
            found.append(f"fits when {name} is not held at {word(name, value)}: {best}")
    found += _on_other_engines(request)
    found += [] if found else _with_offloaded_activations(request)
    if (rounded := with_rounded_gradients(request)) is not None and (best := _first_plan(rounded)) is not None:
        found.append(f"fits with --set stack.gradient_format=bf16, which rounds gradients: {best}")
    found += _with_more_devices(request, short=short)
    if short > 1 and request.lora is None and request.num_devices <= MOST_FOR_ADAPTERS:
        as_adapters = replace(request, lora=Lora(), engine=ANY)
        found += (
            ["adapters fit: --set task=lora, on an engine that has them"]
            if _first_plan(as_adapters) is not None
            else []
        )
    return tuple(found)


def _on_other_engines(request: PlanRequest) -> list[str]:
    """The engines that run the fixed schedule or offload where the request's does not; `any` plans for no program."""
    schedule, offload = request.fixed.get("schedule"), request.fixed.get("offload")
    facts = {name: engine_facts(name) for name in (request.engine, *planning_names())}
    found = []
    if schedule is not None and schedule not in facts[request.engine].schedules:
        able = [name for name in facts if schedule in facts[name].schedules]
        found += [f"--engine {name} {'plans' if name == ANY else 'runs'} {word('schedule', schedule)}" for name in able]
    if offload == Offload.OPTIMIZER and not facts[request.engine].offloads_optimizer:
        able = [name for name in facts if facts[name].offloads_optimizer and name != ANY]
        found += [f"--engine {name} keeps optimizer states in host memory" for name in able]
    return found


def _with_offloaded_activations(request: PlanRequest) -> list[str]:
    """The first share of activations in host memory with which a plan fits; a search that may choose it has tried."""
    if request.stack.is_open:
        return []
    for values in offloading(replace(request, stack=replace(request.stack, is_open=True))):
        best = _first_plan(with_values(request, values))
        if best is not None:
            return [f"fits with stack.offloaded_activations={values['offloaded_activations']}: {best}"]
    return []


def _with_more_devices(request: PlanRequest, *, short: float) -> list[str]:
    """The first doubling that fits. No plan needs less than its share, so those far from it are passed over."""
    nodes = request.cluster.num_nodes
    if request.cluster.parts or request.cluster.accelerator.vendor == THIS_MACHINE:
        return []  # which part would grow is not asked, and there is one of this machine
    for growth in (2**k for k in range(1, MAX_GROWTH.bit_length())):
        if request.num_devices * growth > MAX_DEVICES:
            break
        if 2 * growth < short:
            continue
        cluster = with_nodes(request.cluster, nodes * growth)
        best = _first_plan(replace(request, cluster=cluster))
        if best is not None:
            return [f"fits with --cluster {cluster.name}, {cluster.num_devices} devices: {best}"]
    return []


def _first_plan(request: PlanRequest) -> str | None:
    best = search(request, top=1, wants_least=False).best
    return None if best is None else best.plan.describe()


def memory_parts_gib(memory: MemoryTable) -> dict[str, float]:
    """GiB of each part of the fullest rank, and GiB outside the allocator."""
    return {name: gib(size) for name, size in memory_parts(memory).items()}


def _components_s(ranked: RankedPlan) -> dict[str, float]:
    """Components whose sum is the simulated step: the event graph's change is in the bubble."""
    components = ranked.components_s
    components["bubble"] = components.get("bubble", 0.0) + ranked.step_s - ranked.closed_form_s
    return components


def _largest_first(differences: list[Difference]) -> tuple[Difference, ...]:
    return tuple(sorted(differences, key=lambda d: (-abs(d.delta), d.name)))
