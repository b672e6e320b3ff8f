"""Switches of published performance recipes (`recipes.toml`), for rows of the tables that were measured with them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from meshwright.accuracy.shipped import published_recipes
from meshwright.catalog.stacks import features_from
from meshwright.specs.features import CudaGraphs, Dispatcher, Features


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Switches of one recipe of one release."""

    stack: str
    since: float
    models: tuple[str, ...]  # empty: all
    accelerators: tuple[str, ...]
    precisions: tuple[str, ...]  # empty: all
    features: Features
    recompute: str  # as rows state it; empty: none, or not known
    precision: str  # of rows that state none; empty: not known
    tensor: int  # degree of rows that print none; 0: not known
    splits_experts: bool  # single experts over the tensor ranks, where a row prints no width


_WITHOUT_DEPTH = re.compile(r"-\d+-layers$")
"""A model with another number of layers than its own trains with the same recipe."""

_OFF = Features(
    cuda_graphs=CudaGraphs.NONE,
    dispatcher=Dispatcher.ALL_TO_ALL,
    overlaps_experts=False,
    drops_tokens=False,
    fuses_experts=False,
    fp8_attention=False,
)
"""Switches of a recipe that states none."""


def recipe_for(
    *, source: str, stack: str, vintage: float | None, model: str, accelerator: str, precision: str
) -> Recipe | None:
    """The last recipe up to `vintage` (decimal year) for these names; None where none is known.

    source: the row's. Only the pages of a recipe's own project were measured with it.
    """
    if not any(page in source for page in published_recipes()["pages"].get(stack, ())):
        return None
    found = [
        recipe
        for recipe in _recipes()
        if recipe.stack == stack
        and recipe.since <= (vintage or 0.0)
        and (not recipe.models or _WITHOUT_DEPTH.sub("", model) in recipe.models)
        and accelerator in recipe.accelerators
        and (not recipe.precisions or precision in recipe.precisions)
    ]
    return max(found, key=lambda r: (r.since, bool(r.precisions), -len(r.models)), default=None)


@cache
def _recipes() -> tuple[Recipe, ...]:
    return tuple(_recipe(entry) for entry in published_recipes()["recipe"])


def _recipe(entry: dict[str, Any]) -> Recipe:
    switches = {k: v for k, v in entry.items() if k in Features.__dataclass_fields__}
    return Recipe(
        stack=entry["stack"],
        since=entry["since"],
        models=tuple(entry["models"]),
        accelerators=tuple(entry["accelerators"]),
        precisions=tuple(entry.get("precisions", ())),
        features=features_from(switches).or_else(_OFF),
        recompute=entry.get("recompute", ""),
        precision=entry.get("precision", ""),
        tensor=entry.get("tensor", 0),
        splits_experts=entry.get("splits_experts", False),
    )
