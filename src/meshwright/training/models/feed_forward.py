"""The dense feed-forward block and its activation (gated linear units, Shazeer 2020).

B sequences, T tokens, D hidden, F feed-forward hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn

from meshwright.kernels.fp8.feed_forward import Fp8Block, fp8_feed_forward
from meshwright.kernels.fp8.layer import Fp8State
from meshwright.kernels.gated_activation import gated_activation
from meshwright.kernels.linear import Linear
from meshwright.specs.model import Activation

GatedActivation = Callable[[Tensor, Tensor], Tensor]

ACTIVATION_KINDS: Mapping[Activation, str] = {
    Activation.SILU: "silu",
    Activation.GELU: "gelu",
    Activation.GELU_TANH: "gelu_tanh",
    Activation.CLAMPED_SWIGLU: "clamped",
}
"""Kinds of `kernels.gated_activation`."""


class GatedBlock(nn.Module):
    """A block with a gated activation. Recomputation replaces `activation`.

    With `fp8_states`, one for each matrix, the block multiplies in 8 bits and casts the activation without writing it
    in 16; with `drops_hidden` it keeps no cast for the backward pass, which casts it again.
    """

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.kind = ACTIVATION_KINDS[activation]
        self.activation: GatedActivation = partial(gated_activation, kind=self.kind)
        self.fp8_states: Mapping[str, Fp8State] | None = None
        self.drops_hidden = False


class FeedForward(GatedBlock):
    """down(f(gate x) * up x)."""

    def __init__(self, hidden: int, ffn_hidden: int, *, activation: Activation = Activation.SILU) -> None:
        super().__init__(activation)
        self.gate = Linear(hidden, ffn_hidden, bias=False)
        self.up = Linear(hidden, ffn_hidden, bias=False)
        self.down = Linear(ffn_hidden, hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D]."""
        if self.fp8_states is not None:
            return self.in_fp8(x_BTD)
        return self.down(self.activation(self.gate(x_BTD), self.up(x_BTD)))

    def in_fp8(self, x_BTD: Tensor) -> Tensor:
        """`forward` in 8 bits. Tensor parallelism puts its own in this place."""
        return self.multiply(x_BTD, self.gate.weight, self.up.weight, self.down.weight)

    def multiply(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """`forward` in 8 bits with these matrices."""
        assert self.fp8_states is not None
        block = Fp8Block(kind=self.kind, states=self.fp8_states, drops_hidden=self.drops_hidden)
        return fp8_feed_forward(x, gate, up, down, block=block)
