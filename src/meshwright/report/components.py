"""Names and families of a step's components: one vocabulary for tables, figures and pages.

`specs.estimate.StepEstimate.components_s` says which seconds; here stands what to call them and to which of
five families they belong. A family answers "what bounds this plan".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class ComponentFamily(StrEnum):
    """What a device does with the time."""

    MATRIX = "compute"  # matrix products and attention
    MEMORY = "memory traffic"  # kernels bound by memory bandwidth
    COMMUNICATION = "communication"  # what no computation hides
    RECOMPUTATION = "recomputation"
    WAITING = "waiting"


@dataclass(frozen=True, kw_only=True)
class Component:
    """One part of a step."""

    label: str
    family: ComponentFamily


COMPONENTS: dict[str, Component] = {
    key: Component(label=label, family=family)
    for key, label, family in (
        ("attention_gemm", "attention projections", ComponentFamily.MATRIX),
        ("attention_core", "attention", ComponentFamily.MATRIX),
        ("ffn", "feed-forward", ComponentFamily.MATRIX),
        ("experts", "experts", ComponentFamily.MATRIX),
        ("head", "head and loss", ComponentFamily.MATRIX),
        ("router", "router", ComponentFamily.MEMORY),
        ("elementwise", "element-wise", ComponentFamily.MEMORY),
        ("accumulation", "gradient accumulation", ComponentFamily.MEMORY),
        ("optimizer", "optimizer", ComponentFamily.MEMORY),
        ("recompute", "recomputation", ComponentFamily.RECOMPUTATION),
        ("tensor_parallel", "tensor parallel", ComponentFamily.COMMUNICATION),
        ("context_parallel", "context parallel", ComponentFamily.COMMUNICATION),
        ("expert_parallel", "expert parallel", ComponentFamily.COMMUNICATION),
        ("gather", "parameter gather", ComponentFamily.COMMUNICATION),
        ("hooks", "hooks around layers", ComponentFamily.WAITING),
        ("data_parallel", "gradient reduction", ComponentFamily.COMMUNICATION),
        ("bubble", "bubble", ComponentFamily.WAITING),
        ("host", "host", ComponentFamily.WAITING),
        ("fixed", "fixed costs", ComponentFamily.WAITING),
        ("stragglers", "stragglers", ComponentFamily.WAITING),
        ("power_limit", "power limit", ComponentFamily.WAITING),
    )
}
"""In the order in which a step is told: what computes, what it costs to divide it, what waits."""

NEGLIGIBLE_RATIO = 5e-4
"""Components below this share of the step are left out of tables and figures."""

NOTEWORTHY_RATIO = 0.03
"""A component outside matrix products is named beside the bound from this share of the step."""


def label(name: str) -> str:
    """What to call a component.

    >>> label("ffn"), label("something_new")
    ('feed-forward', 'something new')
    """
    known = COMPONENTS.get(name)
    return known.label if known else name.replace("_", " ")


def family(name: str) -> ComponentFamily:
    """The family of a component; one that is not listed waits."""
    known = COMPONENTS.get(name)
    return known.family if known else ComponentFamily.WAITING


def shown_components(components_s: Mapping[str, float]) -> dict[str, float]:
    """The components that matter, in the order of `COMPONENTS`. Seconds in, seconds out."""
    total = sum(components_s.values())
    order = {name: i for i, name in enumerate(COMPONENTS)}
    names = sorted(components_s, key=lambda name: order.get(name, len(order)))
    return {n: components_s[n] for n in names if abs(components_s[n]) > NEGLIGIBLE_RATIO * total}


def by_family(components_s: Mapping[str, float]) -> dict[ComponentFamily, float]:
    """Seconds of each family, largest first."""
    sums = dict.fromkeys(ComponentFamily, 0.0)
    for name, seconds in components_s.items():
        sums[family(name)] += seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def bound_by(components_s: Mapping[str, float]) -> str:
    """What bounds a step: its largest family, and the largest component outside matrix products.

    >>> bound_by({"ffn": 0.8, "bubble": 0.15, "elementwise": 0.05})
    'compute 80 %, bubble 15 %'
    """
    largest, seconds = next(iter(by_family(components_s).items()))
    text = [f"{largest.value} {100 * seconds / sum(components_s.values()):.0f} %"]
    other = largest_other(components_s)
    return ", ".join(text if other is None else [*text, other])


def largest_other(components_s: Mapping[str, float]) -> str | None:
    """The largest component outside matrix products with its share; None when it is not worth a word.

    >>> largest_other({"ffn": 0.98, "bubble": 0.02}) is None
    True
    """
    total = sum(components_s.values())
    others = {n: s for n, s in components_s.items() if family(n) is not ComponentFamily.MATRIX}
    name = max(others, key=others.__getitem__, default=None)
    if name is None or others[name] < NOTEWORTHY_RATIO * total:
        return None
    return f"{label(name)} {100 * others[name] / total:.0f} %"
