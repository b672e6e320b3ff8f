"""The dense feed-forward block and its activation (gated linear units, Shazeer 2020).

B sequences, T tokens, D hidden, F feed-forward hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from meshwright.kernels.gated_activation import gated_activation
from meshwright.kernels.linear import Linear
from meshwright.specs.model import Activation

GatedActivation = Callable[[Tensor, Tensor], Tensor]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Recomputation replaces it."""
    return gated_activation(gate, up, kind="silu")


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up."""
    return gated_activation(gate, up, kind="gelu")


def tanh_geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, with GELU's approximation by tanh."""
    return gated_activation(gate, up, kind="gelu_tanh")


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """g sigmoid(1.702 g) (u + 1) of the clamped g and u (gpt-oss)."""
    return gated_activation(gate, up, kind="clamped")


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
