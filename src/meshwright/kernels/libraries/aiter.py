"""AMD's AITER as routes: norms and attention.

Signatures are from its repository on 2026-08-22 (`aiter/ops/mha.py`,
`aiter/ops/triton/normalization/rmsnorm.py`). The package needs an AMD GPU to be imported: tests have a
stand-in with these signatures. These routes have not run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.kernels.libraries import unfit, unfit_attention
from meshwright.kernels.routes import KernelCall, Refusal

if TYPE_CHECKING:
    from meshwright.kernels.attention.operation import ScoreOptions

WIDEST = 256


def serves(call: KernelCall) -> Refusal | None:
    """Refuse where the library is absent, other devices than AMD's, traced graphs, empty tensors."""
    if call.has_shapes and not all(map(all, call.shapes)):
        return Refusal(reason="an empty tensor")
    return unfit(call, package="aiter", project="amd-aiter", vendor="AMD", architectures="gfx")


def rms_norm(
    x: Tensor, weight_D: Tensor, residual: Tensor | None, epsilon: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """The norm, and x + residual: a pass of its own. AITER's kernel of both has no gradient of the sum."""
    normed = import_module("aiter.ops.triton.normalization.rmsnorm").rms_norm
    total = x if residual is None else x + residual
    return normed(total.reshape(-1, x.shape[-1]), weight_D, epsilon).view_as(x), total


def serves_rms_norm(call: KernelCall) -> Refusal | None:
    """Refuse norms whose weight is centered at zero."""
    if "zero_centered" in call.flags:
        return Refusal(reason="AITER multiplies by the weight, not by 1 + weight")
    return serves(call)


def attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, options: ScoreOptions) -> Tensor:
    """[B, T, H, V], causal; the mask ends at the last key."""
    return import_module("aiter").flash_attn_func(
        q_BTHK, k_BSGK, v_BSGV, softmax_scale=options.scale, causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def serves_attention(call: KernelCall) -> Refusal | None:
    """Refuse attention other than plain causal attention in 16 bits, and shapes that the kernel lacks."""
    if refusal := unfit_attention(call):
        return refusal
    if call.has_shapes and max(shape[-1] for shape in call.shapes) > WIDEST:
        return Refusal(reason=f"heads wider than {WIDEST}")
    return serves(call)
