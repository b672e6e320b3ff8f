"""First weights, the same for every way of sharding them.

    matrices                                   normal, std 0.02
    matrices that write to the residual stream normal, std 0.02 / sqrt(2 L)      GPT-2 (Radford et al. 2019)
    norms 1, biases 0
    adapters: A uniform up to 1 / sqrt(in), B 0                                 PEFT

Every tensor has a random stream of its own, seeded by its name; every expert of a stack too. So a rank that holds
one expert, one stage or one shard draws just the numbers that one process would have drawn. The stream depends on
the kind of device, as PyTorch's does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright.engines.native.models.experts import Experts
from meshwright.engines.native.models.lora import adapted
from meshwright.engines.native.models.transformer import Transformer

STD = 0.02
RESIDUAL_WRITERS = ("attention.output.weight", "ffn.down.weight", "experts.down", "shared.down.weight")


@torch.no_grad()
def init_weights(model: Transformer, *, seed: int, std: float = STD) -> None:
    """Fills all parameters and buffers of a model that is not on the meta device (see `materialize`)."""
    assert not any(p.is_meta for p in model.parameters()), "materialize comes first"
    init_adapters(model, seed=seed)
    stacked = {f"{name}." for name, module in model.named_modules() if isinstance(module, Experts)}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            spread = std / math.sqrt(2 * model.model.num_layers) if name.endswith(RESIDUAL_WRITERS) else std
            is_stack = any(name.startswith(prefix) for prefix in stacked)
            _fill(parameter, name, partial(Tensor.normal_, std=spread), seed=seed, stacked=is_stack)
    reset_buffers(model)


@torch.no_grad()
def init_adapters(model: nn.Module, *, seed: int) -> None:
    """Fills the adapters alone, so that weights loaded before or after stay."""
    for name, layer in adapted(model):
        limit = layer.in_features**-0.5
        draw = partial(Tensor.uniform_, **{"from": -limit, "to": limit})
        _fill(layer.lora_a.weight, f"{name}.lora_a.weight", draw, seed=seed)
        layer.lora_b.weight.zero_()


def reset_buffers(model: nn.Module) -> None:
    """Zeroes loads and balancing biases: all buffers these models have."""
    for buffer in model.buffers():
        buffer.zero_()


def _fill(
    parameter: Tensor, name: str, draw: Callable[..., Tensor], *, seed: int, stacked: bool = False
) -> None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    whole = torch.empty(parameter.shape, dtype=torch.float32, device=local.device)
    for key, part in _parts(name, whole, stacked=stacked):
        generator = torch.Generator(device=part.device).manual_seed(_stream(seed, key))
        draw(part, generator=generator)
    if isinstance(parameter, DTensor):
        # src_data_rank None: every rank has drawn the same whole, nothing is sent
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        whole = whole.to_local()
    local.copy_(whole)


def _parts(name: str, whole: Tensor, *, stacked: bool) -> Iterator[tuple[str, Tensor]]:
    if not stacked:
        yield name, whole
        return
    for index, part in enumerate(whole.unbind()):
        yield f"{name}.{index}", part


def _stream(seed: int, key: str) -> int:
    """A seed of 63 bits; Python's own `hash` differs between processes."""
    digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
