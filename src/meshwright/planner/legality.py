"""Legality: the plans that an engine accepts, for one plan and for a million.

`legal_mask` evaluates the rules of `planner.rules` over a whole table, `violations` turns those that fail for
one plan into sentences. Both read the same rules, so "why not TP=8" has the answer that the search acted on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.stages import layers_per_stage
from meshwright.cost.tables import PlanTable, plan_row
from meshwright.planner.engines import LegalityContext, Scope, Severity, engine_facts
from meshwright.planner.request import PlanRequest
from meshwright.planner.rules import rules_of
from meshwright.specs.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One rule that one plan breaks."""

    rule: str
    message: str
    severity: Severity = Severity.REFUSED

    def __str__(self) -> str:
        return self.message


def legality_context(request: PlanRequest) -> LegalityContext:
    """The legality context of a request."""
    return LegalityContext(
        model=request.model_table,
        batch=request.batch_table,
        num_devices=request.num_devices,
        domain=request.cluster.fabric.scale_up_domain,
        facts=engine_facts(request.engine),
    )


def legal_mask(plan: PlanTable, *, context: LegalityContext, scope: Scope | None = None) -> NDArray[np.bool_]:
    """True for rows that break no rule of `scope` (None: of any scope) that refuses."""
    legal = np.ones(np.shape(plan.tensor), dtype=bool)
    for rule in rules_of(context.facts):
        if scope in (None, rule.scope) and rule.severity is Severity.REFUSED:
            legal &= np.asarray(rule.holds(context, plan), dtype=bool)
    return legal


def violations(plan: Plan, *, context: LegalityContext) -> list[Violation]:
    """Every rule that `plan` breaks, refusals first. Empty: the engine accepts it.

    A split of layers that the cost model would not follow is refused as well.
    """
    row = plan_row(plan)
    broken = [r for r in rules_of(context.facts) if not bool(r.holds(context, row))]
    found = [Violation(rule=r.name, message=r.says(context, row), severity=r.severity) for r in broken]
    found += _layer_split(plan, context=context)
    return sorted(found, key=lambda v: v.severity is not Severity.REFUSED)


def _layer_split(plan: Plan, *, context: LegalityContext) -> list[Violation]:
    """`layers_per_stage` must be the split that is costed: equal stages, what is left on the two ends."""
    given = plan.layers_per_stage
    if given is None:
        return []
    costed = layers_per_stage(int(context.model.num_layers), plan.pipeline * plan.virtual_pipeline)
    mirrored = costed[::-1]  # the last stage also holds the head, so an odd layer may lie on either end
    if given in (costed, mirrored):
        return []
    message = (
        f"layers_per_stage {_listed(given)} cannot be estimated yet, only {_listed(costed)}: leave it out"
    )
    return [Violation(rule="layers per stage", message=message)]


def _listed(counts: tuple[int, ...]) -> str:
    """[10, 11 x 6, 10]: neighbours that are equal once, with their number."""
    groups = [(count, len(list(group))) for count, group in groupby(counts)]
    return f"[{', '.join(str(c) if n == 1 else f'{c} x {n}' for c, n in groups)}]"


def broken_rules(plan: PlanTable, *, context: LegalityContext) -> NDArray[np.int64]:
    """Number of refusing rules that each row breaks."""
    broken = np.zeros(np.shape(plan.tensor), dtype=np.int64)
    for rule in rules_of(context.facts):
        if rule.severity is Severity.REFUSED:
            broken += ~np.asarray(rule.holds(context, plan), dtype=bool)
    return broken
