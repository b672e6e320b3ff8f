"""The plan that a run gets from the planner, among those that its engine runs."""

from __future__ import annotations

from dataclasses import replace

from meshwright.engines.base import find_engine
from meshwright.planner.choice import best_plans, goal_of
from meshwright.planner.request import request_for
from meshwright.specs.run import Run

CANDIDATES = 50
"""Plans that the planner ranks; the first that the engine runs is taken."""


def planned(run: Run) -> Run:
    """`run`, with the planner's best plan that its engine runs where it names none.

    The best one of all where the engine runs none of them: what it has against it is then for the engine to say.
    Raises InputError when the cluster is not known to plan for, InfeasibleError when no plan fits.
    """
    if run.plan is not None:
        return run
    ranked = best_plans(request_for(run), goal=goal_of(run), top=CANDIDATES).plans
    engine = find_engine(run.engine.value)
    pinned = [replace(run, plan=found.plan, micro_batch=found.plan.micro_batch) for found in ranked]
    return next((one for one in pinned if not engine.check(one)), pinned[0])
