"""Models that Meshwright knows by name."""

from __future__ import annotations

import re
from functools import cache

from meshwright.catalog.entries import CatalogKind, by_name, entry, names
from meshwright.errors import UnknownNameError
from meshwright.files import record_of
from meshwright.specs.model import Model


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


_TUNED = re.compile(r"(-(instruct|chat|it|hf|base|bnb-4bit|\d{4}))+$")
"""Ends of the names of repositories with other weights of the same shapes."""


def model_like(repository: str) -> str | None:
    """Return the name of the model whose name a repository of any owner has; None: the catalogue has no such model.

    Copies and fine-tuned models are called like the model whose shapes they have.

    >>> [model_like(name) for name in ("NousResearch/Llama-3.2-1B", "meta-llama/Meta-Llama-3-8B-Instruct", "me/mine")]
    ['llama3.2-1b', 'llama3-8b', None]
    """
    name = _TUNED.sub("", repository.rpartition("/")[2].lower()).removeprefix("meta-")
    try:
        return entry(CatalogKind.MODEL, name).name
    except UnknownNameError:
        return None


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
    return record_of(Model, found.values, name=found.name)
