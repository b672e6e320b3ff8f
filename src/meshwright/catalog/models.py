"""Models that Meshwright knows by name."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from meshwright.catalog.entries import CatalogKind, by_name, entry, names
from meshwright.errors import UnknownNameError
from meshwright.specs.model import (
    Activation,
    Attention,
    AttentionKind,
    Experts,
    FullLayers,
    LinearAttention,
    LinearKind,
    Model,
    NormPlacement,
    Rope,
    RopeScaling,
    Router,
    StateSpace,
)
from meshwright.specs.sparse_attention import Compression, Indexer


def model_names() -> tuple[str, ...]:
    """Names of all models in the catalogue."""
    return names(CatalogKind.MODEL)


_REPOSITORY = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/blob/")


@cache
def _repositories() -> dict[str, str]:
    """Names of models by the repository of the hub from whose config.json they were read, in small letters."""
    found = {}
    for name in model_names():
        for source in entry(CatalogKind.MODEL, name).sources.values():
            found.update({repository.lower(): name for repository in _REPOSITORY.findall(source)})
    return found


def model_of_repository(repository: str) -> str | None:
    """Return the name of the model of OWNER/NAME on the Hugging Face hub; None: it is not in the catalogue.

    The owner's other repositories are known by the aliases of their models.

    >>> [model_of_repository(name) for name in ("meta-llama/Llama-3.1-8B", "deepseek-ai/DeepSeek-R1", "me/mine")]
    ['llama3.1-8b', 'deepseek-v3', None]
    """
    known = _repositories()
    if (exact := known.get(repository.lower())) is not None:
        return exact
    owner, _, name = repository.lower().partition("/")
    try:
        named = entry(CatalogKind.MODEL, name).name
    except UnknownNameError:
        return None
    return named if any(v == named and k.startswith(f"{owner}/") for k, v in known.items()) else None


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
    windowed_rope, state_space = values.pop("windowed_rope", None), values.pop("state_space", None)
    linear = values.pop("linear_attention", None)
    return Model(
        name=found.name,
        attention=_attention(attention),
        experts=None if experts is None else _experts(dict(experts)),
        rope=_rope(dict(values.pop("rope", {}))),
        state_space=None if state_space is None else StateSpace(**state_space),
        linear_attention=None if linear is None else _linear_attention(dict(linear)),
        windowed_rope=None if windowed_rope is None else _rope(dict(windowed_rope)),
        activation=Activation(values.pop("activation", Activation.SILU)),
        norm_placement=NormPlacement(values.pop("norm_placement", NormPlacement.BEFORE)),
        **values,
    )


def _attention(values: dict) -> Attention:
    kind = AttentionKind(values.pop("kind", AttentionKind.GQA))
    indexer, compression = values.pop("indexer", None), values.pop("compression", None)
    full = values.pop("full_layers", None)
    return Attention(
        kind=kind,
        window_pattern=tuple(values.pop("window_pattern", ())),
        indexer=None if indexer is None else Indexer(**indexer),
        compression=None if compression is None else _compression(dict(compression)),
        full_layers=None if full is None else FullLayers(**full),
        **values,
    )


def _compression(values: dict) -> Compression:
    return Compression(strides=tuple(values.pop("strides")), **values)


def _linear_attention(values: dict) -> LinearAttention:
    kind, pattern = LinearKind(values.pop("kind", LinearKind.GDN)), values.pop("pattern", None)
    linear = LinearAttention(kind=kind, **values)
    return linear if pattern is None else replace(linear, pattern=tuple(pattern))


def _rope(values: dict) -> Rope:
    factors = {name: tuple(values.pop(name, ())) for name in ("short_factors", "long_factors")}
    return Rope(scaling=RopeScaling(values.pop("scaling", RopeScaling.NONE)), **factors, **values)


def _experts(values: dict) -> Experts:
    return Experts(router=Router(values.pop("router", Router.SOFTMAX)), **values)
