"""The ranked plans of a run: what `meshwright plan` prints and `meshwright.plan` returns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.accuracy.shipped import ShippedLayout, shipped_layout
from meshwright.answers.documents import plan as documents
from meshwright.answers.quantities import with_ends
from meshwright.engines import choice
from meshwright.errors import InfeasibleError, InputError, MeshwrightError
from meshwright.files import write_csv
from meshwright.json_values import jsonable
from meshwright.planner import PlanComparison, PlanRequest, PlanResult, RankedPlan, WhyNot, nearest_losers
from meshwright.planner import why_not as answer_to
from meshwright.planner.choice import best_plans, fixing, free_request, goal_of
from meshwright.planner.estimate import PlanEstimate, estimate_ranked, notes_on_gaps
from meshwright.planner.explain import WhyNotVerdict
from meshwright.planner.host_memory import notes_on_host_memory
from meshwright.planner.neighbours import Neighbour
from meshwright.planner.neighbours import neighbours as neighbours_of
from meshwright.planner.parts import notes_on_parts
from meshwright.planner.request import note_on_labels
from meshwright.planner.scored import ScoredPlans, scored_plans
from meshwright.planner.switches import GradientGain, SwitchGain, gradient_gain, notes_on_idle_switches, switch_gains
from meshwright.result import Result
from meshwright.runfile import loads, pin_plan, pinned_text
from meshwright.specs.run import NATIVE, Run, with_plan, with_software

FRONT_SLACK = 0.25
"""The front of speed against memory holds plans up to this share worse than the best."""

NUM_LOSERS = 3
"""Plans that are compared with the first, for any number of shown plans."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PlanRanking(Result):
    """The best plans of a run, best first, each with its estimate.

    Iterating yields a `PlanEstimate` for each plan.

    Attributes:
        run: the run that was planned, with the switches of software that the planner chose.
        search: the plans that the planner enumerated, kept and rejected.
        estimates: one `PlanEstimate` for each plan that is shown, best first.
        why_not: answers to the questions, in their order.
        engine_notes: which engine a run that names none is planned for, and why, where it is not the default one.
        has_front: True if `front` was asked for.
        neighbours: batch sizes and numbers of devices near the run's that are better by its objective; None unless
            asked for.
        switches: switches of software that would be better by its objective; None unless asked for.
        scored: every plan that was scored, or the best of them; None unless asked for.
    """

    run: Run
    search: PlanResult
    estimates: tuple[PlanEstimate, ...]
    why_not: tuple[WhyNot, ...] = ()
    engine_notes: tuple[str, ...] = ()
    has_front: bool = False
    neighbours: tuple[Neighbour, ...] | None = None
    switches: tuple[SwitchGain, ...] | None = None
    scored: ScoredPlans | None = None

    def __len__(self) -> int:
        return len(self.estimates)

    def __iter__(self) -> Iterator[PlanEstimate]:
        return iter(self.estimates)

    @property
    def request(self) -> PlanRequest:
        """The question that the planner was asked."""
        return self.search.request

    @property
    def best(self) -> PlanEstimate:
        """The first plan with its estimate."""
        return self.estimates[0]

    @property
    def ranked(self) -> tuple[RankedPlan, ...]:
        """The plans that are shown, with the value of the objective."""
        return self.search.plans[: len(self.estimates)]

    @property
    def front(self) -> tuple[RankedPlan, ...]:
        """Plans of which none is better in both step time and memory; empty unless asked for."""
        return self.search.front if self.has_front else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the first plan: its stages on parts of a cluster, and switches that change nothing of it."""
        request, plan = self.request, self.best.plan
        of_memory = (*notes_on_ignored_keys(self.run), *notes_on_host_memory(request, plan))
        of_software = (*notes_on_gaps(request), *notes_on_idle_switches(request, plan))
        of_batch = (*note_on_labels(self.run), *notes_on_parts(request, plan))
        return (*self.engine_notes, *of_batch, *of_software, *of_memory)

    @cached_property
    def gradients(self) -> GradientGain | None:
        """Gain of gradients that are reduced in bf16; None where it is too little, or nothing to choose."""
        return gradient_gain(self.request, self.search.plans[0], goal=goal_of(self.run))

    @cached_property
    def published(self) -> PublishedGap | None:
        """The layout that a vendor ships for the model on these accelerators, where the first plan is better."""
        best = self.search.plans[0]
        layout = shipped_layout(self.request.model.name, self.request.cluster.accelerator.name)
        if layout is None or self.request.lora is not None or self.request.cluster.parts:
            return None
        if all(getattr(best.plan, name) == width for name, width in layout.degrees.items()):
            return None
        goal = goal_of(self.run)
        answer = answer_to(self.request, layout.degrees, winner=best, goal=goal, brief=True)
        return None if answer.verdict is WhyNotVerdict.BEST else PublishedGap(layout=layout, answer=answer)

    @property
    def losers(self) -> tuple[PlanComparison, ...]:
        """The first plan compared with the next ones."""
        return nearest_losers(self.search, count=NUM_LOSERS)

    def pinned(self, *, rank: int = 1) -> Run:
        """Return the run with the plan of this rank pinned, ready for `estimate`, `explain` and `train`.

        Raises:
            InputError: there is no such rank, or the run file cannot hold the plan.
        """
        text = pinned_text(self.run, self._plan_at(rank))
        pinned = loads(text, file=self.run.source, here=self.run.cluster)
        return replace(pinned, name=self.run.name)

    def write(self, path: str | os.PathLike[str], *, rank: int = 1) -> None:
        """Write a run file that pins the plan of this rank.

        Raises:
            InputError: there is no such rank, or `path` cannot be written.
        """
        pin_plan(self.run, self._plan_at(rank), path)

    def _plan_at(self, rank: object) -> Any:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= len(self):
            raise InputError("there is no plan of this rank", got=rank, allowed=f"1 to {len(self)}")
        return self.estimates[rank - 1].plan

    def to_dict(self) -> dict[str, Any]:
        search = self.search
        document = {
            "request": documents.request_document(self.run, search.request),
            "plans": [
                {
                    "rank": i,
                    **documents.plan_document(done.plan),
                    "objective_value": ranked.value,
                    **documents.step_document(done.step),
                    **documents.parts_document(done),
                }
                for i, (ranked, done) in enumerate(zip(self.ranked, self, strict=True), start=1)
            ],
            "counts": search.counts,
            "seconds": {**search.seconds, "search": sum(search.seconds.values())},
            "explanation": {
                "losers": [documents.comparison_document(c) for c in self.losers],
                "why_not": [documents.why_not_document(a) for a in self.why_not],
                "not_tried": search.space.untried,
            },
        }
        if notes := self.notes:
            document["notes"] = list(notes)
        if (gain := self.gradients) is not None:
            document["explanation"]["gradients"] = {**documents.switch_document(gain), "saved_bytes": gain.saved_bytes}
        if (gap := self.published) is not None:
            document["explanation"]["published"] = {
                "run": gap.layout.id,
                "text": str(gap),
                "comparison": gap.answer.comparison and documents.comparison_document(gap.answer.comparison),
            }
        if self.neighbours is not None:
            document["explanation"]["neighbours"] = [documents.neighbour_document(n) for n in self.neighbours]
        if self.switches is not None:
            document["explanation"]["switches"] = [documents.switch_document(s) for s in self.switches]
        if self.scored is not None:
            document["scored"] = {
                "is_complete": self.scored.is_complete,
                "counts": self.scored.counts,
                "plans": self.to_scored_rows(),
            }
        if self.has_front:
            document["pareto"] = [
                {**documents.plan_document(r.plan), "step_s": r.step_s, "reserved_bytes": r.reserved_bytes}
                for r in self.front
            ]
        return jsonable(document)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each plan: rank, plan, estimates with their intervals, memory."""
        return [
            {
                "rank": rank,
                "plan": done.plan.describe(),
                "objective_value": ranked.value,
                **with_ends("step_s", done.step.step),
                **with_ends("tokens_per_s_per_device", done.step.tokens_per_s_per_device),
                **with_ends("mfu_ratio", done.step.mfu),
                "tier": done.step.step.tier.name.lower(),
                "reserved_bytes": float(done.step.memory.reserved_bytes),
                "capacity_bytes": float(done.step.memory.capacity_bytes),
            }
            for rank, (ranked, done) in enumerate(zip(self.ranked, self.estimates, strict=True), start=1)
        ]

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one row for each plan: the columns of `to_rows`, fields of the plan, and seconds by component.

        A ranking with `scored` writes a row for each scored plan.

        Raises:
            InputError: `path` cannot be written.
        """
        write_csv(path, self._plan_rows() if self.scored is None else self.to_scored_rows())

    def _plan_rows(self) -> list[dict[str, Any]]:
        components = sorted({name for done in self for name in done.step.components_s})
        return [
            {
                **row,
                **{name: getattr(value, "value", value) for name, value in vars(done.plan).items()},
                **{f"{name}_s": float(done.step.components_s.get(name, 0.0)) for name in components},
                "recompute_modules": " ".join(done.plan.recompute_modules),
            }
            for row, done in zip(self.to_rows(), self, strict=True)
        ]

    def to_scored_rows(self) -> list[dict[str, Any]]:
        """Return one flat row for each scored plan: estimates, fields of the plan, seconds and bytes by part.

        Raises:
            InputError: the scored plans were not asked for.
        """
        from meshwright.answers.plan_rows import scored_rows

        return scored_rows(self._listed())

    def _listed(self) -> ScoredPlans:
        if self.scored is None:
            raise InputError("the scored plans were not asked for", hint="plan(..., scored=10_000)")
        return self.scored

    def write_html(self, path: str | os.PathLike[str], *, command: str = "") -> None:
        """Write the page of all scored plans. `command` is the command line that makes it.

        Raises:
            InputError: the scored plans were not asked for, or `path` cannot be written.
        """
        self._listed()
        super().write_html(path, command=command)

    def summary(self) -> str:
        """Return model, cluster, number of plans and the best one."""
        from meshwright.answers.quantities import rate, value_of

        step, count = self.best.step, len(self)
        return (
            f"{self.request.model.name} on {self.run.cluster_name}, {count} {'plan' if count == 1 else 'plans'}; "
            f"best {self.best.plan.describe()}: {value_of(step.step)} a step, "
            f"{rate(step.tokens_per_s_per_device.value)} tokens/s/device, MFU {value_of(step.mfu)}"
        )


def _plan_of_own_engine(run: Run, fixed: Mapping[str, object]) -> str:
    """The native engine's first plan of a run that names no engine, as a hint; empty where it has none."""
    if not run.is_engine_open or run.engine == NATIVE:
        return ""
    try:
        native = choice.with_engine(run, NATIVE)
        found = best_plans(fixing(free_request(native), fixed), goal=goal_of(native))
    except MeshwrightError:
        return ""
    return f"--engine {NATIVE} has one that fits: {found.plans[0].plan.describe()}"


def plan_run(
    run: Run,
    *,
    top: int = 10,
    fixed: Mapping[str, object] | None = None,
    why_not: Sequence[Mapping[str, object]] = (),
    front: bool = False,
    neighbours: bool = False,
    switches: bool = False,
    scored: int = 0,
) -> PlanRanking:
    """Search all legal plans of `run` and estimate the best `top`. A plan that the run pins is ignored.

    `fixed` holds fields of the plan, each entry of `why_not` asks why no plan has these fields. `neighbours` searches
    batch sizes and numbers of devices near the run's too, about eight times as long; `switches` tries other software
    for the first plan. `scored`: scored plans that are listed too, 0: none.
    Raises InputError when the engine runs the model or its numbers under no plan, InfeasibleError when no plan is legal
    and fits.
    """
    engine_notes, planned = choice.notes_on_engine(run), choice.with_planned_engine(run)
    request, goal = fixing(free_request(planned), fixed or {}), goal_of(planned)
    slack = FRONT_SLACK if front else 0.0
    try:
        search = best_plans(request, goal=goal, top=max(top, 1 + NUM_LOSERS), slack=slack)
    except InfeasibleError as error:
        error.hint = "; ".join(filter(None, (_plan_of_own_engine(planned, fixed or {}), error.hint)))
        raise
    request, run = search.request, with_software(planned, search.request.stack)
    simulated = () if request.cluster.parts else search.plans
    answers = (
        answer_to(request, question, winner=search.plans[0], goal=goal, is_exported=choice.is_exported(run))
        for question in why_not
    )
    return PlanRanking(
        run=run,
        search=search,
        estimates=estimate_ranked(request, search.plans[:top]),
        why_not=tuple(answers),
        engine_notes=(*engine_notes, *choice.notes_on_own_programs(with_plan(run, search.plans[0].plan))),
        has_front=front,
        neighbours=neighbours_of(request, best=search.best, goal=goal) if neighbours else None,
        switches=switch_gains(request, search.plans[0], goal=goal) if switches else None,
        scored=scored_plans(request, goal=goal, most=scored, simulated=simulated) if scored else None,
    )


def notes_on_ignored_keys(run: Run) -> tuple[str, ...]:
    """Return a note on overrides of the run's plan, which a search ignores as it ignores a pinned plan."""
    keys = [key for text in run.overrides if (key := text.partition("=")[0].strip()).startswith("parallel.")]
    if not keys:
        return ()
    return (f"{', '.join(keys)}: ignored, as a plan that a run pins; fields are held with --fix tensor=8 or fixed=",)


# --- the layout that a vendor ships for a model ---


@dataclass(frozen=True, kw_only=True)
class PublishedGap:
    """A published layout, and why no plan with its degrees is the first."""

    layout: ShippedLayout
    answer: WhyNot

    def __str__(self) -> str:
        names = {"tensor": "TP", "context": "CP", "expert": "EP", "pipeline": "PP"}
        widths = " ".join(f"{name}{self.layout.degrees[key]}" for key, name in names.items())
        theirs = f"{self.layout.framework} has {widths} on {self.layout.num_devices:,} devices"
        return f"{theirs}: {documents.outcome_sentence(self.answer)}"
