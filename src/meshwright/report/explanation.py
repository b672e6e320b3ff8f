"""Why one plan and not another: a run's plan against the planner's best, or against another run's.

explain_run(run)            the pinned plan against the best one; an open plan: the best against the second
explain_pair(run, other)    the plans of two runs, each pinned or planned
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.errors import InfeasibleError
from meshwright.planner import RankedPlan, WhyNot, why_not
from meshwright.planner.choice import best_plans, free_request, goal_of
from meshwright.planner.estimate import PlanEstimate, estimate_plan
from meshwright.planner.objective import Goal
from meshwright.planner.request import PlanRequest
from meshwright.report.difference import MemoryLimit, PlanDifference, differ, memory_limit
from meshwright.report.run_estimate import estimate_run, require_fit, require_legal
from meshwright.specs.run import Run

FixedFields = Mapping[str, object]
"""Fields of a plan, each at one value: why not these?"""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Two plans and what decides between them.

    `obstacle` says why the first cannot run, and then there is no difference; `limit` is the plan that would
    win if memory had no limit, where there is one.
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


def explain_run(run: Run, *, questions: Sequence[FixedFields] = ()) -> Explanation:
    """The run's plan against the planner's best. Raises InfeasibleError when no plan is possible at all."""
    goal, request = goal_of(run), free_request(run)
    result = best_plans(request, goal=goal, top=2)
    best = result.plans[0]
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
        why_not=_answers(request, questions, best, goal),
    )


def explain_pair(run: Run, other: Run, *, questions: Sequence[FixedFields] = ()) -> Explanation:
    """The plans of two runs. Raises InfeasibleError when one of them cannot run."""
    first, second, goal = estimate_run(run), estimate_run(other), goal_of(run)
    request = first.request
    answers: tuple[WhyNot, ...] = ()
    if questions:
        answers = _answers(request, questions, best_plans(request, goal=goal).plans[0], goal)
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
    request: PlanRequest, questions: Sequence[FixedFields], winner: RankedPlan, goal: Goal
) -> tuple[WhyNot, ...]:
    return tuple(why_not(request, question, winner=winner, goal=goal) for question in questions)
