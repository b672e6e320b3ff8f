"""A checkpoint of Megatron as Hugging Face safetensors, in one process on the host. Needs no Megatron.

Its files are those of PyTorch's distributed checkpoints: a tensor is read whole by its name.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read_state

from meshwright.engines.megatron.names import FUSED, Place, is_fused, is_vocabulary, key_of, places_of
from meshwright.errors import InputError
from meshwright.specs.model import Model
from meshwright.training.checkpoints import Content, Saved
from meshwright.training.conversion import FORMATS
from meshwright.training.models import build_model
from meshwright.training.weights import save_weights
from meshwright.training.weights.reading import tensors_of


@torch.no_grad()
def export_weights(saved: Saved, held: Content, folder: Path, *, dtype: str) -> None:
    """Write the weights of a checkpoint. Raises InputError where `folder` is not empty or a tensor is missing."""
    module = build_model(held.shapes, device="cpu")
    tensors = tensors_of(module)
    reader = FileSystemReader(saved.path)
    stored = reader.read_metadata().state_dict_metadata
    for place in places_of(held.shapes, {name: tuple(t.shape) for name, t in tensors.items()}):
        whole = _read(reader, stored, key_of(place), path=saved.path)
        target = tensors[place.name]
        (target if place.expert is None else target[place.expert]).copy_(
            _ours(place, held.shapes, held=whole)
        )
    save_weights(module, folder, dtype=FORMATS[dtype])


def _read(reader: FileSystemReader, stored: dict[str, object], key: str, *, path: Path) -> Tensor:
    """One whole tensor."""
    about = stored.get(key)
    if about is None:
        raise InputError(f"checkpoint {path} has no tensor {key!r}", hint="it is of another model")
    whole = {key: torch.empty(about.size, dtype=about.properties.dtype)}  # pyright: ignore[reportAttributeAccessIssue]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read_state(whole, storage_reader=FileSystemReader(reader.path))
    return whole[key]


def _ours(place: Place, model: Model, *, held: Tensor) -> Tensor:
    """The tensor at `place`, out of Megatron's whole tensor that holds it: what `weights` does, the other way."""
    if is_vocabulary(place):
        return held[: model.vocab]
    if not is_fused(place):
        return held
    a = model.attention
    heads = a.num_heads // a.num_kv_heads
    groups = held.view(a.num_kv_heads, heads + 2, a.head_dim, held.shape[-1])
    query, key, value = groups.split([heads, 1, 1], dim=1)
    found = dict(zip(FUSED, (query, key, value), strict=True))
    return found[place.name.partition(".")[2].partition(".")[2]].flatten(0, 2)
