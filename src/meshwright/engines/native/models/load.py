"""How busy each expert is, and the bias that follows it.

    b_e += speed * sign(mean load - load_e)      after each optimizer step (DeepSeek-V3, section 2.1.2)

E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from meshwright.engines.native.models.experts import MixtureOfExperts


def set_loss_scale(model: nn.Module, scale: float) -> None:
    """What the trainer multiplies the loss by before `backward`; usually one over the tokens of a step."""
    for layer in _mixtures(model).values():
        layer.loss_scale = scale


def take_load(model: nn.Module) -> dict[str, Tensor]:
    """Rows per expert since the last call, by the name of the layer; starts the count anew.

    With recomputation a layer counts twice; shares and signs are the same.
    """
    loads = {}
    for name, layer in _mixtures(model).items():
        loads[name] = layer.router.load_E.clone()
        layer.router.load_E.zero_()
    return loads


@torch.no_grad()
def update_bias(
    model: nn.Module, *, speed: float = 1e-3, group: distributed.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Moves every router's bias by `speed` towards balance, once an optimizer step; returns the loads.

    `group` are the ranks that saw different tokens: their loads are added first.
    """
    loads = take_load(model)
    for name, layer in _mixtures(model).items():
        load_E = loads[name]
        if group is not None:
            distributed.all_reduce(load_E, group=group)
        if layer.router.bias_E is not None:
            layer.router.bias_E += speed * torch.sign(load_E.double().mean() - load_E)
    return loads


def _mixtures(model: nn.Module) -> dict[str, MixtureOfExperts]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, MixtureOfExperts)}
