"""The plan that a run gets when it leaves the choice to the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.explain import explain_infeasible
from meshwright.planner.joint_search import with_layers_by_speed
from meshwright.planner.objective import Goal, goal_for
from meshwright.planner.request import PlanRequest, request_for
from meshwright.planner.search import PlanResult
from meshwright.planner.software import search_with_software
from meshwright.specs.run import Run


def free_request(run: Run) -> PlanRequest:
    """The request with the whole plan free, also of a run that pins one."""
    request = request_for(run)
    # A pinned plan comes with a micro-batch, which would hold the search to it.
    return request if run.plan is None else replace(request, fixed={})


def fixing(request: PlanRequest, fields: Mapping[str, object]) -> PlanRequest:
    """Return `request` with the `fields` of its plans that a user fixes.

    Raises InputError where the run states another value of one of them.
    """
    kernels = request.kernels
    stated = {
        "micro_batch": ("batch.micro", request.fixed.get("micro_batch")),
        "loss_chunk": ("kernels.loss_chunk", None if kernels.loss_chunk == "auto" else kernels.loss_chunk),
        "weight_cache": ("kernels.weight_cache", None if kernels.weight_cache == "auto" else kernels.weight_cache),
        "stored_activations": (
            "kernels.stored_activations", None if kernels.is_storage_open else (*kernels.stored_activations,),
        ),
    }  # fmt: skip
    for name, (key, value) in stated.items():
        given = fields.get(name)  # None: as the run says
        if None not in (given, value) and not _is_same(given, value):
            raise InputError(
                f"a plan's {name} is fixed, and the run states {key}: {value}",
                got=f"{name}={given}", hint=f"leave one of both out, or change the run: --set {key}=VALUE",
            )  # fmt: skip
    return request.fixing(**fields)


def _is_same(one: object, other: object) -> bool:
    """Return True for equal values; modules of a layer have no order."""
    return set(one) == set(other) if isinstance(one, tuple) and isinstance(other, tuple) else one == other


def goal_of(run: Run) -> Goal:
    """The run's objective with its prices; the cluster must be known."""
    cluster = request_for(run).cluster
    return goal_for(run.objective, cluster=cluster, costs=run.costs, num_steps=run.num_steps)


def holding_software(request: PlanRequest) -> PlanRequest:
    """Return `request` with the switches that its run states, and for the others those that its engine sets."""
    return replace(request, stack=replace(request.stack, is_open=False))


def best_plans(request: PlanRequest, *, goal: Goal, top: int = 1, slack: float = 0.0) -> PlanResult:
    """The search's result, which holds at least one plan. Its request has the switches that the planner chose.

    Raises InfeasibleError, which names the missing memory or devices.
    """
    result = search_with_software(request, top=top, goal=goal, slack=slack)
    if request.cluster.parts:
        result = with_layers_by_speed(result, goal=goal, top=top)
    if result.best is None:
        why = explain_infeasible(result, goal=goal)
        raise InfeasibleError(why.binding, hint="; ".join(why.suggestions) or None)
    return result
