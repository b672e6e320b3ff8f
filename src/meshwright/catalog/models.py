"""Models that Meshwright knows by name."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache

from meshwright.catalog.entries import CatalogKind, by_name, entry, names, normal_name
from meshwright.errors import UnknownNameError
from meshwright.files import record_of
from meshwright.specs.model import Model

MOST_SIMILAR = 6
"""Names of models that a hint lists."""


def model_names() -> tuple[str, ...]:
    """Names of all models in the catalogue."""
    return names(CatalogKind.MODEL)


_REPOSITORY = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/blob/")
MIRRORS = (
    "ai-modelscope", "axolotl-ai-co", "axolotl-quants", "hugging-quants", "llm-research", "lmstudio-community",
    "mistral-community", "mlx-community", "modelscope", "neuralmagic", "nousresearch", "openai-mirror", "redhatai",
    "shanghai_ai_laboratory", "thebloke", "unsloth", "zhipuai",
)  # fmt: skip
"""Owners on model hubs that publish the models of others under their names, also in formats of fewer bits."""
_STORED = re.compile(
    r"-(bnb|[248]bit|1x16|(nv|mx)?fp\d+|f16|bf16|nf4|int[48]|w\da\d+|gptq|awq|aqlm|gg(uf|ml)|mlx|quantized(\.w\da\d+)?|dynamic|"
    r"unsloth|linearized)(?=-|$)"
)
"""Words in the names of repositories that have the weights in another format."""
_TRAINED = re.compile(r"-(instruct|chat|it|base|pt|hf|sft|dpo|rl|thinking|reasoning|deduped|uncensored)(?=-|$)")
"""Words in the names of repositories with other weights of the same shapes."""


@cache
def _repositories() -> dict[str, str]:
    """Names of models by the repositories of the hub whose config.json has their shapes, in small letters."""
    return {repository.lower(): name for name in model_names() for repository in repositories_of(name)}


def repositories_of(name: str) -> tuple[str, ...]:
    """Return the repositories of the hub, OWNER/NAME, whose config.json has the shapes of the model `name`.

    >>> "meta-llama/Llama-3.1-8B" in repositories_of("llama3.1-8b")
    True
    """
    one = entry(CatalogKind.MODEL, name)
    return (*one.repositories, *(r for source in one.sources.values() for r in _REPOSITORY.findall(source)))


def own_repository(name: str) -> str | None:
    """Return the repository of the hub that is called like the model `name`; None where the catalogue knows none.

    Others have the same shapes, and weights of their own.
    """
    called = (r for r in repositories_of(name) if name.replace("-", "") in r.lower().replace("-", ""))
    return min(called, key=lambda repository: len(repository.partition("/")[2]), default=None)


def model_of_repository(repository: str) -> str | None:
    """Return the name of the model of OWNER/NAME on the Hugging Face hub; None: it is not in the catalogue.

    The other repositories of a model's owner, and of those that mirror it, are known by their names.

    >>> [model_of_repository(name) for name in ("meta-llama/Llama-3.1-8B", "deepseek-ai/DeepSeek-R1", "me/mine")]
    ['llama3.1-8b', 'deepseek-v3', None]
    >>> model_of_repository("unsloth/Qwen2.5-14B-Instruct-bnb-4bit")
    'qwen2.5-14b'
    """
    known = _repositories()
    if (exact := known.get(repository.lower())) is not None:
        return exact
    owner, named = repository.lower().partition("/")[0], model_like(repository)
    is_owner = owner in MIRRORS or any(v == named and k.startswith(f"{owner}/") for k, v in known.items())
    return named if is_owner else None


def model_like(repository: str) -> str | None:
    """Return the name of the model whose name a repository of any owner has; None: the catalogue has no such model.

    Copies and fine-tuned models are called like the model whose shapes they have.

    >>> [model_like(name) for name in ("me/Llama-3.2-1B", "me/Meta-Llama-3-8B-Instruct-GPTQ", "me/mine")]
    ['llama3.2-1b', 'llama3-8b', None]
    """
    name = repository.rpartition("/")[2].lower().removeprefix("meta-")
    stored = _STORED.sub("", name)
    trained = _TRAINED.sub("", stored)
    undated, unversioned = re.sub(r"-\d{4}(?=-|$)", "", trained), re.sub(r"-v\d+(\.\d+)?$", "", trained)
    for candidate in (name, stored, trained, undated, unversioned):
        with suppress(UnknownNameError):
            return entry(CatalogKind.MODEL, candidate).name
    return None


def stored_as(repository: str) -> tuple[str, ...]:
    """Return the parts of the name OWNER/NAME that state a format of its weights.

    >>> stored_as("unsloth/Qwen2.5-14B-bnb-4bit"), stored_as("Qwen/Qwen3-32B-FP8"), stored_as("Qwen/Qwen3-32B")
    (('bnb', '4bit'), ('fp8',), ())
    """
    marks = (found[1] for found in _STORED.finditer(repository.lower().partition("/")[2]))
    return tuple(mark for mark in marks if mark not in ("unsloth", "dynamic", "linearized", "mlx"))


def models_like(name: str) -> list[str]:
    """Names of models that are called `name` with other hyphens or marks of training, or else that begin with it.

    >>> models_like("gemma-3-27b-it"), models_like("qwen3-30b")
    (['gemma3-27b'], ['qwen3-30b-a3b'])
    """
    stem = _TRAINED.sub("", normal_name(name))
    equal = [known for known in model_names() if known.replace("-", "") == stem.replace("-", "")]
    return equal or [known for known in model_names() if known.startswith(f"{stem}-")]


@by_name
@cache
def model(name: str) -> Model:
    """The model `name`, one of its aliases, or the beginning of a name that one model alone has.

    Raises UnknownNameError with the nearest known names.

    >>> model("llama3-8b").num_layers
    32
    >>> model("LLAMA3.1_405B").name, model("qwen3-235b").name
    ('llama3.1-405b', 'qwen3-235b-a22b')
    """
    try:
        found = entry(CatalogKind.MODEL, name)
    except UnknownNameError as error:
        similar = models_like(name)
        if len(similar) > 1:
            more = f" and {len(similar) - MOST_SIMILAR} more" if len(similar) > MOST_SIMILAR else ""
            error.hint = f"did you mean one of {', '.join(similar[:MOST_SIMILAR])}{more}?"
        if len(similar) != 1:
            raise
        found = entry(CatalogKind.MODEL, similar[0])
    return record_of(Model, found.values, name=found.name)
