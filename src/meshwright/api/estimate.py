"""`meshwright.estimate`: step time, memory and cost of one plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.api.runs import Overrides, RunSource, load_run, planned_run

if TYPE_CHECKING:
    from meshwright.answers.run_estimate import RunEstimate


def estimate(run: RunSource, *, overrides: Overrides = ()) -> RunEstimate:
    """Estimate the run's plan: step time by component, memory by part, the whole training.

    The planner's best plan is estimated if the run leaves its plan open (`parallel: auto`).

    Args:
        run: a `Run`, the path or shipped name of a run file, or its content.
        overrides: keys of the run file with new values, as {"parallel.tensor": 4} or {"cluster.network": "25Gb/s"}.

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
    from meshwright.answers.run_estimate import estimate_run

    return estimate_run(planned_run(load_run(run, overrides=overrides)))
