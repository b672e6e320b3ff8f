"""NVIDIA's Transformer Engine as routes: norms and attention.

Signatures are from version 2.20 (`transformer_engine/pytorch/csrc/extensions.h`, `dot_product_attention.py`).
The package needs a GPU to be imported: tests have a stand-in with these signatures. No route has run.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.kernels.libraries import unfit, unfit_attention
from meshwright.kernels.routes import KernelCall, Refusal

if TYPE_CHECKING:
    from meshwright.kernels.attention.operation import ScoreOptions

WIDEST = 256


def serves(call: KernelCall) -> Refusal | None:
    """Refuse where the library is absent, other devices than NVIDIA's, traced graphs, empty tensors."""
    if call.has_shapes and not all(map(all, call.shapes)):
        return Refusal(reason="an empty tensor")
    return unfit(call, package="transformer_engine", project="transformer_engine", vendor="NVIDIA", architectures="sm")


def rms_norm(
    x: Tensor, weight_D: Tensor, residual: Tensor | None, epsilon: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """The norm, and x + residual: a pass of its own forward, inside the kernel backward."""
    total = x if residual is None else x + residual
    normed, passed = _Norm.apply(total, weight_D, epsilon, zero_centered)
    return normed, total if residual is None else passed


class _Norm(torch.autograd.Function):
    """The norm of `x`, and `x` itself. The backward kernel adds the gradients of both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, epsilon: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
        formats = import_module("transformer_engine.pytorch.constants").TE_DType
        rows_ND = x.reshape(-1, x.shape[-1])
        # output, quantizer; format; multiprocessors that stay free
        out_ND, _, scale_N = import_module("transformer_engine_torch").rmsnorm_fwd(
            rows_ND, weight_D, epsilon, None, None, formats[x.dtype], 0, zero_centered
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows_ND, scale_N, weight_D)
        ctx.zero_centered = zero_centered
        return out_ND.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        functions = import_module("transformer_engine_torch")
        rows_ND, scale_N, weight_D = ctx.saved_tensors
        grad_ND, behind_ND = (None if grad is None else grad.reshape(rows_ND.shape).contiguous() for grad in grads)
        if grad_ND is None:  # only the sum has a gradient
            return grads[1], None, None, None
        given = (scale_N, weight_D, 0, ctx.zero_centered)
        if behind_ND is None:
            grad_x_ND, grad_weight_D = functions.rmsnorm_bwd(grad_ND, rows_ND, *given)
        else:
            grad_x_ND, grad_weight_D = functions.rmsnorm_bwd_add(grad_ND, rows_ND, behind_ND, *given)
        return grad_x_ND.view_as(grads[0]), grad_weight_D, None, None


def attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, options: ScoreOptions) -> Tensor:
    """[B, T, H, V], causal."""
    attend = _module(q_BTHK.shape[2], q_BTHK.shape[3], v_BSGV.shape[3], k_BSGK.shape[2], options.scale)
    return attend(q_BTHK, k_BSGK, v_BSGV).view(*q_BTHK.shape[:3], -1)


@lru_cache(maxsize=32)
def _module(heads: int, width: int, value_width: int, groups: int, scale: float) -> Any:
    return import_module("transformer_engine.pytorch").DotProductAttention(
        heads, (width, value_width), num_gqa_groups=groups, qkv_format="bshd", attn_mask_type="causal",
        softmax_scale=scale,
    )  # fmt: skip


def serves_attention(call: KernelCall) -> Refusal | None:
    """Refuse attention other than plain causal attention in 16 bits, and shapes that the kernel lacks."""
    if refusal := unfit_attention(call):
        return refusal
    if call.has_shapes:
        (_, queries, _, width), (_, keys, _, _), (*_, value_width) = call.shapes
        if queries != keys:
            return Refusal(reason="as many queries as keys: its causal mask begins at the first key")
        if max(width, value_width) > WIDEST or width % 8 or value_width % 8:
            return Refusal(reason=f"it takes widths up to {WIDEST} that 8 divides")
    return serves(call)
