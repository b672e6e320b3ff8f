"""Load of experts, and the routing bias that balances it.

    b_e += speed * sign(mean load - load_e)      after each optimizer step (DeepSeek-V3, section 2.1.2)

L layers of the whole model, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, distributed

from meshwright.training.models.experts import MixtureOfExperts
from meshwright.training.models.transformer import Transformer


def configure_router_losses(
    modules: Iterable[Transformer], *, scale: float, group: distributed.ProcessGroup | None = None
) -> None:
    """Set the scale of the auxiliary losses, which are sums over tokens: one over the tokens of a step.

    `group`: the ranks that hold parts of the same sequences.
    """
    for _, layer in _mixtures(modules):
        layer.loss_scale, layer.sequence_group = scale, group


@torch.no_grad()
def collect_expert_load(modules: Sequence[Transformer]) -> Tensor | None:
    """Rows of each expert since the last call [L, E], 0 for layers that are dense or not here; resets the counts.

    None for a model without experts.
    """
    model = modules[0].model
    if model.experts is None:
        return None
    num_layers = model.num_layers + model.num_mtp_layers
    shape, device = (num_layers, model.experts.num_experts), next(modules[0].parameters()).device
    load_LE = torch.zeros(shape, dtype=torch.long, device=device)
    for index, layer in _mixtures(modules):
        load_LE[index] = layer.router.load_E
        layer.router.load_E.zero_()
    return load_LE


@torch.no_grad()
def update_routing_bias(modules: Iterable[Transformer], load_LE: Tensor, *, speed: float) -> None:
    """Move every router's bias by `speed` towards balance, once an optimizer step. `load_LE` is of all tokens."""
    for index, layer in _mixtures(modules):
        if layer.router.bias_E is not None:
            load_E = load_LE[index]
            layer.router.bias_E += speed * torch.sign(load_E.double().mean() - load_E)


def expert_load_ratio(load_LE: Tensor) -> Tensor:
    """Rows of the busiest expert over the mean, the maximum over layers; 1 is balance.

    >>> expert_load_ratio(torch.tensor([[0, 0], [3, 1]]))
    tensor(1.5000)
    """
    ratio_L = load_LE.amax(dim=1) / load_LE.float().mean(dim=1)
    return ratio_L.nan_to_num(nan=0.0).max()


def _mixtures(modules: Iterable[Transformer]) -> Iterator[tuple[int, MixtureOfExperts]]:
    for module in modules:
        for name, layer in module.blocks().items():
            ffn = getattr(layer, "ffn", None)
            if isinstance(ffn, MixtureOfExperts):
                yield int(name), ffn
