"""Review of an imported run: what stops it, what is assumed, deprecated or idle in it, and the plan that is faster."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.answers.explanation import explain_run
from meshwright.answers.run_import import RunImport
from meshwright.engines.base import ASSUMED, DEPRECATED
from meshwright.errors import MeshwrightError
from meshwright.planner import request_for, violations
from meshwright.planner.engines import Severity
from meshwright.planner.legality import legality_context
from meshwright.planner.switches import notes_on_idle_switches
from meshwright.specs.run import Run

LEVELS = ("error", "warning", "advice")
"""Weights of findings; after an error the run cannot start so."""

LEAST_GAIN = 0.01
"""Share of the step from which a plan is advised: estimates of two plans do not tell less apart."""


def review(found: RunImport) -> list[tuple[str, str]]:
    """Return what a reviewer says of an imported run: sentences behind their level, errors first."""
    run = found.run
    kinds = (ASSUMED, DEPRECATED, f"the {run.engine} engine:", "the plan may fit")
    findings = [("warning", note) for note in found.notes if note.startswith(kinds)]
    if run.num_steps is not None and (warm := run.optimizer.warmup_steps) >= run.num_steps:
        findings.append(("warning", f"{warm} steps of warm-up are not fewer than the run's {run.num_steps}"))
    return sorted([*findings, *_of_plan(run)], key=lambda one: LEVELS.index(one[0]))


def _of_plan(run: Run) -> Iterator[tuple[str, str]]:
    """Yield rules that the plan breaks, its memory, switches that do nothing, and the planner's plan with its gain."""
    try:
        request, answer = request_for(run), explain_run(run)
    except MeshwrightError as error:
        yield "error", error.message
        return
    if run.plan is not None:
        broken = violations(run.plan, context=legality_context(request))
        notes = [str(one) for one in broken if one.severity is not Severity.REFUSED]
        yield from (("warning", note) for note in (*notes, *notes_on_idle_switches(request, run.plan)))
    best = answer.other.plan.describe()
    if answer.obstacle:
        yield "error", answer.obstacle
        yield "advice", f"`plan` takes {best}, with a step of {answer.other.step.step.value:,.2f} s"
    elif answer.difference and answer.difference.step_ms.delta < -LEAST_GAIN * answer.difference.step_ms.winner:
        changes = ", ".join(map(str, answer.difference.changes))
        yield "advice", f"`plan` takes {best} ({changes}): {answer.summary()}"
