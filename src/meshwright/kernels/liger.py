"""Liger's Triton kernels (liger-kernel 0.8.5) as routes. Its own kernels run in Triton's interpreter too.

Each has the signature of its operation's routes. The library is imported by the call.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.kernels.routes import KernelCall, Refusal
from meshwright.kernels.triton_route import serves_triton

if TYPE_CHECKING:
    from meshwright.kernels.linear_cross_entropy import LossSettings


def serves(call: KernelCall) -> Refusal | None:
    """Refuse where Liger or Triton is absent, traced graphs, and empty tensors: Liger divides by their rows."""
    if find_spec("liger_kernel") is None:
        return Refusal(reason="liger-kernel is not installed: pip install liger-kernel")
    if not call.shapes:
        return Refusal(reason="works outside of traced graphs")
    if call.has_shapes and not all(map(all, call.shapes)):
        return Refusal(reason="an empty tensor")
    return serves_triton(call)


# --- norms ---


def rms_norm(
    x: Tensor, weight_D: Tensor, residual: Tensor | None, epsilon: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """The norm, and x + residual."""
    from liger_kernel.ops import LigerFusedAddRMSNormFunction, LigerRMSNormFunction

    # "llama" rounds the normed row to its format before the weight: "gemma" rounds once, as the reference does
    settings: tuple[Any, ...] = (epsilon, float(zero_centered), "gemma", False)
    if residual is None:
        return LigerRMSNormFunction.apply(x, weight_D, *settings), x
    return LigerFusedAddRMSNormFunction.apply(x, residual, weight_D, *settings)


# --- activations ---


def gated_activation(gate: Tensor, up: Tensor, *, kind: str) -> Tensor:
    """f(gate) up."""
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

    return (LigerSiLUMulFunction if kind == "silu" else LigerGELUMulFunction).apply(gate, up)


def serves_activation(call: KernelCall) -> Refusal | None:
    """Refuse activations that Liger has not."""
    if not call.flags & {"silu", "gelu_tanh"}:
        return Refusal(reason="Liger has silu and gelu_tanh")
    return serves(call)


# --- positions ---


def rotate(
    q_BTHK: Tensor, k_BTGK: Tensor, cos_BT1J: Tensor, sin_BT1J: Tensor, is_interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Queries and keys, turned. Liger turns them and their gradients in place: both are copied before."""
    from liger_kernel.ops import LigerRopeFunction

    q, k = (x.clone(memory_format=torch.contiguous_format).transpose(1, 2) for x in (q_BTHK, k_BTGK))
    rotary_dim = 2 * cos_BT1J.shape[-1]
    turned = LigerRopeFunction.apply(q, k, cos_BT1J.squeeze(2), sin_BT1J.squeeze(2), None, 1, rotary_dim)
    q, k = (_CopiedGradient.apply(x.transpose(1, 2)) for x in turned)
    return q, k


class _CopiedGradient(torch.autograd.Function):
    """The identity; its gradient is a copy, which may be overwritten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clone(memory_format=torch.contiguous_format)


def serves_rotary(call: KernelCall) -> Refusal | None:
    """Refuse pairs of neighbours."""
    if "interleaved" in call.flags:
        return Refusal(reason="Liger turns halves, not pairs of neighbours")
    return serves(call)


# --- losses ---


def linear_cross_entropy(
    h_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, weights_N: Tensor, settings: LossSettings
) -> Tensor:
    """The summed or mean loss. d W is summed in fp32."""
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction as Function

    # bias, class weights, ignored label, z-loss, label smoothing, reduction, cap, return of the z-loss, format of sums
    options = (None, None, IGNORED_LABEL, 0.0, 0.0, settings.reduction, settings.cap or None, False, torch.float32)
    return Function.apply(h_ND, weight_VD, labels_N, *options)[0]


def serves_linear_cross_entropy(call: KernelCall) -> Refusal | None:
    """Refuse calls that Liger's loss does not compute."""
    if call.flags & {"weights", "z_loss", "sharded", "none"}:
        return Refusal(reason="Liger has no weights of tokens, no z-loss in the gradient alone, no sharded vocabulary")
    if "mixed" in call.flags:
        return Refusal(reason="hidden states and weight have different formats")
    return serves(call)
