"""The dense feed-forward block (SwiGLU, Shazeer 2020).

B sequences, T tokens, D hidden, F feed-forward hidden.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class FeedForward(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn_hidden, bias=False)
        self.up = nn.Linear(hidden, ffn_hidden, bias=False)
        self.down = nn.Linear(ffn_hidden, hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D]."""
        return self.down(functional.silu(self.gate(x_BTD)) * self.up(x_BTD))
