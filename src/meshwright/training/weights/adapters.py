"""LoRA adapters from and to a folder that `peft.PeftModel.from_pretrained` loads.

adapter_config.json            rank, alpha, targets
adapter_model.safetensors      base_model.model.<name in the family's files>.lora_A.weight, .lora_B.weight
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
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

_READ = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora")
_PATTERNS = ("rank_pattern", "alpha_pattern")  # read for fused matrices (`fused_adapters`)
_OF_THE_BASE = ("base_model_name_or_path", "revision")  # the caller finds it
_OTHER = (  # records, and settings of training and of methods that other keys choose
    "auto_mapping", "peft_version", "inference_mode", "runtime_config", "ensure_weight_tying", "eva_config",
    "megatron_core", "qalora_group_size",
)  # fmt: skip
WITHOUT_EFFECT = (*_READ, *_PATTERNS, *_OF_THE_BASE, *_OTHER)
"""Keys of PEFT's config that are read here, or that leave the function of the adapter as it is at any value."""
_PLAIN = {
    "bias": ("none",),
    "task_type": ("CAUSAL_LM",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),  # others change the base: PiSSA, OLoRA, CorDA, LoftQ
}
"""Values of other keys that leave a plain LoRA adapter, beside null, false and empty ones."""
_NUMBERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda v: isinstance(v, int) and v > 0, "a whole number from 1"),
    "lora_alpha": (lambda v: 0 < v < math.inf, "a number above 0"),
    "lora_dropout": (lambda v: 0 <= v < 1, "a number from 0, below 1"),
}


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
    """Rank, alpha, dropout and targets of a PEFT folder. A rank-stabilised adapter (rsLoRA), whose scale is alpha over
    the root of the rank, has an alpha that is the root of the rank larger here.

    Raises InputError for an adapter of another kind.
    """
    config = _read_config(Path(folder) / CONFIG)
    rank, alpha, names = config["r"], float(config["lora_alpha"]), config["target_modules"]
    given = {key: config[key] for key in _PATTERNS if config.get(key)}
    if config.get("use_rslora"):
        alpha *= math.sqrt(rank)
    lora = Lora(rank=rank, alpha=alpha, dropout=float(config["lora_dropout"]), targets=_targets(names, model))
    ends = [name.rsplit(".", 1)[-1] for name in names]
    allowed = patterns(family_of(model), lora, ends=ends)
    whole = _as_qkv(lora, model)
    if whole is not None and _is_of_qkv(Path(folder), model, is_plain=given != allowed or not given):
        lora, allowed = whole, patterns(family_of(model), whole, ends=ends)
    if given and (given != allowed or config.get("use_rslora")):
        raise InputError("adapters of several ranks are not read", got=", ".join(given), allowed=str(allowed or "none"))
    return lora


def _read_config(path: Path) -> dict[str, Any]:
    """PEFT's config of a plain LoRA adapter. Raises InputError for any other, naming the key that makes it one."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config = {"lora_dropout": 0.0} | config
        kind, names = config["peft_type"], config["target_modules"]
        numbers = {key: config[key] for key in _NUMBERS}
    except OSError as error:
        raise InputError(f"cannot read the adapter: {error.strerror or error}", got=str(path)) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"not the config of a LoRA adapter: {error!r}", got=str(path)) from error
    if kind != "LORA":
        raise InputError(f"{path}: the kind of adapter", got=repr(kind), allowed="LORA")
    for key, value in config.items():
        if key not in WITHOUT_EFFECT and value not in (None, False, "", [], {}, *_PLAIN.get(key, ())):
            raise InputError(
                f"{path}: {key} makes another function than plain LoRA, or one that is not known here",
                got=f"{key}: {value!r}", allowed=" or ".join(map(repr, (None, *_PLAIN.get(key, ())))),
                hint="merge the adapter with PEFT (merge_and_unload), and use the merged weights",
            )  # fmt: skip
    for key, value in numbers.items():
        is_inside, allowed = _NUMBERS[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_inside(value):
            raise InputError(f"{path}: {key}", got=repr(value), allowed=allowed)
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise InputError(f"{path}: target_modules", got=repr(names), allowed="a list of names")
    return config


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
