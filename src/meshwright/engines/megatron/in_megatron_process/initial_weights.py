"""Initial weights of Megatron's modules: of the run's seed, or of Hugging Face safetensors.

A process creates one unsharded tensor at a time, equal to the native engine's, and keeps the shard of its module.
Megatron's own sharded state contains the position of the shard.

G key/value heads, H query heads, K width of a head, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from meshwright.engines.megatron.megatron_core import tensor_names
from meshwright.errors import InputError
from meshwright.specs.model import Model
from meshwright.training.models.initialize import initial_weight
from meshwright.training.weights import family_of, file_names
from meshwright.training.weights.reading import check_weights

METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": True}
"""Options of Megatron's checkpoints: layers, experts, gate and up are separate tensors with their own names."""

ReadTensor = Callable[[tensor_names.TensorName, tuple[int, ...]], Tensor]
"""Returns a tensor of a shape."""


def seeded_weights(model: Model, *, seed: int, device: torch.device) -> ReadTensor:
    """Return a function that creates the native engine's initial weights of `seed`."""

    def read(tensor: tensor_names.TensorName, shape: tuple[int, ...]) -> Tensor:
        return initial_weight(model, tensor.name, shape=shape, expert=tensor.expert, seed=seed, device=device)

    return read


def stored_weights(folder: Path, model: Model) -> ReadTensor:
    """Return a function that reads weights of a Hugging Face folder. Raises InputError for those of another model."""
    files, family = check_weights(folder, model), family_of(model)

    def read(tensor: tensor_names.TensorName, _: tuple[int, ...]) -> Tensor:
        in_file = file_names(model, tensor.name, family=family)
        return files.read(in_file[tensor.expert or 0])

    return read


@torch.no_grad()
def fill(module: MegatronModule, model: Model, *, read: ReadTensor) -> None:
    """Set every parameter and routing bias of a GPTModel, or of its stage, to its shard."""
    state = module.sharded_state_dict(metadata=dict(METADATA))
    for shard in (shard for value in state.values() for shard in shards_of(value)):
        if (name := tensor_names.native_name(shard.key)) is None:
            raise InputError(f"Megatron has a tensor without known weights: {shard.key}")
        whole = _unsharded(name, model, shape=tuple(shard.global_shape), read=read)
        assert shard.data is not None
        shard.data.copy_(_shard_of(whole, shard))


def shards_of(value: Any) -> list[ShardedTensor]:
    """Return the sharded tensors of a value of Megatron's state: none, one or several."""
    built = value.build() if isinstance(value, ShardedTensorFactory) else value
    return [one for one in (built if isinstance(built, list) else [built]) if isinstance(one, ShardedTensor)]


def _shard_of(whole: Tensor, shard: ShardedTensor) -> Tensor:
    """Return the shard of `whole`. Rows beyond it are Megatron's padding of the vocabulary: zero."""
    if len(whole) < shard.global_shape[0]:
        whole = torch.cat([whole, whole.new_zeros(shard.global_shape[0] - len(whole), *whole.shape[1:])])
    where = (slice(o, o + n) for o, n in zip(shard.global_offset, shard.local_shape, strict=True))
    return whole[tuple(where)]


def _unsharded(tensor: tensor_names.TensorName, model: Model, *, shape: tuple[int, ...], read: ReadTensor) -> Tensor:
    """Return Megatron's unsharded tensor of `shape` that contains `tensor`, without padding."""
    if not tensor_names.is_fused(tensor):
        return read(tensor, (model.vocab, *shape[1:]) if tensor_names.has_padded_rows(tensor) else shape)
    a = model.attention
    wholes = [
        read(name, (heads * a.head_dim, *shape[1:]))
        for name, heads in zip(
            tensor_names.fused_with(tensor), (a.num_heads, a.num_kv_heads, a.num_kv_heads), strict=True
        )
    ]
    parts = [whole.view(a.num_kv_heads, -1, a.head_dim, *whole.shape[1:]) for whole in wholes]
    return torch.cat(parts, dim=1).flatten(0, 2)
