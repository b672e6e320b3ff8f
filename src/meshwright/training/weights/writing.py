"""Save a model to a folder that transformers loads: sharded safetensors, their index, config.json.

The folder appears whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.catalog.families import ModelFamily
from meshwright.training.distributed_tensors import whole_tensor
from meshwright.training.models import Transformer
from meshwright.training.weights.config import config_of
from meshwright.training.weights.folder import is_writer, new_folder
from meshwright.training.weights.fusing import FilePart, file_part, our_shapes
from meshwright.training.weights.names import family_of, file_names, prediction_copies
from meshwright.training.weights.reading import tensors_of
from meshwright.training.weights.safetensors_format import INDEX, SINGLE, TensorEntry, write_file

FILE_BYTES = 5 * 10**9
"""Bytes of a file at most, as Hugging Face cuts them."""


@torch.no_grad()
def save_weights(
    built: Transformer,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    file_bytes: int = FILE_BYTES,
    max_positions: int | None = None,
) -> None:
    """Write the weights of a whole model in `dtype` (routing biases stay fp32), and its config.json.

    Sharded parameters are gathered one at a time: every rank must call this, the first writes. Raises InputError when
    the folder is not empty, or no architecture of transformers has the model's shapes.
    """
    family = family_of(built.model)
    config = config_of(built.model, dtype=str(dtype).removeprefix("torch."), max_positions=max_positions)
    entries = [*_entries(built, family, dtype=dtype), *_copies(built, dtype=dtype)]
    if not is_writer():
        for entry in entries:  # takes part in the gathers
            entry.make()
        return
    write_folder(Path(folder), entries, config=config, file_bytes=file_bytes)


def write_folder(
    folder: Path, entries: Sequence[TensorEntry], *, config: dict[str, Any], file_bytes: int = FILE_BYTES
) -> None:
    """Write tensors under their names in the files, and the config.json. Raises InputError when it is not empty."""
    with new_folder(folder) as unfinished:
        _write_files(unfinished, _portions(entries, file_bytes=file_bytes))
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_files(folder: Path, portions: Sequence[Sequence[TensorEntry]]) -> None:
    if len(portions) == 1:
        write_file(folder / SINGLE, portions[0])
        return
    weight_map: dict[str, str] = {}
    for number, entries in enumerate(portions, start=1):
        name = f"model-{number:05d}-of-{len(portions):05d}.safetensors"
        write_file(folder / name, entries)
        weight_map |= {entry.name: name for entry in entries}
    total = sum(entry.num_bytes for entries in portions for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _entries(built: Transformer, family: ModelFamily, *, dtype: torch.dtype) -> Iterator[TensorEntry]:
    """One entry a tensor of the files, in the order of the model."""
    tensors, shapes = tensors_of(built), our_shapes(built.model)
    for name, tensor in tensors.items():
        names = file_names(built.model, name, family=family)
        if (part := file_part(name, shapes=shapes, family=family)) is not None:
            if part.index == 0:
                layer = name.removesuffix(part.fused.parts[0])
                parts = [tensors[layer + other] for other in part.fused.parts]
                make = partial(_joined, part, parts)
                yield TensorEntry(name=part.name, shape=part.file_shape, dtype=dtype, make=make)
            continue
        kept = torch.float32 if name.endswith("bias_E") else dtype
        if ".experts." not in name:
            yield TensorEntry(name=names[0], shape=tuple(tensor.shape), dtype=kept, make=partial(whole_tensor, tensor))
            continue
        for index, file_name in enumerate(names):
            yield TensorEntry(
                name=file_name, shape=tuple(tensor.shape[1:]), dtype=kept, make=partial(_expert, tensor, index)
            )


def _copies(built: Transformer, *, dtype: torch.dtype) -> Iterator[TensorEntry]:
    """The copies of embedding and head that files have in prediction modules."""
    tensors = tensors_of(built)
    for name, ours in prediction_copies(built.model).items():
        ours = "embedding.weight" if ours not in tensors else ours  # a tied head
        whole = partial(whole_tensor, tensors[ours])
        yield TensorEntry(name=name, shape=tuple(tensors[ours].shape), dtype=dtype, make=whole)


def _joined(part: FilePart, parts: Sequence[Tensor]) -> Tensor:
    return part.join([whole_tensor(tensor) for tensor in parts])


def _expert(stack: Tensor, index: int) -> Tensor:
    """One expert of a stack. A sharded stack gathers only that expert."""
    return whole_tensor(stack[index])


def _portions(entries: Sequence[TensorEntry], *, file_bytes: int) -> list[list[TensorEntry]]:
    """Entries in order, cut where a file would grow beyond `file_bytes`."""
    portions: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if portions[-1] and size + entry.num_bytes > file_bytes:
            portions.append([])
            size = 0
        portions[-1].append(entry)
        size += entry.num_bytes
    return portions
