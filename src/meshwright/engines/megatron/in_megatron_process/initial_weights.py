"""First weights of Megatron's modules: those of the run's seed, or of Hugging Face safetensors.

A process makes one whole tensor at a time, the same that the native engine starts from, and keeps the part that its
module holds. Where that part lies in the whole is what Megatron's own sharded state says.

G key/value heads, H query heads, K width of a head, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn

from meshwright.engines.megatron.megatron_core.tensor_names import (
    FUSED,
    TensorName,
    is_fused,
    megatron_name,
    tensor_names,
)
from meshwright.errors import InputError
from meshwright.specs.model import Model
from meshwright.training.models import build_model
from meshwright.training.models.initialize import initial_weight
from meshwright.training.weights import family_of, file_names
from meshwright.training.weights.reading import check_weights, tensors_of

METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": True}
"""Of Megatron's checkpoints: every layer, every expert, gate and up each are a tensor with a name of its own."""

Read = Callable[[TensorName], Tensor]


def shapes_of(model: Model) -> dict[TensorName, tuple[int, ...]]:
    """Every tensor of the whole model, as the native engine has it."""
    built = build_model(model)
    return tensor_names(model, {name: tuple(tensor.shape) for name, tensor in tensors_of(built).items()})


def first_weights(model: Model, *, seed: int, device: torch.device) -> Read:
    """Those of the native engine's seed."""
    shapes = shapes_of(model)

    def read(place: TensorName) -> Tensor:
        return initial_weight(
            model, place.name, shape=shapes[place], expert=place.expert, seed=seed, device=device
        )

    return read


def weights_in(folder: Path, model: Model) -> Read:
    """Those of a Hugging Face folder. Raises InputError where it holds those of another model."""
    files, family = check_weights(folder, model), family_of(model)

    def read(place: TensorName) -> Tensor:
        names = file_names(model, place.name, family=family)
        return files.read(names[place.expert or 0])

    return read


@torch.no_grad()
def fill(module: nn.Module, model: Model, *, read: Read) -> None:
    """Give every parameter and routing bias of a GPTModel, or of its stage, this process's part."""
    places: dict[str, TensorName] = {}
    for place in shapes_of(model):
        places.setdefault(megatron_name(place), place)
    for shard in _shards(module.sharded_state_dict(metadata=dict(METADATA))):
        if shard.key not in places:
            raise InputError(f"Megatron has a tensor that no weights are known for: {shard.key}")
        whole = _whole(places[shard.key], model, read=read)
        shard.data.copy_(_part(whole, shard))


def _shards(state: dict[str, object]) -> Iterator[ShardedTensor]:
    for value in state.values():
        built = value.build() if isinstance(value, ShardedTensorFactory) else value
        for one in built if isinstance(built, list) else [built]:
            if isinstance(one, ShardedTensor):
                yield one


def _part(whole: Tensor, shard: ShardedTensor) -> Tensor:
    """What of `whole` the shard holds. Rows beyond it are Megatron's padding of the vocabulary: zero."""
    if len(whole) < shard.global_shape[0]:
        whole = torch.cat([whole, whole.new_zeros(shard.global_shape[0] - len(whole), *whole.shape[1:])])
    where = (slice(o, o + n) for o, n in zip(shard.global_offset, shard.local_shape, strict=True))
    return whole[tuple(where)]


def _whole(place: TensorName, model: Model, *, read: Read) -> Tensor:
    """Megatron's whole tensor that holds `place`."""
    if not is_fused(place):
        return read(place)
    stem = place.name.rpartition("attention.")[0]
    query, key, value = (read(TensorName(name=stem + name)) for name in FUSED)
    width, num_groups = model.attention.head_dim, model.attention.num_kv_heads
    parts = [x.view(num_groups, -1, width, x.shape[-1]) for x in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 2)
