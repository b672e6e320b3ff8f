"""Which plans an engine accepts, for one plan and for a million.

`legal_mask` evaluates the rules of `planner.rules` over a whole table, `violations` turns those that fail for
one plan into sentences. Both read the same rules, so "why not TP=8" has the answer that the search acted on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.tables import PlanTable, plan_row
from meshwright.planner.engines import engine_facts
from meshwright.planner.request import PlanRequest
from meshwright.planner.rules import RULES, Rule, Scope, Setting, Severity
from meshwright.specs.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One rule that one plan breaks."""

    rule: str
    message: str
    severity: Severity = Severity.REFUSED

    def __str__(self) -> str:
        return self.message


def setting_for(request: PlanRequest) -> Setting:
    """The setting of a request."""
    return Setting(
        model=request.model_table,
        batch=request.batch_table,
        num_devices=request.num_devices,
        domain=request.cluster.fabric.scale_up_domain,
        facts=engine_facts(request.engine),
    )


def legal_mask(plan: PlanTable, *, setting: Setting, scope: Scope | None = None) -> NDArray[np.bool_]:
    """True for rows that break no rule of `scope` (None: of any scope) that refuses."""
    legal = np.ones(np.shape(plan.tensor), dtype=bool)
    for rule in RULES:
        if _applies(rule, setting) and scope in (None, rule.scope) and rule.severity is Severity.REFUSED:
            legal &= np.asarray(rule.holds(setting, plan), dtype=bool)
    return legal


def violations(plan: Plan, *, setting: Setting) -> list[Violation]:
    """Every rule that `plan` breaks, refusals first. Empty: the engine accepts it."""
    row = plan_row(plan)
    broken = [r for r in RULES if _applies(r, setting) and not bool(r.holds(setting, row))]
    found = [Violation(rule=r.name, message=r.says(setting, row), severity=r.severity) for r in broken]
    return sorted(found, key=lambda v: v.severity is not Severity.REFUSED)


def broken_rules(plan: PlanTable, *, setting: Setting) -> NDArray[np.int64]:
    """How many rules that refuse each row breaks."""
    broken = np.zeros(np.shape(plan.tensor), dtype=np.int64)
    for rule in RULES:
        if _applies(rule, setting) and rule.severity is Severity.REFUSED:
            broken += ~np.asarray(rule.holds(setting, plan), dtype=bool)
    return broken


def _applies(rule: Rule, setting: Setting) -> bool:
    return setting.facts.engine in rule.engines
