"""A checkpoint of Megatron as Hugging Face safetensors, in one process on the host. Needs no Megatron.

Its files are those of PyTorch's distributed checkpoints, from which each tensor is read whole by its name. Torch is
imported when a checkpoint is exported.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.engines.megatron.megatron_core.tensor_names import (
    TensorName,
    fused_with,
    has_padded_rows,
    is_fused,
    native_name,
)
from meshwright.errors import InputError
from meshwright.specs.model import Model

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.training.checkpoints import Content, SavedCheckpoint


def export_saved_weights(saved: SavedCheckpoint, content: Content, folder: Path, *, dtype: str) -> None:
    """Write the weights of a checkpoint. Raises InputError where `folder` is not empty or a tensor is missing."""
    import torch

    from meshwright.training.checkpoints.metadata import CheckpointReader
    from meshwright.training.conversion import FORMATS
    from meshwright.training.models import build_model
    from meshwright.training.weights import save_weights
    from meshwright.training.weights.reading import tensors_of

    model = content.shapes
    module = build_model(model, device="cpu")
    tensors = tensors_of(module)
    stored = CheckpointReader(saved.path).read_metadata().state_dict_metadata
    keys = {name: key for key in stored if (first := native_name(key)) for name in fused_with(first)}
    with torch.no_grad():
        for name, tensor in tensors.items():
            experts = [*range(len(tensor))] if ".experts." in name else [None]
            for expert in experts:
                one = TensorName(name=name, expert=expert)
                whole = _read_tensor(saved.path, keys.get(one, name), stored=stored)
                target = tensor if expert is None else tensor[expert]
                target.copy_(_from_megatron(one, model, stored=whole))
    save_weights(module, folder, dtype=FORMATS[dtype])


def _read_tensor(path: Path, key: str, *, stored: Mapping[str, Any]) -> Tensor:
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load

    from meshwright.training.checkpoints.metadata import CheckpointReader

    about = stored.get(key)
    if about is None:
        raise InputError(f"checkpoint {path} has no tensor {key!r}", hint="it is of another model")
    whole = {key: torch.empty(about.size, dtype=about.properties.dtype)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(whole, storage_reader=CheckpointReader(path))
    return whole[key]


def _from_megatron(name: TensorName, model: Model, *, stored: Tensor) -> Tensor:
    """Extract the tensor `name` from Megatron's tensor that holds it: the inverse of `initial_weights`."""
    if has_padded_rows(name):
        return stored[: model.vocab]
    if not is_fused(name):
        return stored
    a = model.attention
    heads = a.num_heads // a.num_kv_heads
    groups = stored.view(a.num_kv_heads, heads + 2, a.head_dim, *stored.shape[1:])
    found = dict(zip(fused_with(name), groups.split([heads, 1, 1], dim=1), strict=True))
    return found[name].flatten(0, 2)
