"""Weight initialization, independent of sharding.

    matrices                                   normal, std 0.02
    matrices that write to the residual stream normal, std 0.02 / sqrt(2 L)      GPT-2 (Radford et al. 2019)
    norms 1 (0 where centered at zero), biases and sinks 0
    adapters: A uniform up to 1 / sqrt(in), B 0                                 PEFT

Every tensor has its own random stream, seeded by its name; every expert of a stack too. So a rank that holds one
expert, one stage or one shard draws the same numbers as one process would. The stream depends on the type of device,
as PyTorch's does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.specs.model import Model
from meshwright.training.distributed_tensors import is_distributed, own_part, whole_tensor
from meshwright.training.models.experts import RoutedExperts
from meshwright.training.models.lora import adapted, adapter_matrices, beginning, init_magnitudes
from meshwright.training.models.transformer import Transformer

STD = 0.02
RESIDUAL_WRITERS = ("attention.output.weight", "ffn.down.weight", "experts.down", "shared.down.weight")


@torch.no_grad()
def init_weights(model: Transformer, *, seed: int, std: float = STD) -> None:
    """Fill all parameters and buffers of a model that is not on the meta device (see `materialize`)."""
    assert not any(p.is_meta for p in model.parameters()), "materialize comes first"
    init_adapters(model, seed=seed)
    stacked = {f"{name}." for name, module in model.named_modules() if isinstance(module, RoutedExperts)}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        if (constant := _constant(model.model, name)) is not None:
            parameter.fill_(constant)
        else:
            spread = _spread(name, num_layers=model.model.num_layers, std=std)
            is_stack = any(name.startswith(prefix) for prefix in stacked)
            fill = _fill_stack if is_stack else _fill
            fill(parameter, name, partial(Tensor.normal_, std=spread), seed=seed)
    init_magnitudes(model)
    reset_buffers(model)


def initial_weight(
    model: Model, name: str, *, shape: tuple[int, ...], expert: int | None, seed: int, device: torch.device
) -> Tensor:
    """Initial values of the whole tensor `name`, or of one expert of that stack, as in `init_weights`: fp32 `shape`."""
    whole = torch.empty(shape, dtype=torch.float32, device=device)
    if (constant := _constant(model, name)) is not None:
        return whole.fill_(constant)
    key = name if expert is None else f"{name}.{expert}"
    spread = _spread(name, num_layers=model.num_layers, std=STD)
    return whole.normal_(std=spread, generator=_generator(seed, key, device))


def _constant(model: Model, name: str) -> float | None:
    """The initial value of a norm, a bias or sinks; None: a matrix, which is random."""
    if name.endswith("norm.weight"):
        return 0.0 if model.zero_centered_norms else 1.0
    return 0.0 if name.endswith((".bias", "_bias", ".bias_E", ".sinks")) else None


def _spread(name: str, *, num_layers: int, std: float) -> float:
    return std / math.sqrt(2 * num_layers) if name.endswith(RESIDUAL_WRITERS) else std


@torch.no_grad()
def init_adapters(model: nn.Module, *, seed: int) -> None:
    """Fill the adapters only, so that weights loaded before or after stay."""
    for name, matrix in adapter_matrices(model):
        if not name.endswith(".lora_a"):
            matrix.weight.zero_()
            continue
        limit = matrix.in_features**-0.5
        draw = partial(Tensor.uniform_, **{"from": -limit, "to": limit})  # ty: ignore[unknown-argument]
        _fill(matrix.weight, f"{name}.weight", draw, seed=seed)


@torch.no_grad()
def init_from_base(model: nn.Module, *, seed: int) -> None:
    """Take the adapters of PiSSA and OLoRA out of the base's matrices, which are as their files have them. Collective.

    Every process decomposes whole matrices, and keeps its part.
    """
    for name, layer in adapted(model):
        if layer.initial_a is None:
            continue
        whole = whole_tensor(layer.weight).float()
        drawn = _generator(seed, name, torch.device("cpu")).initial_seed()
        a, b = beginning(whole, layer.init, rank=layer.lora_a.out_features, scale=layer.scale, seed=drawn)
        for ours, initial, value in ((layer.lora_a, layer.initial_a, a), (layer.lora_b, layer.initial_b, b)):
            fill_whole(ours.weight, value)
            initial.copy_(value)
        fill_whole(layer.weight, (whole - layer.scale * (b @ a)).to(layer.weight.dtype))


@torch.no_grad()
def init_scores(model: Transformer, *, seed: int) -> None:
    """Fill the head of a reward model, which weights that write texts lack."""
    if model.model.num_labels and model.head is not None:
        _fill(model.head.weight, "head.weight", partial(Tensor.normal_, std=STD), seed=seed)


def reset_buffers(model: nn.Module) -> None:
    """Zero all buffers of the model: balancing biases, and counts within a step."""
    for buffer in model.buffers():
        buffer.zero_()


def _fill(parameter: Tensor, name: str, draw: Callable[..., Tensor], *, seed: int) -> None:
    """Draw the whole tensor and keep this rank's part."""
    local = own_part(parameter)
    whole = torch.empty(parameter.shape, dtype=torch.float32, device=local.device)
    draw(whole, generator=_generator(seed, name, local.device))
    fill_whole(parameter, whole)


def _fill_stack(stack: Tensor, name: str, draw: Callable[..., Tensor], *, seed: int) -> None:
    """Draw the experts of this rank one by one: no second stack is ever held where the part is one slice."""
    local = own_part(stack)
    where = local_slices(stack)
    if where is None:
        whole = torch.empty(stack.shape, dtype=torch.float32, device=local.device)
        for index, expert in enumerate(whole):
            draw(expert, generator=_generator(seed, f"{name}.{index}", local.device))
        return fill_whole(stack, whole)
    expert = torch.empty(stack.shape[1:], dtype=torch.float32, device=local.device)
    for index, target in enumerate(local, start=where[0].start):
        draw(expert, generator=_generator(seed, f"{name}.{index}", local.device))
        target.copy_(expert[where[1:]])


def fill_whole(tensor: Tensor, whole: Tensor) -> None:
    """Copy `whole`, or of a sharded `tensor` this rank's part of it. Every rank has the same whole: nothing is sent."""
    if not is_distributed(tensor):
        tensor.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(tensor.device)
    part = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.to_local().copy_(part.to_local())


def local_slices(tensor: Tensor) -> tuple[slice, ...] | None:
    """The slice of the whole that this rank holds; None where it is not one slice."""
    if not is_distributed(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    # type(), not isinstance: a strided shard is a Shard too, and not one slice
    if any(type(p) not in (Shard, Replicate) for p in tensor.placements):
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(o, o + size) for o, size in zip(offset, shape, strict=True))


def _generator(seed: int, key: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(named_seed(seed, key))


def named_seed(seed: int, key: str) -> int:
    """A seed of the random stream `key`, 63 bits; Python's own `hash` differs between processes."""
    digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
