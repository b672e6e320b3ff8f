"""Gains of other software: how much better the best plan of a request would be with each switch.

The best plan's degrees of parallelism, sharding and number formats are kept; schedule, micro-batch and recomputation
are chosen anew, because a switch that saves time or memory moves them. Only switches that the engine, or a file that is
exported for it, sets are tried (`EngineFacts.switches`), and none that changes the numbers that are trained with
(capacities of experts, attention in 8 bits).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from meshwright.catalog.engines import ANY
from meshwright.catalog.stacks import features_of, stack_facts
from meshwright.cost.tables import plan_row
from meshwright.planner.engines import engine_facts
from meshwright.planner.objective import Goal
from meshwright.planner.request import PlanRequest
from meshwright.planner.screen import cost_model
from meshwright.planner.search import RankedPlan, search
from meshwright.specs.features import AttentionKernel, CudaGraphs, Dispatcher, Features, Preset, WireFormat, runs_on
from meshwright.specs.plan import Offload, Plan
from meshwright.units import gib

LEAST_GAIN = 1.01
"""A switch is worth naming from this ratio of the objective's values on."""

Value = str | bool | float
Values = Mapping[str, Value]

CHOSEN = ("dispatcher", "cuda_graphs", "overlaps_experts", "overlaps_tensor")
"""Switches that the planner chooses where a run leaves them open: they change time and memory, and no number."""

HELD = ("tensor", "context", "pipeline", "expert", "expert_tensor", "data_shard", "data_replicate", "sharding")

_ATTENTION = (
    AttentionKernel.FA2,
    AttentionKernel.FA3,
    AttentionKernel.CUDNN,
    AttentionKernel.CK,
    AttentionKernel.AITER,
)
_DISPATCHERS = (Dispatcher.DEEPEP, Dispatcher.HYBRIDEP)
"""The fastest one is last."""


@dataclass(frozen=True, kw_only=True)
class SwitchGain:
    """Gain of other software. `gain`: the objective's value of the request's best plan over `plan`'s."""

    changes: tuple[tuple[str, Value], ...]  # keys of the run file's `stack` section
    plan: Plan
    step_s: float
    gain: float
    unit: str = "tokens/s"  # that `gain` is a ratio of

    def __str__(self) -> str:
        named = ", ".join(_said(key, value) for key, value in self.changes)
        return f"{named}: {self.gain - 1:+.0%} {self.unit} ({self.plan.describe()})"


@dataclass(frozen=True, kw_only=True)
class GradientGain(SwitchGain):
    """Gain of gradients that are reduced in fewer bits, which rounds them."""

    saved_bytes: float  # of the same plan; 0: less than a share that is worth naming

    def __str__(self) -> str:
        gains = [f"{self.gain - 1:+.0%} {self.unit} ({self.plan.describe()})"] if self.gain >= LEAST_GAIN else []
        if self.saved_bytes:
            gains.append(f"{gib(self.saved_bytes):.1f} GiB less for the same plan")
        return f"--set {', '.join(_said(*one) for one in self.changes)} rounds gradients: {', '.join(gains)}"


def open_values(request: PlanRequest) -> dict[str, Value]:
    """Return the switches that the planner may choose, each with the fastest value that the engine can set.

    In the cost model HybridEP is never slower than DeepEP, nor a graph of the whole iteration than partial graphs.
    None are open where the run states its software, and on a cluster of several generations, where software would
    change on each apart. `engine: any` has the software of a release, and its dispatcher alone is open: a library.
    """
    stack, cluster = request.stack, request.cluster
    if not stack.is_open or cluster.is_mixed:
        return {}
    now = features_of(stack, cluster.accelerator, precision=request.precision.name)
    tried = _worth_trying(request, None, now)
    found: dict[str, Value] = {}
    for name in CHOSEN if request.engine != ANY else ("dispatcher",):
        able = [value for value in tried.get(name, ()) if _sets(request, name, value)]
        if able and getattr(stack.features, name) is None and getattr(now, name) != able[-1]:
            found[name] = able[-1]
    return found


OFFLOADED_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the saved activations in host memory that are tried, in this order."""


def offloading(request: PlanRequest) -> list[Values]:
    """Return the shares of activations that the engine can keep in host memory, as switches; none if the run says."""
    stack, name = request.stack, "offloaded_activations"
    allowed = dict(engine_facts(request.engine).switches).get(name, ())
    if not stack.is_open or request.cluster.is_mixed or getattr(stack.features, name) is not None:
        return []
    return [{name: share} for share in OFFLOADED_SHARES if share in allowed]


def with_offloaded_states(request: PlanRequest) -> PlanRequest | None:
    """Return `request` with optimizer states in host memory; None where run, engine or devices leave no choice."""
    cluster, facts = request.cluster, engine_facts(request.engine)
    has_host = cluster.accelerator.vendor in ("NVIDIA", "AMD") and not cluster.is_mixed
    if "offload" in request.fixed or not facts.offloads_optimizer or not has_host:
        return None
    return replace(request.fixing(offload=Offload.OPTIMIZER), offloads_to_fit=True)


def with_values(request: PlanRequest, values: Values) -> PlanRequest:
    """Return `request` with switches that the planner chose."""
    if not values:
        return request
    stack = request.stack
    features = replace(stack.features, **values)  # pyright: ignore[reportArgumentType]
    return replace(request, stack=replace(stack, features=features, chosen=(*stack.chosen, *values)))


def reopened(request: PlanRequest) -> PlanRequest:
    """Return `request` as it was before the planner chose switches and offloading for its best plan."""
    stack, fixed = request.stack, request.fixed
    features = replace(stack.features, **dict.fromkeys(stack.chosen))  # pyright: ignore[reportArgumentType]
    if request.offloads_to_fit:
        fixed = {name: value for name, value in fixed.items() if name != "offload"}
    return replace(request, stack=replace(stack, features=features, chosen=()), fixed=fixed, offloads_to_fit=False)


def other_switches(request: PlanRequest, than: PlanRequest) -> str:
    """The switches of `request` that the planner chose, or left to the engine, where it did not for `than`."""
    device, precision = request.cluster.accelerator, request.precision.name
    ours, theirs = (features_of(asked.stack, device, precision=precision) for asked in (request, than))
    names = dict.fromkeys((*request.stack.chosen, *than.stack.chosen))
    return ", ".join(_said(n, getattr(ours, n)) for n in names if getattr(ours, n) != getattr(theirs, n))


def applying(request: PlanRequest, plan: Plan) -> set[str]:
    """Return the names of the switches that `plan` could use."""
    now = features_of(request.stack, request.cluster.accelerator, precision=request.precision.name)
    return set(_worth_trying(request, plan, now))


def switch_gains(request: PlanRequest, best: RankedPlan, *, goal: Goal | None = None) -> tuple[SwitchGain, ...]:
    """The best value of each switch that `goal` has better than `best`, best first, and then all of these together.

    `goal`: of which `best` has the value; throughput if not given.
    """
    goal = goal or Goal(num_devices=request.num_devices)
    if request.cluster.is_mixed:
        return ()  # software would change on each generation apart
    found: dict[str, SwitchGain] = {}
    for name, value in _alternatives(request, best.plan):
        gain = _gain(request, best, {name: value}, goal)
        if gain is not None and gain.gain >= max(LEAST_GAIN, found[name].gain if name in found else 0.0):
            found[name] = gain
    gains = sorted(found.values(), key=lambda gain: -gain.gain)
    if len(gains) > 1:
        together = _gain(request, best, {key: value for gain in gains for key, value in gain.changes}, goal)
        gains += [together] if together is not None else []
    return tuple(gains)


def gradient_gain(request: PlanRequest, best: RankedPlan, *, goal: Goal) -> GradientGain | None:
    """Return what gradients in bf16 would gain, where run and engine leave the choice; None where it is less than 1 %.

    They round what is trained with, so the planner never chooses them.
    """
    rounded = with_rounded_gradients(request, best.plan)
    if rounded is None:
        return None
    found = _gain(request, best, {"gradient_format": WireFormat.BF16}, goal)
    size, smaller = (_cost(asked, best.plan)[1] for asked in (request, rounded))
    saved_bytes = size - smaller if size >= LEAST_GAIN * smaller else 0.0
    if found is None or (found.gain < LEAST_GAIN and not saved_bytes):
        return None
    return GradientGain(**vars(found), saved_bytes=saved_bytes)


def with_rounded_gradients(request: PlanRequest, plan: Plan | None = None) -> PlanRequest | None:
    """Return `request` with gradients that are reduced in bf16; None where run, engine or `plan` leave no choice."""
    name, value = "gradient_format", WireFormat.BF16
    is_open = request.stack.features.gradient_format is None and request.engine != ANY
    if request.cluster.is_mixed or not is_open or (name, value) not in _alternatives(request, plan):
        return None
    return _with_features(request, {name: value})


def software_lines(request: PlanRequest, plan: Plan) -> list[str]:
    """The planner's choices, and switches that the engine sets where the release's recipe has other values.

    Empty: there are neither, as where a run asks for the recipe. Switches of the recipe that change nothing of `plan`
    are left out.
    """
    states = "optimizer states in host memory (offload=optimizer), as no plan fits with them on the device"
    lines = (states if request.offloads_to_fit else None, _chosen_switches(request), _engine_switches(request, plan))
    return [f"software: {line}" for line in lines if line is not None]


def _chosen_switches(request: PlanRequest) -> str | None:
    """The switches that the planner chose, and how a run keeps the engine's."""
    stack = request.stack
    if not stack.chosen:
        return None
    said = ", ".join(_said(name, getattr(stack.features, name)) for name in stack.chosen)
    return f"{said}, chosen with the plan; --set stack.preset=engine keeps the engine's own"


def _engine_switches(request: PlanRequest, plan: Plan) -> str | None:
    """The switches that the engine sets unless the run states others, where the recipe changes something of `plan`."""
    device, precision, stack = request.cluster.accelerator, request.precision.name, request.stack
    now = features_of(stack, device, precision=precision)
    # An engine keeps some switches under the recipe too: kernels of which it has no others.
    kept = engine_facts(request.engine).preset(request.model, Preset.RECIPE, device)
    theirs = features_of(replace(stack, preset=kept), device, precision=precision)
    # Of a recipe's switches that do not run together it has others, which a note names.
    recipe = engine_facts(request.engine).agreed(stack.features, theirs).or_else(theirs).stated()
    others = {
        name: value
        for name, value in now.stated().items()
        if getattr(stack.features, name) is None and recipe.get(name, value) != value
    }
    idle = _idle(request, plan, {name: recipe[name] for name in others})
    others = {name: value for name, value in others.items() if name not in idle}
    if not others:
        return None
    facts = stack_facts(stack.framework)
    release = facts.release_name(facts.newest if stack.vintage is None else stack.vintage)
    said = ", ".join(_said(name, value) for name, value in others.items())
    theirs = ", ".join(_value(recipe[name]) for name in others)
    return (
        f"{said}, as the engine sets it; the recipe of {facts.name} {release} has {theirs}: --set stack.preset=recipe"
    )


def _idle(request: PlanRequest, plan: Plan, values: Mapping[str, Value]) -> set[str]:
    """The names in `values` that change neither time nor memory of `plan`, alone or together with the others."""

    @cache
    def cost(*names: str) -> tuple[float, float]:
        return _cost(_with_features(request, {name: values[name] for name in names}), plan)

    return {
        name
        for name in values
        if cost(name) == cost() and cost(*(other for other in values if other != name)) == cost(*values)
    }


def notes_on_idle_switches(request: PlanRequest, plan: Plan) -> tuple[str, ...]:
    """The switches that the run states and that change nothing of `plan`: a dispatcher of a dense model, for example.

    A switch is compared with the release's, the others staying as they are.
    """
    device, features = request.cluster.accelerator, request.stack.features
    now, cost = features_of(request.stack, device), _cost(request, plan)
    notes = []
    for name, value in features.stated().items():
        stack = replace(request.stack, features=replace(features, **{name: None}))
        released = getattr(features_of(stack, device), name)
        if released != getattr(now, name) and _cost(replace(request, stack=stack), plan) == cost:
            notes.append(f"{_said(name, value)} changes neither time nor memory of this plan")
    return tuple(notes)


def _cost(request: PlanRequest, plan: Plan) -> tuple[float, float]:
    """Seconds of a step and bytes of a device."""
    model, row = cost_model(request), plan_row(plan)
    steps, memory = model.steps(row).step_s, model.memory(row).reserved_bytes
    return float(np.ravel(steps)[0]), float(np.ravel(memory)[0])


def _said(key: str, value: Value) -> str:
    """A switch as a run file and `--set` write it."""
    return f"stack.{key}={_value(value)}"


def _value(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gain(request: PlanRequest, best: RankedPlan, changes: dict[str, Value], goal: Goal) -> SwitchGain | None:
    """Return what `changes` gain in the degrees of `best`."""
    held = request.fixing(**{name: getattr(best.plan, name) for name in HELD})
    found = search(_with_features(held, changes), top=1, goal=goal, wants_least=False).best
    if found is None:
        return None
    return SwitchGain(
        changes=tuple(changes.items()), plan=found.plan, step_s=found.step_s,
        gain=best.value / found.value, unit=goal.rate_unit,
    )  # fmt: skip


def _with_features(request: PlanRequest, values: Mapping[str, Value]) -> PlanRequest:
    features = replace(request.stack.features, **values)  # pyright: ignore[reportArgumentType]
    return replace(request, stack=replace(request.stack, features=features))


def _alternatives(request: PlanRequest, plan: Plan | None) -> Iterator[tuple[str, Value]]:
    """Each switch with each value that the software does not have, the engine sets and the plan could use."""
    now = features_of(request.stack, request.cluster.accelerator, precision=request.precision.name)
    for name, values in _worth_trying(request, plan, now).items():
        for value in values:
            if getattr(now, name) != value and _sets(request, name, value):
                yield name, value


def _sets(request: PlanRequest, name: str, value: Value) -> bool:
    """True if the engine, or a file that is exported for it, sets this value."""
    if request.engine == ANY:
        return True
    facts = engine_facts(request.engine)
    return any(name == known and value in allowed for known, allowed in (*facts.switches, *facts.exported_switches))


def _worth_trying(request: PlanRequest, plan: Plan | None, now: Features) -> dict[str, tuple[Value, ...]]:
    """Values of switches by what the model, the plan, the accelerators and the software now have. None: any plan."""
    device = request.cluster.accelerator
    on_gpu, on_nvidia = device.vendor in ("NVIDIA", "AMD"), device.vendor == "NVIDIA"
    tried: dict[str, tuple[Value, ...]] = {}
    if on_gpu and not now.offloaded_activations:  # which graphs do not hold
        static = request.model.experts is None or now.has_capacity  # shapes, which a graph of all needs
        tried["cuda_graphs"] = (CudaGraphs.PARTIAL, *([CudaGraphs.FULL] if static else []))
    if on_gpu:
        tried["attention"] = tuple(kernel for kernel in _ATTENTION if runs_on(kernel, device))
        tried["compiles"] = (True,)
    if plan is None or plan.tensor > 1:
        tried["overlaps_tensor"] = (True,)
    if request.model.experts is not None and (plan is None or plan.expert > 1):
        # DeepEP does not pad experts to a capacity.
        kernels = _DISPATCHERS[1:] if now.has_capacity else _DISPATCHERS
        tried["dispatcher"] = tuple(kernel for kernel in kernels if runs_on(kernel, device))
        tried["overlaps_experts"] = (True,)
    if request.precision.name == "mxfp8" and request.model.experts is not None and on_nvidia:
        tried["fuses_experts"] = (True,)
    if (plan is None or plan.data > 1) and request.precision.name != "fp32":  # Megatron refuses both
        tried["gradient_format"] = (WireFormat.BF16,)
        if request.precision.matmul == "fp8":
            tried["parameter_format"] = (WireFormat.FP8,)
    return tried
