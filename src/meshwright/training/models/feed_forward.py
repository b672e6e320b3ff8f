"""The dense feed-forward block and its activation (gated linear units, Shazeer 2020).

B sequences, T tokens, D hidden, F feed-forward hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.specs.model import Activation
from meshwright.training.models.linear import Linear

CLAMP = 7.0
SHARPNESS = 1.702
"""Constants of gpt-oss's activation, in its code and in all its config.json."""

GatedActivation = Callable[[Tensor, Tensor], Tensor]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Recomputation replaces it."""
    return functional.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up."""
    return functional.gelu(gate) * up


def tanh_geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, with GELU's approximation by tanh."""
    return functional.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """g sigmoid(1.702 g) (u + 1) of the clamped g and u (gpt-oss)."""
    gate, up = gate.clamp(max=CLAMP), up.clamp(min=-CLAMP, max=CLAMP)
    return gate * torch.sigmoid(SHARPNESS * gate) * (up + 1)


ACTIVATIONS: Mapping[Activation, GatedActivation] = {
    Activation.SILU: swiglu,
    Activation.GELU: geglu,
    Activation.GELU_TANH: tanh_geglu,
    Activation.CLAMPED_SWIGLU: clamped_swiglu,
}


class FeedForward(nn.Module):
    """down(f(gate x) * up x)."""

    def __init__(self, hidden: int, ffn_hidden: int, *, activation: Activation = Activation.SILU) -> None:
        super().__init__()
        self.gate = Linear(hidden, ffn_hidden, bias=False)
        self.up = Linear(hidden, ffn_hidden, bias=False)
        self.down = Linear(ffn_hidden, hidden, bias=False)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D]."""
        return self.down(self.activation(self.gate(x_BTD), self.up(x_BTD)))
