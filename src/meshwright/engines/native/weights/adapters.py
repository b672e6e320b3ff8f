"""LoRA adapters from and to a folder that `peft.PeftModel.from_pretrained` loads.

adapter_config.json            rank, alpha, targets
adapter_model.safetensors      base_model.model.<name in the family's files>.lora_A.weight, .lora_B.weight
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.engines.native.models import Transformer
from meshwright.engines.native.models.lora import GROUPED_TARGETS, LATENT_TARGETS, adapted
from meshwright.engines.native.weights.folder import is_writer, new_folder
from meshwright.engines.native.weights.names import family_of, file_names
from meshwright.engines.native.weights.reading import fill
from meshwright.engines.native.weights.tensors import Entry, Folder, write_file
from meshwright.errors import InputError
from meshwright.specs.model import AttentionKind, Lora, Model

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_CHANGED_MEANING = (
    "use_dora",
    "use_rslora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
)
"""Keys of PEFT's config under which an adapter is not what this module thinks it is."""


@torch.no_grad()
def save_adapters(
    built: Transformer, folder: str | Path, *, lora: Lora, base: str, dtype: torch.dtype = torch.float32
) -> None:
    """Write the adapters of `built`. `base` names the frozen model: a folder or a Hugging Face repository.

    Every rank of a sharded model must call this. Raises InputError when the folder is not empty.
    """
    tensors = _adapter_tensors(built)
    if not is_writer():
        for tensor in tensors.values():
            _whole(tensor)
        return
    entries = [
        Entry(name=name, shape=tuple(tensor.shape), dtype=dtype, make=partial(_whole, tensor))
        for name, tensor in tensors.items()
    ]
    config = _config(built, lora=lora, base=base)
    with new_folder(Path(folder)) as partial_folder:
        write_file(partial_folder / WEIGHTS, entries)
        (partial_folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def load_adapters(built: Transformer, folder: str | Path) -> None:
    """Fill the adapters of `built`, which has those of `read_lora(folder)`. Raises InputError where it has not."""
    files = Folder(Path(folder), single=WEIGHTS)
    tensors = _adapter_tensors(built)
    missing, unexpected = tensors.keys() - files.files.keys(), files.files.keys() - tensors.keys()
    if missing or unexpected:
        raise InputError(
            "the adapters are not of this model and these targets: "
            f"{len(missing)} are missing and {len(unexpected)} unexpected",
            got=min(missing | unexpected),
        )
    for name, tensor in tensors.items():
        if files.shape(name) != tuple(tensor.shape):
            raise InputError(f"{name} has another shape", got=files.shape(name), allowed=tuple(tensor.shape))
    for name, tensor in tensors.items():
        fill(tensor, files, name)


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
            "only plain LoRA adapters are read",
            got=", ".join(changed) or config.get("peft_type"),
            allowed="LORA",
        )
    if not isinstance(names, list):
        raise InputError("target_modules of the adapter", got=names, allowed="a list of names")
    return Lora(
        rank=rank,
        alpha=float(alpha),
        dropout=float(config.get("lora_dropout", 0.0)),
        targets=_targets(names, model),
    )


def _targets(names: list[str], model: Model) -> tuple[str, ...]:
    """Our targets whose places are among `names` (last parts of names in files)."""
    ends = {name.rsplit(".", 1)[-1] for name in names}
    in_layer = family_of(model).in_layer
    table = LATENT_TARGETS if model.attention.kind is AttentionKind.MLA else GROUPED_TARGETS

    def ends_of(target: str) -> set[str]:
        places = (f"{place}.weight" for place in table[target])
        return {in_layer[p].removesuffix(".weight").rsplit(".", 1)[-1] for p in places if p in in_layer}

    targets = tuple(target for target in table if ends_of(target) & ends)
    unknown = ends - {end for target in targets for end in ends_of(target)}
    if unknown:
        raise InputError("the adapter targets what this engine does not adapt", got=min(unknown))
    return targets


def _adapter_tensors(built: Transformer) -> dict[str, Tensor]:
    """Adapters by their names in PEFT's file."""
    tensors = {}
    for name, layer in adapted(built):
        prefix = _file_name(built.model, name)
        tensors[f"base_model.model.{prefix}.lora_A.weight"] = layer.lora_a.weight
        tensors[f"base_model.model.{prefix}.lora_B.weight"] = layer.lora_b.weight
    return tensors


def _file_name(model: Model, name: str) -> str:
    return file_names(model, f"{name}.weight", family=family_of(model))[0].removesuffix(".weight")


def _config(built: Transformer, *, lora: Lora, base: str) -> dict[str, Any]:
    targets = {_file_name(built.model, name).rsplit(".", 1)[-1] for name, _ in adapted(built)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
