"""The fewest changes that let an asked plan run: sets of one change are tried, then sets of two, then of three.

A plan that runs and is slower than the best one differs from it in more than what was asked. `forced_changes` finds
which of the other choices have to change with it. One that no choice lets run needs another question: `remedies` gives
up some of what was asked, or keeps tensors elsewhere or in fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from meshwright.cost.pipeline.schedules import SCHEDULE_RECORDS, usual_schedule
from meshwright.cost.tables import plan_row
from meshwright.planner.engines import Severity, engine_facts
from meshwright.planner.legality import legality_context, violations
from meshwright.planner.objective import Goal
from meshwright.planner.request import PlanRequest
from meshwright.planner.screen import CostModel, cost_model
from meshwright.planner.search import RankedPlan, search
from meshwright.specs.plan import Offload, Plan, Sharding
from meshwright.specs.precision import OPTIMIZER_STATE_BYTES

CHOICES: tuple[tuple[str, ...], ...] = (
    ("micro_batch",),
    ("recompute", "recompute_modules", "recompute_layers", "stored_activations", "weight_cache"),
    ("sharding",),
    ("data_replicate",),
    ("offload",),
    ("tensor", "sequence_parallel"),
    ("context",),
    ("pipeline", "virtual_pipeline", "schedule", "layers_per_stage", "axis_order"),
    ("expert", "expert_tensor"),
)
"""Fields of a plan that change together. The data width follows from the other degrees."""

MOST_CHANGES = 3
MAX_SEARCHES = 16
"""Number of searches for remedies. Each takes as long as the request's own search."""

MOST_CANDIDATES = 20
"""Plans of a search that are tried until the engine accepts one."""

MOST_REMEDIES = 2


@dataclass(frozen=True, kw_only=True)
class PlanRemedy:
    """A smallest set of changes with which the asked plan runs. `ratio`: its step over the best plan's step."""

    changes: tuple[str, ...]
    plan: Plan
    ratio: float

    def __str__(self) -> str:
        percent = 100 * abs(self.ratio - 1)
        pace = f"{percent:.1f} % {'slower' if self.ratio > 1 else 'faster'} than" if percent >= 0.05 else "as fast as"
        return f"it runs {' and '.join(self.changes)} ({self.plan.describe()}, {pace} the best plan)"


@dataclass(frozen=True, kw_only=True)
class _Change:
    text: str
    gives_up: bool = False  # a field that was asked
    apply: Callable[[PlanRequest], PlanRequest]


def word(name: str, value: object) -> object:
    """The value of a plan's field as `--fix` takes it."""
    if value is None and name in ("layers_per_stage", "loss_chunk"):
        return "auto" if name == "loss_chunk" else "even"
    if value is None and name == "recompute_layers":
        return "all"
    if value is None or isinstance(value, tuple):
        return ",".join(map(str, value or ())) or "none"
    return Sharding(value).name.lower() if name == "sharding" else getattr(value, "value", value)


def remedies(
    request: PlanRequest,
    asked: Mapping[str, object],
    *,
    winner: RankedPlan,
    fits: bool,
    goal: Goal | None = None,
    is_exported: Callable[[Plan], bool] = lambda _: True,
) -> tuple[PlanRemedy, ...]:
    """The fewest changes of `request` with `asked` fixed that leave a plan, fastest first; () where none was found.

    fits: no legal plan lacks memory, so that only giving up what was asked can help. is_exported: of a plan, True if
    the engine's check accepts it, which knows more than the rules of the search.
    """
    changes = [] if fits else list(_narrower(request))
    changes += [
        _Change(text=f"without {name}={word(name, value)}", gives_up=True, apply=_without(name))
        for name, value in asked.items()
    ]
    searched = 0
    for count in range(1, min(MOST_CHANGES, len(changes)) + 1):
        found = []
        for chosen in combinations(changes, count):
            if searched == MAX_SEARCHES:
                break
            if sum(change.gives_up for change in chosen) == len(asked):
                continue  # nothing would be left of the question
            searched += 1
            changed = request
            for change in chosen:
                changed = change.apply(changed)
            ranked = search(changed, top=MOST_CANDIDATES, goal=goal, wants_least=False).plans
            best = next((found for found in ranked if is_exported(found.plan)), None)
            if best is not None:
                texts = tuple(change.text for change in chosen)
                found.append(PlanRemedy(changes=texts, plan=best.plan, ratio=best.step_s / winner.step_s))
        if found:
            return tuple(sorted(found, key=lambda remedy: remedy.ratio)[:MOST_REMEDIES])
    return ()


def _narrower(request: PlanRequest) -> Iterator[_Change]:
    """Settings that save memory, leave the asked plan as it is, and that the engine runs."""
    facts = engine_facts(request.engine)
    if facts.offloads_optimizer and "offload" not in request.fixed:
        yield _Change(text="with offload=optimizer", apply=lambda r: r.fixing(offload=Offload.OPTIMIZER))
    if not facts.narrow_states:
        return
    if request.precision.optimizer_state_bytes == OPTIMIZER_STATE_BYTES["fp32"]:
        yield _Change(text="with optimizer.states=bf16", apply=_in_bf16)
    # The search tries them where the engine has them; where they are not open, the run or its compiler has decided.
    if request.kernels.is_storage_open and not request.kernels.stored_activations and not facts.stored_modules:
        stores = {"feed_forward": "e4m3"}
        yield _Change(
            text="with kernels.stored_activations={feed_forward: e4m3}",
            apply=lambda r: replace(r, kernels=replace(r.kernels, stored_activations=stores)),
        )


def _in_bf16(request: PlanRequest) -> PlanRequest:
    narrow = replace(request.precision, optimizer_state_bytes=OPTIMIZER_STATE_BYTES["bf16"])
    return replace(request, precision=narrow)


def _without(name: str) -> Callable[[PlanRequest], PlanRequest]:
    return lambda r: replace(r, fixed={k: v for k, v in r.fixed.items() if k != name})


def forced_changes(request: PlanRequest, asked: Mapping[str, object], *, winner: Plan, loser: Plan) -> tuple[str, ...]:
    """The fewest choices of `loser` with which `winner` and `asked` run together, as assignments; () where none is."""
    groups = [
        {name: getattr(loser, name) for name in group if name not in asked}
        for group in CHOICES
        if any(getattr(loser, name) != getattr(winner, name) for name in group if name not in asked)
    ]
    model = cost_model(request)
    for count in range(min(MOST_CHANGES, len(groups)) + 1):
        for chosen in combinations(groups, count):
            changes: dict[str, Any] = {name: value for group in chosen for name, value in group.items()}
            fixed = {"loss_chunk": None, **changes, **asked}  # its chunk adapts to the rest
            if _runs(request, with_fixed(winner, fixed, request.num_devices), model):
                return tuple(_assignments(changes, winner))
    return ()


def _assignments(changes: Mapping[str, Any], winner: Plan) -> Iterator[str]:
    for name, value in changes.items():
        if value == getattr(winner, name) or (name == "recompute" and changes.get("recompute_modules")):
            continue
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = "+".join(map(str, value)) or "none"
        yield f"{name}={word(name, value)}"


def _runs(request: PlanRequest, plan: Plan, model: CostModel) -> bool:
    broken = violations(plan, context=legality_context(request))
    if any(v.severity is Severity.REFUSED for v in broken):
        return False
    row = plan_row(plan)
    return bool(model.fits(row, model.memory(row).reserved_bytes))


def _with_stages_of_its_layers(plan: Plan, fixed: Mapping[str, object]) -> Plan:
    """`plan` with a pipeline that has as many stages as its layers are listed for; one stage is no pipeline."""
    num_stages = len(plan.layers_per_stage or ())
    if num_stages in (0, plan.pipeline * plan.virtual_pipeline):
        return plan
    if num_stages == 1:
        return replace(plan, layers_per_stage=None, pipeline=1, virtual_pipeline=1)
    ranks, left = divmod(num_stages, plan.virtual_pipeline)
    if not left and ranks > 1:
        return replace(plan, pipeline=ranks)
    schedule = plan.schedule if "schedule" in fixed else usual_schedule(1)
    return replace(plan, pipeline=num_stages, virtual_pipeline=1, schedule=schedule)


def with_fixed(plan: Plan, fixed: Mapping[str, object], num_devices: int) -> Plan:
    """`plan` with `fixed` and what follows from it: chunks that its schedule has, and the data width that remains."""
    changed = replace(plan, **dict(fixed))  # pyright: ignore[reportArgumentType]
    if {"pipeline", "virtual_pipeline", "schedule"} & set(fixed) and "layers_per_stage" not in fixed:
        changed = replace(changed, layers_per_stage=None)
    changed = _with_stages_of_its_layers(changed, fixed)
    record = SCHEDULE_RECORDS[changed.schedule]
    chunks = changed.virtual_pipeline if changed.pipeline > 1 else 1
    if "virtual_pipeline" not in fixed and changed.pipeline > 1 and not record.allows_chunks(chunks):
        chunks = record.min_chunks
    if "data_shard" not in fixed:
        inner = changed.tensor * changed.context * changed.pipeline * changed.data_replicate
        changed = replace(changed, data_shard=num_devices // inner)
    return replace(changed, virtual_pipeline=chunks)
