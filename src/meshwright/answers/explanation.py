"""Comparison of two plans: a run's plan against the planner's best, or against another run's.

explain_run(run)            the pinned plan against the best one; an open plan: the best against the second
explain_pair(run, other)    the plans of two runs, each pinned or planned
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.answers.components import label
from meshwright.answers.difference import MemoryLimit, PlanDifference, differ, memory_limit
from meshwright.answers.documents.plan import plan_document, request_document, step_document, why_not_document
from meshwright.answers.run_estimate import estimate_run, require_fit, require_legal
from meshwright.engines.choice import is_exported
from meshwright.errors import InfeasibleError
from meshwright.json_values import jsonable, picked
from meshwright.planner import RankedPlan, WhyNot, why_not
from meshwright.planner.choice import best_plans, free_request, goal_of, holding_software
from meshwright.planner.estimate import PlanEstimate, estimate_plan
from meshwright.planner.explain import Difference
from meshwright.planner.objective import Goal
from meshwright.planner.request import PlanRequest
from meshwright.result import Result
from meshwright.specs.run import Run, with_software

FixedFields = Mapping[str, object]
"""Fields of a plan, each held at one value, as in {"tensor": 8}."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Explanation(Result):
    """Two plans and what decides between them.

    Attributes:
        run: the run that was explained.
        request: the question that the planner was asked.
        this_name: name of the first plan.
        other_name: name of the second plan.
        other: estimate of the second plan.
        difference: both plans, compared by component; None if the first plan cannot run.
        obstacle: the reason why the first plan cannot run, or None.
        limit: the plan that would win if memory had no limit; None if memory does not bind.
        why_not: answers to the questions, in their order.
    """

    run: Run
    request: PlanRequest
    this_name: str
    other_name: str
    other: PlanEstimate
    difference: PlanDifference | None
    obstacle: str | None = None
    limit: MemoryLimit | None = None
    why_not: tuple[WhyNot, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        difference = self.difference
        document: dict[str, Any] = {
            "request": request_document(self.run, self.request),
            "this": None,
            "other": {
                "name": self.other_name, **plan_document(self.other.plan), **step_document(self.other.step),
            },
            "obstacle": self.obstacle,
            "difference": None,
            "memory_limit": self.limit and {
                **plan_document(self.limit.plan),
                **picked(self.limit, "step_s", "needed_gib", "available_gib"),
            },
            "why_not": [why_not_document(a) for a in self.why_not],
        }  # fmt: skip
        if difference is not None:
            this, cause = difference.this, difference.decided_by
            document["this"] = {"name": self.this_name, **plan_document(this.plan), **step_document(this.step)}
            document["difference"] = {
                "changes": {c.field: [c.this, c.other] for c in difference.changes},
                "step_ms": _numbers(difference.step_ms),
                "components_ms": {d.name: _numbers(d) for d in difference.comparison.components_ms},
                "memory_gib": {d.name: _numbers(d) for d in difference.comparison.memory_gib},
                "decided_by": cause and cause.name,
                "text": verdict_sentence(self, difference),
            }
        return jsonable(document)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each component in milliseconds of a step, then one for each part of memory in GiB."""
        if self.difference is None:
            return []
        comparison = self.difference.comparison
        compared = [("step_ms", d) for d in (*comparison.components_ms, comparison.step_ms)]
        compared += [("memory_gib", d) for d in comparison.memory_gib]
        return [
            {"quantity": quantity, "name": d.name, "this": d.winner, "other": d.loser, "delta": d.delta}
            for quantity, d in compared
        ]

    def summary(self) -> str:
        """Return the verdict: how much longer or shorter the second plan's step is, and which component decides."""
        if self.difference is None:
            return f"{self.this_name} cannot run: {self.obstacle}"
        return verdict_sentence(self, self.difference)


def explain_run(run: Run, *, questions: Sequence[FixedFields] = ()) -> Explanation:
    """The run's plan against the planner's best. Raises InfeasibleError when no plan is possible at all."""
    goal, request = goal_of(run), free_request(run)
    # A pinned plan is compared under the software of its run.
    result = best_plans(request if run.plan is None else holding_software(request), goal=goal, top=2)
    request, best = result.request, result.plans[0]
    run = with_software(run, request.stack)
    if run.plan is None:
        names, plans = ("the best plan", "the second best plan"), (best.plan, result.plans[-1].plan)
    else:
        names, plans = ("this run's plan", "the planner's best plan"), (run.plan, best.plan)
    this, other = (estimate_plan(request, plan) for plan in plans)
    obstacle = _obstacle(request, this)
    return Explanation(
        run=run,
        request=request,
        this_name=names[0],
        other_name=names[1],
        other=other,
        difference=None if obstacle else differ(this, other, usable_bytes=request.usable_bytes),
        obstacle=obstacle,
        limit=memory_limit(request, goal=goal, best=best),
        why_not=_answers(run, request, questions, best, goal),
    )


def explain_pair(run: Run, other: Run, *, questions: Sequence[FixedFields] = ()) -> Explanation:
    """The plans of two runs. Raises InfeasibleError when one of them cannot run."""
    first, second, goal = estimate_run(run), estimate_run(other), goal_of(run)
    request = first.request
    answers: tuple[WhyNot, ...] = ()
    if questions:
        answers = _answers(run, request, questions, best_plans(holding_software(request), goal=goal).plans[0], goal)
    return Explanation(
        run=run,
        request=request,
        this_name=run.source,
        other_name=other.source,
        other=second.estimate,
        difference=differ(first.estimate, second.estimate, usable_bytes=request.usable_bytes),
        why_not=answers,
    )


def _obstacle(request: PlanRequest, estimate: PlanEstimate) -> str | None:
    try:
        require_legal(request, estimate.plan)
        require_fit(request, estimate)
    except InfeasibleError as error:
        return error.message
    return None


def _answers(
    run: Run, request: PlanRequest, questions: Sequence[FixedFields], winner: RankedPlan, goal: Goal
) -> tuple[WhyNot, ...]:
    return tuple(
        why_not(request, question, winner=winner, goal=goal, is_exported=is_exported(run)) for question in questions
    )


def _numbers(d: Difference) -> dict[str, float]:
    return {"this": d.winner, "other": d.loser, "delta": d.delta}


def verdict_sentence(answer: Explanation, difference: PlanDifference) -> str:
    """One line: how much longer or shorter the other plan's step is, and which component decides."""
    step, cause = difference.step_ms, difference.decided_by
    if cause is None:
        return "Both take the same time."
    change = "longer" if step.delta > 0 else "shorter"
    return (
        f"With {answer.other_name} the step is {abs(step.delta):,.1f} ms "
        f"({100 * abs(step.delta / step.winner):.1f} %) {change}; "
        f"{label(cause.name)} {cause.delta:+,.1f} ms decides."
    )
