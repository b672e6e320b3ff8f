"""The layout that a vendor ships for a model, beside the planner's best one."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.accuracy.shipped import ShippedLayout, shipped_layout
from meshwright.planner import PlanComparison, PlanRequest, RankedPlan, search
from meshwright.planner.explain import compare
from meshwright.planner.objective import Goal


@dataclass(frozen=True, kw_only=True)
class PublishedGap:
    """A published layout and the best plan with its degrees; None: no such plan is legal here and fits."""

    layout: ShippedLayout
    comparison: PlanComparison | None

    def __str__(self) -> str:
        names = {"tensor": "TP", "context": "CP", "expert": "EP", "pipeline": "PP"}
        widths = " ".join(f"{name}{self.layout.degrees[key]}" for key, name in names.items())
        theirs = f"{self.layout.framework} has {widths} on {self.layout.num_devices:,} devices"
        if self.comparison is None:
            return f"{theirs}: no plan with these degrees is legal here and fits"
        loser, cause = self.comparison.loser, self.comparison.decided_by
        ratio = loser.step_s / self.comparison.winner.step_s - 1
        return f"{theirs}: {ratio:+.1%} a step as {loser.plan.describe()}, {cause.name} {cause.delta:+.1f} ms decides"


def published_gap(request: PlanRequest, best: RankedPlan, *, goal: Goal) -> PublishedGap | None:
    """Return by how much the published layout of the model is behind `best`, and why.

    None where the catalogue has none, or `best` has its degrees or is no better.
    """
    layout = shipped_layout(request.model.name, request.cluster.accelerator.name)
    if layout is None or request.lora is not None or request.cluster.parts:
        return None
    if all(getattr(best.plan, name) == width for name, width in layout.degrees.items()):
        return None
    found = search(request.fixing(**layout.degrees), top=1, goal=goal, wants_least=False).best
    if found is not None and found.rank <= best.rank:
        return None
    usable = request.usable_bytes
    return PublishedGap(layout=layout, comparison=found and compare(best, found, usable_bytes=usable))
