"""LoRA adapters from and to a folder that `peft.PeftModel.from_pretrained` loads.

adapter_config.json            rank, alpha, targets
adapter_model.safetensors      base_model.model.<name in the family's files>.lora_A.weight, .lora_B.weight
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.catalog.family_tensors import OUTSIDE_LAYERS
from meshwright.errors import InputError
from meshwright.specs.model import QKV, Lora, Model
from meshwright.training.distributed_tensors import whole_tensor
from meshwright.training.models import Transformer
from meshwright.training.models.initialize import fill_whole
from meshwright.training.models.lora import places_of, saved_modules
from meshwright.training.weights.adapter_beginnings import WEIGHTS, as_plain
from meshwright.training.weights.adapter_config import (
    CONFIG,
    PREFIX,
    AdapterSize,
    patterns_of,
    read_config,
    saved_by,
    size_of,
    write_config,
)
from meshwright.training.weights.folder import is_writer, new_folder
from meshwright.training.weights.fused_adapters import QKV_PARTS, AdapterPart, adapter_part, of_parts, require_all_parts
from meshwright.training.weights.fusing import our_shapes
from meshwright.training.weights.names import family_of, file_names
from meshwright.training.weights.reading import fill
from meshwright.training.weights.safetensors_format import Folder, TensorEntry, write_file


def adapters_of(built: Transformer) -> dict[str, Tensor]:
    """The adapters of `built`, and what is trained beside them, by their names in it."""
    saved = {f"{name}.weight" for name in saved_modules(built)}
    return {name: p for name, p in built.named_parameters() if ".lora_" in name or name in saved}


@torch.no_grad()
def save_adapters(
    tensors: Mapping[str, Tensor], folder: str | Path, *, model: Model, lora: Lora, base: str | None
) -> None:
    """Write adapters, named as `adapters_of` names them. `base` is the frozen model: a folder or a name on the hub.

    Those of PiSSA and OLoRA come with `initial_adapters`, and are written as plain ones of twice the rank.
    Tensors may be sharded, and other processes may have the tensors of other stages: every process must call
    this, the first writes. Raises InputError when the folder is not empty.
    """
    whole = of_parts(_gathered({name: whole_tensor(tensor).cpu() for name, tensor in tensors.items()}))
    if not is_writer():
        return
    if lora.moves_base:
        whole, lora = as_plain(whole, lora)
    entries = [
        TensorEntry(name=name, shape=tuple(t.shape), dtype=t.dtype, make=partial(_same, t))
        for name, t in _joined(whole, model=model, lora=lora).items()
    ]
    with new_folder(Path(folder)) as partial_folder:
        write_file(partial_folder / WEIGHTS, entries)
        sizes = _written_sizes(whole, entries, model=model, lora=lora)
        write_config(
            partial_folder, sizes, lora=lora, base=base, is_tied=model.tied_embeddings, scores=model.num_labels > 0
        )


def _written_sizes(
    whole: Iterable[str], entries: Iterable[TensorEntry], *, model: Model, lora: Lora
) -> dict[str, AdapterSize]:
    """Rank and alpha of each module in the file; adapters of a fused matrix are joined to one of a larger rank."""
    ranks, sizes = {entry.name: entry.shape[0] for entry in entries}, adapter_sizes(model, lora)
    found = {}
    for matrix in (name.partition(".lora_a.")[0] for name in whole if ".lora_a." in name):
        rank, size = ranks[_peft_name(model, f"{matrix}.lora_a.weight")], sizes[matrix]
        found[_module(model, matrix)] = AdapterSize(rank, size.alpha * (rank // size.rank))
    return found


def _joined(whole: Mapping[str, Tensor], *, model: Model, lora: Lora) -> dict[str, Tensor]:
    """Adapters as PEFT has them, by its names."""
    family, found = family_of(model), {}
    for name, tensor in whole.items():
        rank = tensor.shape[-1 if ".lora_b" in name else 0]
        part = adapter_part(name, model=model, family=family, rank=rank)
        if part is not None:
            require_all_parts(whole, part)
            others = [whole[other] for other in part.others]
            tensor = part.join(others, is_shared=part.is_of_qkv(lora))
        found[_peft_name(model, name)] = tensor
        found |= dict.fromkeys(_head_copy(model, [name]), tensor)
    return found


def _head_copy(model: Model, trained: Iterable[str]) -> list[str]:
    """The name of the copy of a trained embedding that PEFT writes for a tied head."""
    is_copied = model.tied_embeddings and "embedding.weight" in trained
    return [f"{PREFIX}{OUTSIDE_LAYERS['head.weight']}"] if is_copied else []


@torch.no_grad()
def load_adapters(built: Transformer, folder: str | Path) -> None:
    """Fill the adapters of `built` from `folder`. Raises InputError unless they are the adapters of `folder`."""
    files, family = Folder(Path(folder), single=WEIGHTS), family_of(built.model)
    parts, tensors = {}, {}
    adapters = of_parts(adapters_of(built))
    for name, tensor in adapters.items():
        rank = tensor.shape[-1 if ".lora_b" in name else 0]
        part = adapter_part(name, model=built.model, family=family, rank=rank)
        if part is None:
            tensors[_peft_name(built.model, name)] = tensor
        else:
            require_all_parts(adapters, part)
            parts[name] = (_peft_name(built.model, name), part, tensor)
    copies = _head_copy(built.model, adapters)
    wanted = tensors.keys() | {in_file for in_file, _, _ in parts.values()} | {*copies}
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
    for name in copies:
        if not torch.equal(files.read(name), files.read(_peft_name(built.model, "embedding.weight"))):
            raise InputError(f"{name} differs from the embedding, with which the model ties its head")
    for name, tensor in tensors.items():
        fill(tensor, partial(files.read, name))
    for name, (in_file, part, tensor) in parts.items():
        fill_whole(tensor, part.split(files.read(in_file), is_shared=shared[name]).contiguous())


def _require_one_a(built: Transformer, files: Folder) -> None:
    """Raise InputError where `built` has an adapter of query, key and value together, and `files` three."""
    for name, tensor in adapters_of(built).items():
        is_a = name.endswith(f".{QKV}.lora_a.weight")
        if is_a and not _has_one_a(files, built.model, _layer(name), rank=tensor.shape[0]):
            raise InputError(
                "query, key and value have an adapter each, and not one together",
                got=f"{name}: an A for each",
                hint="lora.targets: [query, key, value, ...]",
            )


def _has_one_a(files: Folder, model: Model, layer: int, *, rank: int) -> bool:
    """True if query, key and value of `layer` have the same A, of `rank`, also in one fused matrix."""
    names = [_peft_name(model, f"layers.{layer}.attention.{part}.lora_a.weight") for part in QKV_PARTS]
    if not all(name in files.files for name in names) or files.shape(names[0])[0] != rank:
        return False
    first, *others = map(files.read, names)
    return all(torch.equal(first, other) for other in others)


def _is_shared(files: Folder, name: str, part: AdapterPart) -> bool:
    """True if the file has one adapter of the whole matrix. Raises InputError for another shape."""
    found = files.shape(name)
    allowed = {is_shared: part.file_shape(is_shared=is_shared) for is_shared in (False, True)}
    if found not in allowed.values():
        raise InputError(f"{name} has another shape", got=found, allowed=allowed[False])
    return found != allowed[False]


def adapter_sizes(model: Model, lora: Lora) -> dict[str, AdapterSize]:
    """The adapters of `lora`, by the names of their matrices, as in `layers.0.attention.query`."""
    found = {}
    for name, target in _matrices(model, lora.matrices).items():
        if (own := lora.at(target, layer=_layer(name))) is not None:
            found[name] = AdapterSize(own.rank, own.alpha)
    return found


def _matrices(model: Model, targets: Iterable[str]) -> dict[str, str]:
    """The matrices of `model` that `targets` mean, with their targets."""
    target_of = {place: target for target in targets for place in places_of(model)[target]}
    names = (name.removesuffix(".weight") for name in our_shapes(model) if name.startswith("layers."))
    return {name: target_of[place] for name in names if (place := name.split(".", 2)[2]) in target_of}


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def read_lora(folder: str | Path, *, model: Model) -> Lora:
    """Ranks, alphas, dropout, targets and layers of a PEFT folder. A rank-stabilised adapter (rsLoRA), whose scale is
    alpha over the root of the rank, has an alpha that is the root of the rank larger here.

    Raises InputError for an adapter of another kind.
    """
    config = read_config(Path(folder) / CONFIG, scores=model.num_labels > 0)
    files = Folder(Path(folder), single=WEIGHTS)
    targets = _by_target(_sizes(config, files, model), model)
    parts = [targets.get(part, {}) for part in QKV_PARTS]
    # With DoRA the matrix of all three is read as three that begin with one A, the same function.
    is_equal = QKV in places_of(model) and not config.get("use_dora") and parts[0] and parts[0] == parts[1] == parts[2]
    if is_equal and all(_has_one_a(files, model, i, rank=size.rank) for i, size in parts[0].items()):
        targets = {QKV: parts[0]} | {target: of for target, of in targets.items() if target not in QKV_PARTS}
    usual = size_of(config, "")
    keyed = {target: {f"{i}.{target}": size for i, size in of.items()} for target, of in targets.items()}
    layers = {i for of in targets.values() for i in of}
    return Lora(
        rank=usual.rank,
        alpha=usual.alpha,
        dropout=float(config["lora_dropout"]),
        targets=tuple(target for target in places_of(model) if target in targets),
        ranks=patterns_of(keyed, "rank", usual=usual.rank),
        alphas=patterns_of(keyed, "alpha", usual=usual.alpha),
        layers=None if len(layers) == model.num_layers else tuple(sorted(layers)),
        use_dora=bool(config.get("use_dora")),
        modules_to_save=saved_by(config, is_tied=model.tied_embeddings, scores=model.num_labels > 0),
    )


def _sizes(config: Mapping[str, Any], files: Folder, model: Model) -> dict[str, AdapterSize]:
    """The adapters of PEFT's `config`, by our names of the matrices."""
    modules = {name: _module(model, name) for name in _matrices(model, places_of(model))}
    for name in config["target_modules"]:
        if not any(_is_named(module, name) for module in modules.values()):
            raise InputError("the adapter targets a matrix that this engine does not adapt", got=name)
    chosen = config["layers_to_transform"]
    adapted = {
        name: module
        for name, module in modules.items()
        if any(_is_named(module, target) for target in config["target_modules"])
        and (not chosen or _layer(name) in chosen)
    }
    if not adapted:
        raise InputError("the adapter has none of the model's layers", got=f"layers_to_transform: {chosen}")
    parts = {
        name: part
        for name in adapted
        if (part := adapter_part(f"{name}.lora_b.weight", model=model, family=family_of(model), rank=1))
    }
    whole = {part.place.fused.parts for part in parts.values() if not _is_joined(config, files, part)}
    sizes = {name: size_of(config, module) for name, module in adapted.items()}
    for name, part in parts.items():
        if part.place.fused.parts not in whole:  # of all layers, as small ones may have been trained to nothing
            num = len(part.place.shapes)
            sizes[name] = AdapterSize(sizes[name].rank // num, sizes[name].alpha / num)
    return sizes


def _is_named(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _is_joined(config: Mapping[str, Any], files: Folder, part: AdapterPart) -> bool:
    """True if the adapter of a fused matrix is made of one for each of its parts. Of one without values the config
    decides: written ones have a rank of their own."""
    module = part.place.name.removesuffix(".weight")
    name = f"{PREFIX}{module}.lora_B.weight"
    num = len(part.place.shapes)
    rank = size_of(config, module).rank
    if name not in files.files or rank % num:
        return False
    b = files.read(name)
    return rank != config["r"] if not b.any() else part.is_block_diagonal(b)


def _by_target(sizes: Mapping[str, AdapterSize], model: Model) -> dict[str, dict[int, AdapterSize]]:
    """The adapters of each target, by layer. Raises InputError where a run file could not state them."""
    found: dict[str, dict[int, AdapterSize]] = {}
    existing: dict[str, set[int]] = {}
    for target in places_of(model):
        for name in _matrices(model, [target]):
            existing.setdefault(target, set()).add(layer := _layer(name))
            size = sizes.get(name)
            if size is not None and found.setdefault(target, {}).setdefault(layer, size) == size:
                continue
            if size is not None or layer in found.get(target, {}):
                raise InputError(f"the matrices of {target} have different adapters in a layer", got=name)
    layers = {layer for of in found.values() for layer in of}
    for target, of in found.items():
        if of.keys() != existing[target] & layers:
            raise InputError(f"other layers have adapters of {target} than of the other targets", got=sorted(of))
    return found


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


def _module(model: Model, matrix: str) -> str:
    """The name in files of our matrix `layers.0.attention.query`."""
    (in_file,) = file_names(model, f"{matrix}.weight", family=family_of(model))
    return in_file.removesuffix(".weight")


def _peft_name(model: Model, name: str) -> str:
    """`layers.0.attention.query.lora_a.weight`, or `head.weight`, in PEFT's file."""
    matrix, is_adapter, part = name.partition(".lora_")
    if not is_adapter:
        return f"{PREFIX}{file_names(model, name, family=family_of(model))[0]}"
    end = "magnitude_vector" if part == "magnitude" else f"{part[0].upper()}.weight"
    return f"{PREFIX}{_module(model, matrix)}.lora_{end}"


def _same(tensor: Tensor) -> Tensor:
    return tensor
