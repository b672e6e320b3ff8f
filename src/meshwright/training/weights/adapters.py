"""LoRA adapters from and to a folder that `peft.PeftModel.from_pretrained` loads.

adapter_config.json            rank, alpha, targets
adapter_model.safetensors      base_model.model.<name in the family's files>.lora_A.weight, .lora_B.weight
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.catalog.families import ModelFamily
from meshwright.errors import InputError
from meshwright.specs.model import QKV, AttentionKind, Lora, Model
from meshwright.training.models import Transformer
from meshwright.training.models.lora import GROUPED_TARGETS, LATENT_TARGETS
from meshwright.training.weights.folder import is_writer, new_folder
from meshwright.training.weights.fused_adapters import (
    QKV_PARTS,
    AdapterPart,
    adapter_part,
    of_parts,
    patterns,
    require_all_parts,
)
from meshwright.training.weights.names import family_of, file_names
from meshwright.training.weights.reading import fill, fill_whole
from meshwright.training.weights.safetensors_format import Folder, TensorEntry, write_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_CHANGED_MEANING = ("use_dora", "use_rslora", "modules_to_save", "fan_in_fan_out")
"""Keys of PEFT's config that change the meaning of an adapter: not supported."""
_PATTERNS = ("rank_pattern", "alpha_pattern")
"""Keys that change it too, and are read for fused matrices (`fused_adapters`)."""


def adapters_of(built: Transformer) -> dict[str, Tensor]:
    """The adapters of `built` by their names in it."""
    return {name: p for name, p in built.named_parameters() if ".lora_" in name}


@torch.no_grad()
def save_adapters(
    tensors: Mapping[str, Tensor], folder: str | Path, *, model: Model, lora: Lora, base: str | None
) -> None:
    """Write adapters, named as `adapters_of` names them. `base` is the frozen model: a folder or a name on the hub.

    Tensors may be sharded, and other processes may have the tensors of other stages: every process must call
    this, the first writes. Raises InputError when the folder is not empty.
    """
    whole = of_parts(_gathered({name: _whole(tensor).cpu() for name, tensor in tensors.items()}))
    if not is_writer():
        return
    entries = [
        TensorEntry(name=name, shape=tuple(t.shape), dtype=t.dtype, make=partial(_same, t))
        for name, t in _joined(whole, model=model, lora=lora).items()
    ]
    with new_folder(Path(folder)) as partial_folder:
        write_file(partial_folder / WEIGHTS, entries)
        names = [entry.name for entry in entries]
        write_config(partial_folder, names, lora=lora, base=base, family=family_of(model))


def _joined(whole: Mapping[str, Tensor], *, model: Model, lora: Lora) -> dict[str, Tensor]:
    """Adapters as PEFT has them, by its names."""
    family, found = family_of(model), {}
    for name, tensor in whole.items():
        part = adapter_part(name, model=model, family=family, rank=lora.rank)
        if part is not None:
            require_all_parts(whole, part)
            others = [whole[other] for other in part.others]
            tensor = part.join(others, is_shared=part.is_of_qkv(lora))
        found[_peft_name(model, name)] = tensor
    return found


@torch.no_grad()
def load_adapters(built: Transformer, folder: str | Path) -> None:
    """Fill the adapters of `built` from `folder`. Raises InputError unless they are the adapters of `folder`."""
    files, family = Folder(Path(folder), single=WEIGHTS), family_of(built.model)
    parts, tensors = {}, {}
    adapters = of_parts(adapters_of(built))
    for name, tensor in adapters.items():
        rank = tensor.shape[0 if ".lora_a" in name else 1]
        part = adapter_part(name, model=built.model, family=family, rank=rank)
        if part is None:
            tensors[_peft_name(built.model, name)] = tensor
        else:
            require_all_parts(adapters, part)
            parts[name] = (_peft_name(built.model, name), part, tensor)
    wanted = tensors.keys() | {in_file for in_file, _, _ in parts.values()}
    missing, unexpected = wanted - files.files.keys(), files.files.keys() - wanted
    if missing or unexpected:
        raise InputError(
            "the adapters are not of this model and these targets: "
            f"{len(missing)} are missing and {len(unexpected)} unexpected",
            got=min(missing | unexpected),
        )
    for name, tensor in tensors.items():
        if files.shape(name) != tuple(tensor.shape):
            raise InputError(f"{name} has another shape", got=files.shape(name), allowed=tuple(tensor.shape))
    shared = {name: _is_shared(files, in_file, part) for name, (in_file, part, _) in parts.items()}
    _require_one_a(built, files)
    for name, tensor in tensors.items():
        fill(tensor, files, name)
    for name, (in_file, part, tensor) in parts.items():
        fill_whole(tensor, part.split(files.read(in_file), is_shared=shared[name]).contiguous())


def _require_one_a(built: Transformer, files: Folder) -> None:
    """Raise InputError where `built` has an adapter of query, key and value together, and `files` three."""
    family = family_of(built.model)
    for name in adapters_of(built):
        layer, is_qkv, _ = name.partition(f".{QKV}.lora_a")
        if not is_qkv:
            continue
        a = f"{layer}.query.lora_a.weight"
        if adapter_part(a, model=built.model, family=family, rank=1) is not None:
            rank = built.get_parameter(name).shape[0]
            is_one = files.shape(_peft_name(built.model, a))[0] == rank
        else:
            is_one = _has_one_a(files, built.model, layer)
        if not is_one:
            raise InputError(
                "query, key and value have an adapter each, and not one together",
                got=f"{layer}: an A for each",
                hint="lora.targets: [query, key, value, ...]",
            )


def _has_one_a(files: Folder, model: Model, attention: str) -> bool:
    """True if the adapters of query, key and value of the layer `attention` have the same A."""
    first, *others = (files.read(_peft_name(model, f"{attention}.{part}.lora_a.weight")) for part in QKV_PARTS)
    return all(torch.equal(first, other) for other in others)


def _is_shared(files: Folder, name: str, part: AdapterPart) -> bool:
    """True if the file has one adapter of the whole matrix. Raises InputError for another shape."""
    found = files.shape(name)
    allowed = {is_shared: part.file_shape(is_shared=is_shared) for is_shared in (False, True)}
    if found not in allowed.values():
        raise InputError(f"{name} has another shape", got=found, allowed=allowed[False])
    return found != allowed[False]


def read_lora(folder: str | Path, *, model: Model) -> Lora:
    """Rank, alpha, dropout and targets of a PEFT folder. Raises InputError for an adapter of another kind."""
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha, names = config["r"], config["lora_alpha"], config["target_modules"]
    except OSError as error:
        raise InputError(f"cannot read the adapter: {error.strerror or error}", got=str(path)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"not the config of a LoRA adapter: {error!r}", got=str(path)) from error
    changed = [key for key in _CHANGED_MEANING if config.get(key)]
    if config.get("peft_type") != "LORA" or changed or config.get("bias", "none") != "none":
        raise InputError(
            "only plain LoRA adapters are read", got=", ".join(changed) or config.get("peft_type"), allowed="LORA"
        )
    if not isinstance(names, list):
        raise InputError("target_modules of the adapter", got=names, allowed="a list of names")
    lora = Lora(
        rank=rank, alpha=float(alpha), dropout=float(config.get("lora_dropout", 0.0)), targets=_targets(names, model)
    )
    given = {key: config[key] for key in _PATTERNS if config.get(key)}
    ends = [name.rsplit(".", 1)[-1] for name in names]
    allowed = patterns(family_of(model), lora, ends=ends)
    whole = _as_qkv(lora, model)
    if whole is not None and _is_of_qkv(Path(folder), model, is_plain=given != allowed or not given):
        lora, allowed = whole, patterns(family_of(model), whole, ends=ends)
    if given not in ({}, allowed):
        raise InputError("adapters of several ranks are not read", got=", ".join(given), allowed=str(allowed or "none"))
    return lora


def _as_qkv(lora: Lora, model: Model) -> Lora | None:
    """`lora` with one adapter of query, key and value; None where it does not adapt all three."""
    if model.attention.kind is AttentionKind.MLA or not set(QKV_PARTS) <= set(lora.targets):
        return None
    others = (target for target in lora.targets if target not in QKV_PARTS)
    return replace(lora, targets=(QKV, *others))


def _is_of_qkv(folder: Path, model: Model, *, is_plain: bool) -> bool:
    """True if query, key and value have one A in the files. `is_plain`: a fused matrix has the rank of the others."""
    place = "layers.0.attention"
    if adapter_part(f"{place}.query.lora_a.weight", model=model, family=family_of(model), rank=1) is not None:
        return is_plain
    files = Folder(folder, single=WEIGHTS)
    names = [_peft_name(model, f"{place}.{part}.lora_a.weight") for part in QKV_PARTS]
    return all(name in files.files for name in names) and _has_one_a(files, model, place)


def _targets(names: list[str], model: Model) -> tuple[str, ...]:
    """Our targets whose places are among `names` (last parts of names in files)."""
    ends = {name.rsplit(".", 1)[-1] for name in names}
    tensors = family_of(model).tensors
    table = LATENT_TARGETS if model.attention.kind is AttentionKind.MLA else GROUPED_TARGETS

    def ends_of(target: str) -> set[str]:
        places = (f"{place}.weight" for place in table[target])
        return {tensors[p].removesuffix(".weight").rsplit(".", 1)[-1] for p in places if p in tensors}

    targets = tuple(target for target in table if ends_of(target) & ends)
    unknown = ends - {end for target in targets for end in ends_of(target)}
    if unknown:
        raise InputError("the adapter targets a matrix that this engine does not adapt", got=min(unknown))
    return targets


def _gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather the tensors of all processes on the first one; each tensor is sent by the first process that has it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensors
    names: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(names, list(tensors))
    before = {name for held in names[: dist.get_rank()] for name in held}
    parts: list[dict[str, Tensor]] | None = [{}] * len(names) if is_writer() else None
    dist.gather_object({n: t for n, t in tensors.items() if n not in before}, parts)
    return {name: tensor for part in parts or [] for name, tensor in part.items()}


def _peft_name(model: Model, name: str) -> str:
    """`layers.0.attention.query.lora_a.weight` in PEFT's file."""
    place, part = name.split(".lora_")
    (in_file,) = file_names(model, f"{place}.weight", family=family_of(model))
    return f"base_model.model.{in_file.removesuffix('.weight')}.lora_{part[0].upper()}.weight"


def write_config(
    folder: Path, names: Iterable[str], *, lora: Lora, base: str | None, family: ModelFamily | None = None
) -> None:
    """Write PEFT's config beside the tensors of `names`. `family` has the fused matrices; None: there are none."""
    ends = sorted({name.rsplit(".", 3)[1] for name in names})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": ends,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    config |= {} if family is None else patterns(family, lora, ends=ends)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
