"""Matrix products in fp32 on processors that MKL was not made for.

PyTorch multiplies fp32 matrices with MKL, which leaves AVX-512 unused on processors of other makers; oneDNN, which
comes with PyTorch too, uses it: on one core of an AMD EPYC (Zen 5) 200 against 95 GFLOP/s, in fp32 like the other
(errors of 2.5 to 5.5e-7 against fp64, MKL's 2.5e-7). In bf16 PyTorch calls oneDNN by itself.

M rows, K columns that are summed over, N columns of the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional


def _is_better_with_onednn() -> bool:
    processor = torch.cpu.get_capabilities()
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and bool(processor.get("avx512_f"))
        and "Intel" not in str(processor.get("cpu_name"))
    )


IS_BETTER_WITH_ONEDNN = _is_better_with_onednn()
ONEDNN_PRODUCTS = {torch.ops.mkldnn._linear_pointwise.default} if IS_BETTER_WITH_ONEDNN else set()
"""The operations that `product` calls beside PyTorch's usual ones."""


def suits(*matrices: Tensor) -> bool:
    """Whether oneDNN should multiply these: plain fp32 tensors of such a processor."""
    return IS_BETTER_WITH_ONEDNN and all(
        type(m) in (Tensor, nn.Parameter) and m.dtype == torch.float32 and m.device.type == "cpu"
        for m in matrices
    )


def product(x_MK: Tensor, y_NK: Tensor) -> Tensor:
    """x yᵀ, [M, N]; autograd does not see it."""
    if not suits(x_MK, y_NK):
        return x_MK @ y_NK.T
    return _opaque(x_MK, y_NK) if torch.compiler.is_compiling() else _by_onednn(x_MK, y_NK)


def _by_onednn(x_MK: Tensor, y_NK: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_MK, y_NK, None, "none", [], "")


# For a compiled layer: PyTorch's compiler takes oneDNN's operation apart, and fails where the weight is no constant.
_opaque = torch.library.custom_op("meshwright::product", _by_onednn, mutates_args=())


@_opaque.register_fake
def _(x_MK: Tensor, y_NK: Tensor) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], y_NK.shape[0])


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, [..., N]."""
    if not suits(x, weight_NK):
        return functional.linear(x, weight_NK, bias_N)
    out = _Linear.apply(x, weight_NK)
    return out if bias_N is None else out + bias_N


class Linear(nn.Linear):
    """nn.Linear, by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., N]."""
        return linear(input, self.weight, self.bias)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return product(x.reshape(-1, x.shape[-1]), weight_NK).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        grad_MN = grads[0].reshape(-1, grads[0].shape[-1])
        wants_x, wants_weight = ctx.needs_input_grad
        return (
            product(grad_MN, weight_NK.T).view_as(x) if wants_x else None,
            product(grad_MN.T, x.reshape(-1, x.shape[-1]).T) if wants_weight else None,
        )
