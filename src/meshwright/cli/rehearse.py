"""`meshwright rehearse`: find the plan, and refuse plans that the native engine cannot run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright import runfile
from meshwright.cli.output import load_with_torch
from meshwright.engines.native.check import check
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.choice import best_plans, free_request, goal_of
from meshwright.specs.plan import Plan
from meshwright.specs.precision import PRECISIONS
from meshwright.specs.run import Data, Run
from meshwright.training.cpu_libraries import require_torch


def run(*, run_path: Path, overrides: tuple[str, ...], num_processes: int, timeout_s: float) -> None:
    """Check the run, and rehearse its plan."""
    run = runfile.load(run_path, overrides=overrides)
    require_torch("a rehearsal")  # before the planner searches
    plan = _plan_of(run)
    _require_possible(run, plan)
    rehearse = load_with_torch("meshwright.cli.rehearse_torch:rehearse", what="a rehearsal")
    rehearse(run, plan, num_processes=num_processes, timeout_s=timeout_s)


def _plan_of(run: Run) -> Plan:
    """The pinned plan, or the planner's best."""
    plan = run.plan
    if plan is None:
        if run.cluster is None:
            raise InputError(
                "a rehearsal needs a plan: this run pins none and names no cluster to plan for",
                got=run.cluster_name, hint="for example --set cluster=h100-8x1, or --set parallel.data_shard=2",
            )  # fmt: skip
        plan = best_plans(free_request(run), goal=goal_of(run)).plans[0].plan
    if plan.num_devices == 1:
        raise InputError("a plan of one device has nothing to rehearse", got=plan.describe())
    return plan


def _require_possible(run: Run, plan: Plan) -> None:
    """Raise InfeasibleError if the engine cannot run the model and plan. The rehearsal has its own formats and data."""
    train = replace(run.train, steps=1, tokens=None, epochs=None, evaluate=None)
    tried = replace(run, engine="native", plan=plan, precision=PRECISIONS["fp32"], data=Data(), train=train)
    if problems := check(tried):
        raise InfeasibleError(
            f"the native engine cannot run {plan.describe()}: {'; '.join(map(str, problems))}",
            hint=next((p.hint for p in problems if p.hint), None),
        )
