"""`meshwright.plan` and `meshwright.explain`: rank all legal sharding plans of a run, and compare two."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.api import runs
from meshwright.api.question import Count, Flag, answered_by_body, question
from meshwright.api.runs import RUN, WHY_NOT, Overrides, RunParameter, RunSource, given_run

if TYPE_CHECKING:
    from meshwright.answers.explanation import Explanation
    from meshwright.answers.plan_ranking import PlanRanking

MAX_SCORED = 100_000


@question("meshwright.answers.plan_ranking:plan_run", is_about_run=True)
def plan(
    run: Annotated[RunSource | None, runs.RUN] = None,
    *,
    model: Annotated[str | os.PathLike[str] | Mapping[str, Any] | None, runs.MODEL] = None,
    cluster: Annotated[str | Mapping[str, Any] | None, runs.CLUSTER] = None,
    accelerator: Annotated[str | os.PathLike[str] | None, runs.ACCELERATOR] = None,
    network: Annotated[str | None, runs.NETWORK] = None,
    device_memory: Annotated[str | None, runs.DEVICE_MEMORY] = None,
    global_sequences: Annotated[int | None, runs.GLOBAL_SEQUENCES] = None,
    sequence_length: Annotated[int | None, runs.SEQUENCE_LENGTH] = None,
    precision: Annotated[str | None, runs.PRECISION] = None,
    engine: Annotated[str | None, runs.ENGINE] = None,
    objective: Annotated[str | None, runs.OBJECTIVE] = None,
    overrides: Annotated[Overrides, runs.OVERRIDES] = (),
    fixed: Annotated[Mapping[str, Any] | str | None, runs.FIXED] = None,
    why_not: Annotated[Mapping[str, Any] | str | Sequence[Mapping[str, Any] | str], runs.WHY_NOT] = (),
    front: Annotated[bool, Flag("Also show the Pareto front of step time and memory.", flag="--pareto")] = False,
    neighbours: Annotated[
        bool, Flag("Also find better plans with batch sizes and numbers of devices near the run's.")
    ] = False,
    switches: Annotated[bool, Flag("Also find software switches that are better for the first plan.")] = False,
    top: Annotated[int, Count("Number of plans to show.", high=100)] = 10,
    scored: Annotated[
        int,
        Count(
            "Number of scored plans to list too, for `to_scored_rows`, `write_csv` and `write_html`.",
            low=0,
            high=MAX_SCORED,
        ),
    ] = 0,
) -> PlanRanking:
    """Search all legal sharding plans of a run and rank them. A plan that the run pins is ignored.

    Give either `run`, or `model`, `cluster`, `global_sequences` and `sequence_length`.

    Returns:
        The plans, best first, each with step time, throughput, MFU, their 80 % intervals, and memory.

    Raises:
        InputError: an argument is wrong, missing, or given twice, or the engine does not run the model or precision.
        UnknownNameError: a name is not in the catalogue.
        InfeasibleError: no plan is legal and fits in memory.

    Example:
        >>> import meshwright as mw
        >>> plans = mw.plan(
        ...     model="llama3.1-8b", cluster="h100-8x4", global_sequences=512, sequence_length=8192, top=3
        ... )
        >>> len(plans), plans.best.plan.num_devices, plans.best.step.step.unit
        (3, 32, 's')
    """
    return answered_by_body()


@question("meshwright.api.plan:explanation")
def explain(
    run: Annotated[RunSource, RUN],
    *,
    against: Annotated[
        RunSource | None,
        RunParameter("Run to compare with.", unset="the planner's best plan for the run", metavar="OTHER.yaml"),
    ] = None,
    why_not: Annotated[Mapping[str, Any] | str | Sequence[Mapping[str, Any] | str], WHY_NOT] = (),
) -> Explanation:
    """Compare the run's plan with another, component by component.

    If the run leaves its plan open and there is no other run, the best plan is compared with the second best.

    Returns:
        Both plans, their difference in milliseconds and GiB, the component that decides, and the answers.

    Raises:
        InputError: a run file or an argument is wrong.
        InfeasibleError: no plan is possible at all; with `against`, one of the plans cannot run.

    Example:
        >>> import meshwright as mw
        >>> answer = mw.explain("llama3-8b", why_not={"tensor": 8})
        >>> answer.this_name, [dict(a.fixed) for a in answer.why_not]
        ('the best plan', [{'tensor': 8}])
    """
    return answered_by_body()


def explanation(*, run: RunSource, against: RunSource | None, why_not: Sequence[dict[str, Any]]) -> Explanation:
    """The answer to `explain`."""
    from meshwright.answers.explanation import explain_pair, explain_run

    if against is None:
        return explain_run(given_run(run), questions=why_not)
    return explain_pair(given_run(run), given_run(against), questions=why_not)
