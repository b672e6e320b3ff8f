"""From a request to ranked plans: the choices, their legality, their memory, their speed, and the reasons.

space     which values each axis may take               legality  which combinations an engine accepts
screen    memory and a lower bound of step time         search    best first, exact
objective the quantity to optimize                       explain   why this plan, why not that one
"""

from meshwright.planner.engines import EngineFacts, LegalityContext, Rule, Scope, Severity, engine_facts
from meshwright.planner.explain import (
    Infeasible,
    PlanComparison,
    WhyNot,
    compare,
    explain_infeasible,
    nearest_losers,
    why_not,
)
from meshwright.planner.legality import Violation, violations
from meshwright.planner.request import PlanRequest, request_for
from meshwright.planner.search import Counts, PlanResult, RankedPlan, search
from meshwright.planner.space import RecomputeChoice, Space, default_space
