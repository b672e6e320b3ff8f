"""`meshwright.explain`: compare two plans, and say what decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.api import arguments
from meshwright.api.runs import RunSource, planned_run

if TYPE_CHECKING:
    from meshwright.answers.explanation import Explanation


def explain(
    run: RunSource,
    *,
    against: RunSource | None = None,
    why_not: Mapping[str, Any] | str | Sequence[Mapping[str, Any] | str] = (),
) -> Explanation:
    """Compare the run's plan with another, component by component.

    Args:
        run: a `Run`, the path or shipped name of a run file, or its content.
        against: the run to compare with. Default: the planner's best plan for the same run; if the run leaves
            its plan open, the best plan is compared with the second best.
        why_not: questions, each as {"tensor": 8}: why is no such plan the best?

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
    from meshwright.answers.explanation import explain_pair, explain_run

    asked = arguments.questions(why_not)
    if against is None:
        return explain_run(planned_run(run), questions=asked)
    return explain_pair(planned_run(run), planned_run(against), questions=asked)
