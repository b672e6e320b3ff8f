"""Models that Meshwright knows by name."""

from __future__ import annotations

from functools import cache

from meshwright.catalog.entries import CatalogKind, by_name, entry, names
from meshwright.specs.model import Attention, AttentionKind, Experts, Model, Rope, RopeScaling, Router


def model_names() -> tuple[str, ...]:
    """Names of all models in the catalogue."""
    return names(CatalogKind.MODEL)


@by_name
@cache
def model(name: str) -> Model:
    """The model `name` (or one of its aliases).

    Raises UnknownNameError with the nearest known name.

    >>> model("llama3-8b").num_layers
    32
    >>> model("LLAMA3.1_405B").name
    'llama3.1-405b'
    """
    found = entry(CatalogKind.MODEL, name)
    values = dict(found.values)
    attention = dict(values.pop("attention"))
    experts = values.pop("experts", None)
    rope = dict(values.pop("rope", {}))
    return Model(
        name=found.name,
        attention=Attention(kind=AttentionKind(attention.pop("kind", AttentionKind.GQA)), **attention),
        experts=None if experts is None else _experts(dict(experts)),
        rope=Rope(scaling=RopeScaling(rope.pop("scaling", RopeScaling.NONE)), **rope),
        **values,
    )


def _experts(values: dict) -> Experts:
    return Experts(router=Router(values.pop("router", Router.SOFTMAX)), **values)
