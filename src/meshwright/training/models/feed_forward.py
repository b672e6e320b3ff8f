"""The dense feed-forward block (SwiGLU, Shazeer 2020).

B sequences, T tokens, D hidden, F feed-forward hidden.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from meshwright.training.models.linear import Linear


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Recomputation replaces it."""
    return functional.silu(gate) * up


class FeedForward(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.gate = Linear(hidden, ffn_hidden, bias=False)
        self.up = Linear(hidden, ffn_hidden, bias=False)
        self.down = Linear(ffn_hidden, hidden, bias=False)
        self.activation = swiglu

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D]."""
        return self.down(self.activation(self.gate(x_BTD), self.up(x_BTD)))
