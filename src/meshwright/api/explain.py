"""`meshwright.explain`: compare two plans, and say what decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.api.question import answered_by_body, question
from meshwright.api.runs import RUN, WHY_NOT, RunParameter, RunSource, given_run

if TYPE_CHECKING:
    from meshwright.answers.explanation import Explanation


@question("meshwright.api.explain:explanation")
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
