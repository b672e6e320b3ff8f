"""`meshwright.estimate`: step time, memory and cost of one plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from meshwright.api.question import answered_by_body, question
from meshwright.api.runs import OVERRIDES, RUN, Overrides, RunSource, given_run

if TYPE_CHECKING:
    from meshwright.answers.run_estimate import RunEstimate


@question("meshwright.api.estimate:run_estimate")
def estimate(run: Annotated[RunSource, RUN], *, overrides: Annotated[Overrides, OVERRIDES] = ()) -> RunEstimate:
    """Estimate the run's plan: step time by component, memory by part, the whole training.

    The planner's best plan is estimated if the run leaves its plan open (`parallel: auto`).

    Returns:
        Estimates with their 80 % intervals, memory of the fullest stage, goodput, cost and energy.

    Raises:
        InputError: the run file or an override is wrong.
        InfeasibleError: no plan is possible, or the pinned one is illegal or does not fit.

    Example:
        >>> import meshwright as mw
        >>> done = mw.estimate("llama3-8b")
        >>> done.step.unit, done.step.low <= done.step.value <= done.step.high, done.memory.fits
        ('s', True, True)
    """
    return answered_by_body()


def run_estimate(*, run: RunSource, overrides: Overrides = ()) -> RunEstimate:
    """The answer to `estimate`."""
    from meshwright.answers.run_estimate import estimate_run

    return estimate_run(given_run(run, overrides=overrides))
