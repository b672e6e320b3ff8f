"""The JSON document of `meshwright explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.answers.components import label
from meshwright.answers.documents.plan import plan_document, request_document, step_document, why_not_document

if TYPE_CHECKING:
    from meshwright.answers.difference import PlanDifference
    from meshwright.answers.explanation import Explanation
    from meshwright.planner.explain import Difference


def explanation_document(answer: Explanation) -> dict[str, Any]:
    """Both plans, what differs between them, which memory limit binds, and the answers to "why not"."""
    difference = answer.difference
    document: dict[str, Any] = {
        "request": request_document(answer.run, answer.request),
        "this": None,
        "other": {
            "name": answer.other_name, **plan_document(answer.other.plan), **step_document(answer.other.step),
        },
        "obstacle": answer.obstacle,
        "difference": None,
        "memory_limit": answer.limit and {
            **plan_document(answer.limit.plan),
            "step_s": answer.limit.step_s,
            "needed_gib": answer.limit.needed_gib,
            "available_gib": answer.limit.available_gib,
        },
        "why_not": [why_not_document(a) for a in answer.why_not],
    }  # fmt: skip
    if difference is not None:
        this, cause = difference.this, difference.decided_by
        document["this"] = {"name": answer.this_name, **plan_document(this.plan), **step_document(this.step)}
        document["difference"] = {
            "changes": {c.field: [c.this, c.other] for c in difference.changes},
            "step_ms": _numbers(difference.step_ms),
            "components_ms": {d.name: _numbers(d) for d in difference.comparison.components_ms},
            "memory_gib": {d.name: _numbers(d) for d in difference.comparison.memory_gib},
            "decided_by": cause and cause.name,
            "text": verdict_sentence(answer, difference),
        }
    return document


def _numbers(d: Difference) -> dict[str, float]:
    return {"this": d.winner, "other": d.loser, "delta": d.delta}


def verdict_sentence(answer: Explanation, difference: PlanDifference) -> str:
    """One line: how much longer or shorter the other plan's step is, and which component decides."""
    step, cause = difference.step_ms, difference.decided_by
    if cause is None:
        return "Both take the same time."
    change = "longer" if step.delta > 0 else "shorter"
    return (
        f"With {answer.other_name} the step is {abs(step.delta):,.1f} ms "
        f"({100 * abs(step.delta / step.winner):.1f} %) {change}; "
        f"{label(cause.name)} {cause.delta:+,.1f} ms decides."
    )
