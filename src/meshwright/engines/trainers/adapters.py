"""Adapters and the format of their frozen base, as trainers state them, in the words of a run file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.catalog.families import family_that_fits
from meshwright.catalog.family_tensors import MODULES_TO_SAVE
from meshwright.engines.trainers.settings import Settings
from meshwright.errors import InputError
from meshwright.runfile.synonyms import LORA_TARGETS
from meshwright.specs.model import Model

ATTENTION, MLP = ("query", "key", "value", "output"), ("gate", "up", "down")
BLOCKS = {"mlp": {*MLP}, "self_attn": {"q", "k", "v", "o"}}
"""Names of the matrices in each block of a layer, in most families."""
EVERY_LAYER = re.compile(r"\^?[\w.\\]*(?:\[\\d\]\+|\\d\+|\.\*|\*)?\\?\.?\(([\w|]+)\)\\?\.\(([\w|]+)\)(_proj)?\$?")
"""A pattern of module paths such as `layers.[\\d]+.(mlp|self_attn).(up|down|q)_proj`."""


def lora_task(settings: Settings, *, kind: str | None, model: Model) -> dict[str, Any]:
    """Return the run file's task; empty where every parameter is trained. `kind`: lora, qlora, or as the files say.

    PEFT chooses the modules of `model` by its family where none are named.
    """
    if not _has_adapters(settings, kind):
        for setting in ("in_4_bits", "quantised_bits"):
            if settings.get(setting) not in (None, False, 16, 32):
                raise settings.error(setting, "only adapters train on a quantised base")
        return {}
    rank, alpha = settings.count("rank") or 0, settings.number("alpha")
    if alpha is None:
        alpha = (settings.number("alpha_per_rank") or 0.0) * rank
    patterns = {key: of for key in ("ranks", "alphas") if (of := _pattern(settings, key))}
    if patterns and settings.truth("rank_stabilised"):
        raise settings.error("rank_stabilised", "run files do not have it beside ranks or alphas by module")
    if settings.truth("rank_stabilised"):  # scaled by the root of the rank, not by the rank
        alpha *= rank**0.5
    found = {
        "rank": rank,
        "alpha": float(alpha),
        "dropout": settings.number("dropout") or 0.0,
        "targets": _targets(settings, model),
        "base_format": "nf4_double" if kind == "qlora" else _base_format(settings),
        **patterns,
    }
    found |= _init(settings)
    if settings.truth("dora"):
        found["use_dora"] = True
    if saved := settings.get("modules_to_save"):
        names = saved.split(",") if isinstance(saved, str) else saved
        if not (isinstance(names, list) and all(str(name) in MODULES_TO_SAVE for name in names)):
            raise settings.error(
                "modules_to_save", "run files train embedding and head whole", allowed=", ".join(MODULES_TO_SAVE)
            )
        found["modules_to_save"] = [MODULES_TO_SAVE[name] for name in names]
    if (layers := settings.get("layers")) not in (None, []):
        found["layers"] = layers if isinstance(layers, list) else [layers]
    if settings.truth("adapted_head"):
        settings.notes.append(f"{settings.key('adapted_head')}: adapters of the output head are not carried over")
    return {"task": "lora", "lora": found}


def _has_adapters(settings: Settings, kind: str | None) -> bool:
    return (kind or settings.text("adapter") or "none") != "none"


def missing_sizes(settings: Settings, *, kind: str | None) -> list[str]:
    """Return the settings without which adapters have no sizes."""
    if not _has_adapters(settings, kind):
        return []
    needed = ["rank"] if settings.get("alpha_per_rank") else ["rank", "alpha"]
    return [name for name in needed if settings.get(name) is None]


def _pattern(settings: Settings, name: str) -> dict[str, Any]:
    """Return ranks or alphas by target. Raises InputError for patterns that are more than a module's name."""
    given = settings.get(name) or {}
    if not (isinstance(given, Mapping) and all(module in LORA_TARGETS for module in given)):
        raise settings.error(name, "run files have ranks and alphas of modules", allowed=", ".join(LORA_TARGETS))
    return {target: value for module, value in given.items() for target in LORA_TARGETS[module].split(", ")}


def _init(settings: Settings) -> dict[str, str]:
    """Return the initial adapters, by PEFT's names or by LLaMA-Factory's switch and iterations."""
    given = settings.get("initial_adapters")
    if settings.truth("pissa"):
        iterations = settings.number("pissa_iterations")
        given = "pissa" if iterations == -1 else f"pissa_niter_{iterations}"
    if given in (None, True, "gaussian"):
        return {}
    if not (isinstance(given, str) and given.startswith(("pissa", "olora"))):
        raise settings.error(
            "initial_adapters", "run files do not have it", allowed="true, pissa, pissa_niter_N, olora"
        )
    return {"init": given}


def _base_format(settings: Settings) -> str:
    bits = settings.count("quantised_bits")
    if bits not in (None, 4, 8, 16, 32):
        raise settings.error("quantised_bits", "run files do not have it", allowed="4, 8, 16, 32")
    if bits == 4 or settings.truth("in_4_bits"):
        return "nf4_double" if settings.truth("double_quantised") else "nf4"
    if bits == 8 or settings.truth("in_8_bits"):
        return "int8"
    return settings.text("codes") or "full"


def _targets(settings: Settings, model: Model) -> list[str]:
    """Return the adapted matrices. Raises InputError for modules that run files do not adapt."""
    given = settings.get("targets") if "targets" in settings.given or not settings.truth("all_linear") else None
    given = given or settings.table.values.get("targets", {}).get(model.family)
    family = family_that_fits(model) if settings.table.framework == "transformers" else None
    tensors = family.tensors.values() if family else ()
    in_files = {tensor.removesuffix(".weight").rpartition(".")[2] for tensor in tensors}
    mlp = {*MLP} if model.gated_ffn else {"up", "down"}
    linear = mlp | ({*ATTENTION} if "qkv_proj" not in in_files else {"qkv", "output"})
    found = {name for name in ATTENTION if settings.truth(f"adapted_{name}")}
    found |= mlp if settings.truth("adapted_mlp") else set()
    found |= linear if settings.truth("all_linear") else set()
    for name in _names(given, settings):
        if name in ("all", "all-linear", "*_proj"):
            found |= linear
        elif name in LORA_TARGETS and ((in_files and name not in in_files) or LORA_TARGETS[name] in {*MLP} - mlp):
            settings.notes.append(f"{settings.key('targets')}: {model.name} has no {name}, and PEFT passes it over")
        elif name in LORA_TARGETS:
            found |= {*LORA_TARGETS[name].split(", ")}
        else:
            allowed = ", ".join(("all-linear", *LORA_TARGETS))
            raise InputError(
                f"{settings.key('targets')}: a module that run files do not adapt", got=name[:80], allowed=allowed
            )
    if model.experts is not None and (adapted := [name for name in MLP if name in found]):
        off = f"{settings.key('all_linear')}=false " if settings.truth("all_linear") else ""
        hint = f'"{settings.file.name} {off}{settings.key("targets")}=q_proj,k_proj,v_proj,o_proj" adapts attention'
        raise settings.error(
            "targets", f"run files have no adapters of experts, nor of layers beside them: {', '.join(adapted)} of "
            f"{model.name}", allowed=", ".join(ATTENTION), hint=hint,
        )  # fmt: skip
    if "gate_up_proj" in in_files and {"gate", "up"} <= found:
        settings.notes.append(f"the adapter of {model.name}'s gate_up_proj is read as one of gate and one of up")
    if not found:
        raise settings.error("targets", "names no module to adapt")
    return [name for name in (*ATTENTION, "qkv", *MLP) if name in found]


def _of_every_layer(path: str) -> str:
    """Return the name of a module with its block before it, which every layer has; other paths as they are."""
    block, _, name = path.rpartition(".")
    within = BLOCKS.get(block, set())
    return name if not block or name.removesuffix("_proj") in within or block in ("attention", "attn") else path


def _names(given: Any, settings: Settings) -> list[str]:
    """Return the names of modules in a list, in a text with commas, or in a pattern of paths."""
    if given is None:
        return []
    if isinstance(given, list) and all(isinstance(one, str) for one in given):
        return [_of_every_layer(one) for one in given]
    if not isinstance(given, str):
        raise settings.error("targets", "must be names of modules")
    given = given.replace("(_checkpoint_wrapped_module.)?", "")
    if (pattern := EVERY_LAYER.fullmatch(given[:200])) and len(given) <= 200:
        blocks, names = pattern[1].split("|"), pattern[2].split("|")
        within = set().union(*(BLOCKS.get(block, set()) for block in blocks))
        return [f"{name}{pattern[3] or ''}" for name in names if name.removesuffix("_proj") in within]
    return [one.strip() for one in given.split(",") if one.strip()]
