"""Read and write `adapter_config.json` of PEFT's LoRA adapters; keys that cannot be followed are refused.

A pattern of ranks or alphas is a regular expression of the last parts of a module's name; the first match counts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.catalog.family_tensors import MODULES_TO_SAVE
from meshwright.errors import InputError
from meshwright.json_values import load_json
from meshwright.specs.model import Lora

CONFIG = "adapter_config.json"

PREFIX = "base_model.model."
"""Before the names of modules in PEFT's files."""

_READ = (
    "peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora",
    "rank_pattern", "alpha_pattern", "layers_to_transform", "modules_to_save", "ensure_weight_tying",
)  # fmt: skip
_OF_THE_BASE = ("base_model_name_or_path", "revision")  # the caller finds it
_OTHER = (  # records, and settings of training and of methods that other keys choose
    "auto_mapping", "peft_version", "inference_mode", "runtime_config", "eva_config",
    "megatron_core", "qalora_group_size",
)  # fmt: skip
WITHOUT_EFFECT = (*_READ, *_OF_THE_BASE, *_OTHER)
"""Keys of PEFT's config that are read here, or that leave the function of the adapter as it is at any value."""
_PLAIN = {
    "bias": ("none",),
    "layers_pattern": ("layers", ["layers"]),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),  # others change the base
}
"""Values of other keys that leave a plain LoRA adapter, beside null, false and empty ones."""
IN_THE_BASE = ("pissa", "olora")
"""Adapters that begin with a part of the base."""
_MERGE = "merge the adapter with PEFT (merge_and_unload), and use the merged weights"
_PATTERNS = {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}
_NUMBERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda v: isinstance(v, int) and v > 0, "a whole number from 1"),
    "lora_alpha": (lambda v: 0 < v < math.inf, "a number above 0"),
    "lora_dropout": (lambda v: 0 <= v < 1, "a number from 0, below 1"),
}


class AdapterSize(NamedTuple):
    """Rank and alpha of one adapter; its scale is alpha / rank."""

    rank: int
    alpha: float


def read_config(path: Path, *, scores: bool = False, is_plain: bool = True) -> dict[str, Any]:
    """PEFT's config of a plain LoRA adapter, or where not `is_plain` of PiSSA or OLoRA; `scores`: of a reward model.

    Raises InputError for any other, naming the key that makes it one.
    """
    usual = _PLAIN | {"task_type": ("SEQ_CLS" if scores else "CAUSAL_LM",)}
    if not is_plain:
        usual["init_lora_weights"] += IN_THE_BASE
    try:
        config = load_json(path)
        config = {"lora_dropout": 0.0} | config
        kind, names = config["peft_type"], config["target_modules"]
        numbers = {key: config[key] for key in _NUMBERS}
    except OSError as error:
        raise InputError(f"cannot read the adapter: {error.strerror or error}", got=str(path)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"not the config of a LoRA adapter: {error!r}", got=str(path)) from error
    if kind != "LORA":
        raise InputError(f"{path}: the kind of adapter", got=repr(kind), allowed="LORA")
    for key, value in config.items():
        if key not in WITHOUT_EFFECT and value not in (None, False, "", [], {}, *usual.get(key, ())):
            raise InputError(
                f"{path}: {key} makes another function than plain LoRA, or one that is not known here",
                got=f"{key}: {value!r}", allowed=" or ".join(map(repr, (None, *usual.get(key, ())))),
                hint=_MERGE,
            )  # fmt: skip
    for key, value in numbers.items():
        _require_number(key, value, where=f"{path}: {key}")
    for of, patterns in _PATTERNS.items():
        config[patterns] = config.get(patterns) or {}
        if not isinstance(config[patterns], dict):
            raise InputError(f"{path}: {patterns}", got=repr(config[patterns]), allowed="a mapping of names")
        for name, value in config[patterns].items():
            _require_number(of, value, where=f"{path}: {patterns}: {name}")
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise InputError(f"{path}: target_modules", got=repr(names), allowed="a list of names")
    layers = config.get("layers_to_transform")
    chosen = [layers] if type(layers) is int else layers or []
    if not (isinstance(chosen, list) and all(type(layer) is int and layer >= 0 for layer in chosen)):
        raise InputError(f"{path}: layers_to_transform", got=repr(layers), allowed="numbers of layers")
    return config | {"layers_to_transform": chosen}


def _require_number(key: str, value: object, *, where: str) -> None:
    is_inside, allowed = _NUMBERS[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_inside(value):
        raise InputError(where, got=repr(value), allowed=allowed)


def patterns_of(groups: Mapping[str, Mapping[str, AdapterSize]], key: str, *, usual: float) -> dict[str, Any]:
    """The ranks or alphas (`key`) that are not the usual one: one for each group whose members share it."""
    found: dict[str, Any] = {}
    for group, sizes in groups.items():
        values = {member: getattr(size, key) for member, size in sizes.items()}
        shared = set(values.values())
        found |= values if len(shared) > 1 else {group: shared.pop()}
    return {name: value for name, value in found.items() if value != usual}


def size_of(config: Mapping[str, Any], module: str) -> AdapterSize:
    """Rank and alpha of PEFT's adapter of `module`: of the first pattern that matches its name, or the usual ones."""
    rank, alpha = (
        next((value for key, value in config[patterns].items() if _matches(key, module)), config[usual])
        for usual, patterns in _PATTERNS.items()
    )
    return AdapterSize(rank, float(alpha) * (math.sqrt(rank) if config.get("use_rslora") else 1.0))


def _matches(pattern: str, module: str) -> bool:
    """True if PEFT applies the `pattern` of a rank or an alpha to `module`."""
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as error:
        raise InputError(f"adapter_config.json: {error}", got=pattern, allowed="a regular expression") from error


def saved_by(config: Mapping[str, Any], *, is_tied: bool, scores: bool = False) -> tuple[str, ...]:
    """The modules that PEFT trains whole, by our names. Raises InputError for others, and where tied ones part."""
    given = config.get("modules_to_save") or []
    names = {str(name).removeprefix("model.") for name in (given if isinstance(given, list) else [given])}
    if scores:  # PEFT names both heads that such models may have
        names = {{"score": "lm_head"}.get(name, name) for name in names - {"classifier"}}
    if others := names - MODULES_TO_SAVE.keys():
        raise InputError(
            "modules_to_save: makes another function: only embedding and head are trained whole here",
            got=", ".join(sorted(others)), allowed=", ".join(MODULES_TO_SAVE), hint=_MERGE,
        )  # fmt: skip
    if names and is_tied and not config.get("ensure_weight_tying"):
        raise InputError(
            "modules_to_save: makes another function than the tied embeddings of the model",
            got=", ".join(sorted(names)), allowed="ensure_weight_tying: true beside them", hint=_MERGE,
        )  # fmt: skip
    if names and is_tied:
        return ("embedding",)
    return tuple(ours for theirs, ours in MODULES_TO_SAVE.items() if theirs in names)


def write_config(
    folder: Path,
    sizes: Mapping[str, AdapterSize],
    *,
    lora: Lora,
    base: str | None,
    is_tied: bool = False,
    scores: bool = False,
) -> None:
    """Write PEFT's config of the adapters `sizes`, by the names of the files' modules. `scores`: of a reward model."""
    saved = [theirs for theirs, ours in MODULES_TO_SAVE.items() if ours in lora.modules_to_save]
    ends: dict[str, dict[str, AdapterSize]] = {}
    for module, size in sizes.items():
        ends.setdefault(module.rsplit(".", 1)[-1], {})[module] = size
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scores else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(ends),
        "rank_pattern": patterns_of(ends, "rank", usual=lora.rank),
        "alpha_pattern": patterns_of(ends, "alpha", usual=lora.alpha),
        "layers_to_transform": lora.layers,
        "modules_to_save": [{"lm_head": "score"}.get(name, name) if scores else name for name in saved] or None,
        "ensure_weight_tying": is_tied and bool(lora.modules_to_save),
        "use_dora": lora.use_dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
