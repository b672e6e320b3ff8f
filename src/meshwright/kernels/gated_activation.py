"""Gated activations of a feed-forward block, forward and backward.

    y = f(gate) up          silu: f(g) = g σ(g)       gelu: f(g) = g Φ(g)       gelu_tanh: its approximation by tanh
    clamped (gpt-oss):      y = g σ(1.702 g) (u + 1),  g = min(gate, 7), u = up clamped to ±7

    d gate = dy f'(gate) up        d up = dy f(gate)

The reference keeps f(gate) in addition to gate and up, and reads and writes it; the kernel computes it again from gate
while it is in registers: 3 tensors moved forward and 5 backward, which is the least.

N rows, F columns. Gate and up may be strided in rows (halves of one fused projection); columns are contiguous, or are
copied so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.kernels import liger
from meshwright.kernels.dispatch import choose
from meshwright.kernels.routes import Route
from meshwright.kernels.shapes import require_alike
from meshwright.kernels.triton_route import serves_triton

CLAMP = 7.0
SHARPNESS = 1.702
"""Constants of gpt-oss's activation, in its code and in all its config.json."""

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
"""f by kind, where the gate alone passes through it."""

KINDS = (*ACTIVATIONS, "clamped")


def gated_activation(gate: Tensor, up: Tensor, *, kind: str = "silu") -> Tensor:
    """f(gate) up, of the shape and format of `gate`. `kind` is one of `KINDS`."""
    require_alike("swiglu", gate=gate, up=up)
    route = choose("swiglu", gate, up, flags=_FLAGS[kind])
    return ROUTES["swiglu"][route].function(gate, up, kind=kind)


_FLAGS = {kind: frozenset({kind}) for kind in KINDS}


def reference(gate: Tensor, up: Tensor, *, kind: str = "silu") -> Tensor:
    """The specification."""
    if kind != "clamped":
        return ACTIVATIONS[kind](gate) * up
    gate, up = gate.clamp(max=CLAMP), up.clamp(min=-CLAMP, max=CLAMP)
    return gate * torch.sigmoid(SHARPNESS * gate) * (up + 1)


def _triton(gate: Tensor, up: Tensor, *, kind: str) -> Tensor:
    from meshwright.kernels.gated_activation_triton import gated

    return gated(gate, up, kind)


ROUTES = {
    "swiglu": {
        "reference": Route(reference),
        "triton": Route(_triton, serves=serves_triton),
        "liger": Route(liger.gated_activation, serves=liger.serves_activation),
    }
}
