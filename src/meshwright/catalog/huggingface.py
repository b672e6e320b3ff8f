"""Models from a Hugging Face `config.json`.

`catalog.families` has a record for each architecture, with the function that turns the file's keys into shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.catalog.config_keys import ConfigKeys
from meshwright.catalog.families import FAMILIES, NOT_READ
from meshwright.errors import InputError
from meshwright.hub import fetch
from meshwright.json_values import load_json
from meshwright.specs.model import Model, reward_model
from meshwright.specs.model_parts import (
    full_layer_problems,
    linear_problems,
    parallel_problems,
    pattern_problems,
    sparse_problems,
)


def model_from_path(path: str | Path) -> Model:
    """The model of a `config.json`, or of the folder that holds one.

    It is named after the folder, or after the file where that has another name.

    Raises InputError when there is no such file, it is not JSON, or `model_from_config` refuses it.
    """

    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = load_json(file)
    except OSError as error:
        raise InputError(f"cannot read the model's config: {error.strerror or error}", got=str(file)) from error
    except ValueError as error:  # undecodable text, malformed or endlessly nested JSON
        raise InputError(f"the model's config is not JSON: {error}", got=str(file)) from error
    place = file.resolve()
    return model_from_config(config, name=place.parent.name if place.name == "config.json" else place.stem)


def model_from_hub(name: str) -> Model:
    """The model of a repository on the Hugging Face hub, OWNER/NAME[@REVISION], from its config.json.

    Raises InputError when the hub does not provide it, or `model_from_config` refuses it.
    """
    return replace(model_from_path(hub_folder(name)), name=name.rpartition("/")[2].partition("@")[0])


def hub_folder(name: str) -> Path:
    """The folder of a repository's config.json. Raises InputError when the hub does not provide it."""
    return fetch(name, patterns=["config.json"], what="the model's config.json")


SCORES_TEXTS, WRITES_TEXTS = "ForSequenceClassification", "ForCausalLM"
"""Ends of transformers' architectures."""


def model_from_config(config: Mapping[str, Any], *, name: str) -> Model:
    """The model that a Hugging Face config describes.

    Raises InputError for an architecture without a reader (it lists those with one) and for a missing or
    impossible key (it names the key).
    """
    if not isinstance(config, Mapping):
        raise InputError(f"{name}: a config is a JSON object", got=type(config).__name__)
    architectures = config.get("architectures") or []
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    scores = False
    if isinstance(architecture, str) and (scores := architecture.endswith(SCORES_TEXTS)):
        architecture = architecture.replace(SCORES_TEXTS, WRITES_TEXTS)
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if isinstance(architecture, str) and architecture in NOT_READ:
        raise InputError(
            f"{name}: {architecture} is not read, because it has {NOT_READ[architecture]}", got=architecture,
            hint="shapes near it can be planned inline: model.attention, model.experts; hybrids with one block a layer "
            "by model.layer_pattern and model.state_space",
        )  # fmt: skip
    if not architectures:
        found = [f.architecture for f in FAMILIES.values() if f.model_type == config.get("model_type")]
        raise InputError(
            f"{name}: its config.json names no architecture", got=f"model_type {config.get('model_type')}",
            hint=f"add architectures: [{found[0]}]" if len(found) == 1 else _way_on(config),
        )  # fmt: skip
    if family is None:
        allowed = ", ".join(sorted(FAMILIES))
        unknown = f"{name}: unknown architecture"
        raise InputError(unknown, got=architecture, allowed=allowed, hint=_way_on(config))
    keys = ConfigKeys(config, name=name)
    model = family.read(keys)
    _check(model)
    model = replace(model, name=name, family=family.architecture, unsupported=keys.unsupported())
    if not scores:
        return model
    classes = config.get("id2label")
    num = len(classes) if isinstance(classes, Mapping) else config.get("num_labels", 2)  # transformers' default
    if num != 1:
        raise InputError(f"{name}: a model of classes is not read", got=f"{num} labels", allowed="a reward model's one")
    return reward_model(model)


def _way_on(config: Mapping[str, Any]) -> str:
    """Hint for an architecture without a reader: the language part of a model with images, else its shapes."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return "plan it by its shapes: model.hidden, model.num_layers, model.attention, ... in a run file"
    known = [f.architecture for f in FAMILIES.values() if f.model_type == text.get("model_type")]
    family = known[0] if known else "one that is read"
    return f"its language part is text_config: save that as a config.json of its own, with architectures: [{family}]"


def architectures() -> tuple[str, ...]:
    """Every architecture whose config can be read."""
    return tuple(sorted(FAMILIES))


def _check(model: Model) -> None:
    a, x = model.attention, model.experts
    if found := list(pattern_problems(model)):
        raise InputError("; ".join(found), got=model.layer_pattern)
    if found := list(sparse_problems(model)):
        raise InputError("; ".join(found), got=model.name)
    if found := [*linear_problems(model), *full_layer_problems(model), *parallel_problems(model)]:
        raise InputError(f"{model.name}: {'; '.join(found)}")
    if a.head_dim < 1:
        raise InputError("more heads than the hidden size", got=a.num_heads, allowed=f"1 to {model.hidden}")
    if a.num_heads % a.num_kv_heads:
        raise InputError("query heads are not a multiple of key/value heads", got=f"{a.num_heads} and {a.num_kv_heads}")
    if x is not None and x.top_k > x.num_experts:
        raise InputError("experts per token exceed the experts", got=x.top_k, allowed=f"1 to {x.num_experts}")
    if x is not None and x.num_dense_layers > model.num_layers:
        raise InputError("more dense layers than layers", got=x.num_dense_layers, allowed=f"0 to {model.num_layers}")
