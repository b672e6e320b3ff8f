"""The plan that a run gets from the planner, among those that its engine runs."""

from __future__ import annotations

from dataclasses import replace

from meshwright.engines.base import Unsupported, check_export, find_engine
from meshwright.planner.choice import best_plans, goal_of
from meshwright.planner.request import request_for
from meshwright.specs.model import BaseFormat
from meshwright.specs.run import Run

CANDIDATES = 50, 5000
"""Plans that the planner ranks; the first that the engine runs is taken. More are estimated only where it runs none."""


OF_A_TRAINING = ("data", "train", "parallel")
"""Keys that a question about plans need not say."""


def not_run(run: Run) -> list[Unsupported]:
    """Why no program of the engine that `run` names runs it under any plan, as far as model and numerics say."""
    problems = check_export(replace(run, plan=None))
    return [problem for problem in problems if problem.key.partition(".")[0] not in OF_A_TRAINING]


def planned(run: Run) -> Run:
    """`run`, with the planner's best plan that its engine runs where it names none.

    What the engine has against the run under every plan is not asked here. The best plan of all where the engine runs
    none of them: what it has against it is then for the engine to say.
    Raises InputError when the cluster is not known to plan for, InfeasibleError when no plan fits.
    """
    if run.plan is not None:
        return run
    # The planner knows no quantised base. One of 16 bits needs more memory, so what fits it fits.
    asked = replace(run, lora=run.lora and replace(run.lora, base_format=BaseFormat.FULL))
    request, goal, engine = request_for(asked), goal_of(asked), find_engine(run.engine)
    always = set(engine.check(run))
    for top in CANDIDATES:
        ranked = best_plans(request, goal=goal, top=top).plans
        pinned = [replace(run, plan=found.plan, micro_batch=found.plan.micro_batch) for found in ranked]
        taken = next((one for one in pinned if always.issuperset(engine.check(one))), None)
        if taken is not None or len(ranked) < top:
            break
    return taken or pinned[0]
