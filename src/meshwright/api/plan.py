"""`meshwright.plan`: rank all legal sharding plans of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.api import runs
from meshwright.api.question import Count, Flag, answered_by_body, question
from meshwright.api.runs import Overrides, RunSource

if TYPE_CHECKING:
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
