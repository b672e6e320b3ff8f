"""Names and families of a step's components: one vocabulary for tables, figures and pages.

`specs.estimate.StepEstimate.components_s` has the seconds; this table has the label and the family of each
component. The largest family bounds the plan.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class ComponentFamily(StrEnum):
    """Use of a device's time."""

    MATRIX = "compute"  # GEMMs and attention
    MEMORY = "memory traffic"  # kernels bound by memory bandwidth
    COMMUNICATION = "communication"  # exposed: not hidden behind computation
    RECOMPUTATION = "recomputation"
    WAITING = "waiting"


@dataclass(frozen=True, kw_only=True)
class Component:
    """One part of a step."""

    label: str
    family: ComponentFamily


COMPONENTS = {
    key: Component(label=row["label"], family=ComponentFamily(row["family"]))
    for key, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
"""In reading order: computation, the communication that sharding costs, waiting."""

NEGLIGIBLE_RATIO = 5e-4
"""Components below this share of the step are not shown in tables and figures."""

NOTEWORTHY_RATIO = 0.03
"""A component outside GEMMs is named with the bound from this share of the step."""


def label(name: str) -> str:
    """Label of a component.

    >>> label("ffn"), label("something_new")
    ('feed-forward', 'something new')
    """
    known = COMPONENTS.get(name)
    return known.label if known else name.replace("_", " ")


def family(name: str) -> ComponentFamily:
    """The family of a component; an unknown one counts as waiting."""
    known = COMPONENTS.get(name)
    return known.family if known else ComponentFamily.WAITING


def shown_components(components_s: Mapping[str, float]) -> dict[str, float]:
    """The components that matter, in the order of `COMPONENTS`. Seconds in, seconds out."""
    total = sum(components_s.values())
    order = {name: i for i, name in enumerate(COMPONENTS)}
    names = sorted(components_s, key=lambda name: order.get(name, len(order)))
    return {n: components_s[n] for n in names if abs(components_s[n]) > NEGLIGIBLE_RATIO * total}


def shown_details(details: Mapping[str, float], *, total: float) -> dict[str, float]:
    """Names of a part that are not negligible beside `total`; {} where there is one name, which says no more.

    >>> shown_details({"logits": 2.0, "sum": 1.0, "copies": 0.0}, total=10.0)
    {'logits': 2.0, 'sum': 1.0}
    """
    shown = {name: value for name, value in details.items() if abs(value) > NEGLIGIBLE_RATIO * total}
    return shown if len(shown) > 1 else {}


def by_family(components_s: Mapping[str, float]) -> dict[ComponentFamily, float]:
    """Seconds of each family, largest first."""
    sums = dict.fromkeys(ComponentFamily, 0.0)
    for name, seconds in components_s.items():
        sums[family(name)] += seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def bound_by(components_s: Mapping[str, float]) -> str:
    """Bound of a step: its largest family, and the largest component outside GEMMs.

    >>> bound_by({"ffn": 0.8, "bubble": 0.15, "elementwise": 0.05})
    'compute 80 %, bubble 15 %'
    """
    largest, seconds = next(iter(by_family(components_s).items()))
    text = [f"{largest.value} {100 * seconds / sum(components_s.values()):.0f} %"]
    other = largest_other(components_s)
    return ", ".join(text if other is None else [*text, other])


def largest_other(components_s: Mapping[str, float]) -> str | None:
    """The largest component outside GEMMs with its share; None when it is small.

    >>> largest_other({"ffn": 0.98, "bubble": 0.02}) is None
    True
    """
    total = sum(components_s.values())
    others = {n: s for n, s in components_s.items() if family(n) is not ComponentFamily.MATRIX}
    name = max(others, key=others.__getitem__, default=None)
    if name is None or others[name] < NOTEWORTHY_RATIO * total:
        return None
    return f"{label(name)} {100 * others[name] / total:.0f} %"
