"""Linear layers with a choice of GEMM routes on a CPU: by tuning, else by the processor.

PyTorch multiplies fp32 matrices with MKL, which leaves AVX-512 unused on processors of other makers; oneDNN, which
comes with PyTorch too, uses it: on one core of an AMD EPYC (Zen 5) 200 against 95 GFLOP/s, in fp32 like the other
(errors of 2.5 to 5.5e-7 against fp64, MKL's 2.5e-7). In bf16 PyTorch calls oneDNN by itself, which needs AVX-512.
Without it PyTorch's own loops take 4 to 36 times the time of a GEMM in fp32 (AMD EPYC, Zen 3); converting both factors,
which is exact, and rounding the result once takes 1.1 to 1.4 times, and is the default there.

A linear layer of M rows, N outputs and K inputs has three GEMMs. The memory layout of their factors tells which it is:

    forward           x [M, K]     by w [N, K]      both in rows
    input_gradient    y [M, N]     by w' [K, N]     the second is a transposed view
    weight_gradient   y' [N, M]    by x' [K, M]     both are

`meshwright tune gemm` measures routes for each of them; `using_routes` applies them.

M rows, K columns that are summed over, N columns of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from meshwright.kernels import processor
from meshwright.kernels.operators import only_once


class GemmKind(StrEnum):
    """One of the three GEMMs of a linear layer."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"


class GemmRoute(StrEnum):
    """Implementation of a GEMM. Routes with rows first copy a factor that is a transposed view."""

    TORCH = "torch"  # PyTorch's own choice: MKL in fp32, oneDNN in bf16 where it can
    ONEDNN = "onednn"
    TORCH_ROWS = "torch, rows"
    ONEDNN_ROWS = "onednn, rows"
    WIDENED = "widened"  # factors converted to fp32, and the result rounded


COPYING_ROUTES = {GemmRoute.TORCH_ROWS, GemmRoute.ONEDNN_ROWS}
"""Routes that equal the others if both factors are in rows already."""


def routes_of(dtype: torch.dtype) -> tuple[GemmRoute, ...]:
    """The routes that this processor has for `dtype`, fp32 or bf16."""
    if dtype == torch.bfloat16 and processor.HERE.widens_bf16:
        return GemmRoute.WIDENED, GemmRoute.TORCH, GemmRoute.TORCH_ROWS
    if not processor.HERE.has_onednn:
        return GemmRoute.TORCH, GemmRoute.TORCH_ROWS
    return GemmRoute.TORCH, GemmRoute.ONEDNN, GemmRoute.TORCH_ROWS, GemmRoute.ONEDNN_ROWS


WIDENED_NUMBERS, LEAST_WIDENED_ROWS = 2**20, 64
"""Numbers in fp32 of the rows of a factor, or of a result, that are widened at once, 4 MiB. Copies of all logits took
an eighth of the memory of a small training. Blocks take no longer, as they stay in a cache."""

LinearShape = tuple[torch.dtype, int, int, int]
"""Format, M, N, K of a linear layer."""

_routes: Mapping[LinearShape, Mapping[GemmKind, GemmRoute]] = {}


@contextmanager
def using_routes(routes: Mapping[LinearShape, Mapping[GemmKind, GemmRoute]]) -> Iterator[None]:
    """Use these routes for the GEMMs of these layers while the context is open, and the defaults for others."""
    global _routes
    before, _routes = _routes, routes
    try:
        yield
    finally:
        _routes = before


def default_route(dtype: torch.dtype) -> GemmRoute:
    """The route of a GEMM that was not tuned."""
    if dtype == torch.bfloat16 and processor.HERE.widens_bf16:
        return GemmRoute.WIDENED
    is_better = dtype == torch.float32 and processor.HERE.is_better_with_onednn
    return GemmRoute.ONEDNN if is_better else GemmRoute.TORCH


def compiles_shapes(matrix: Tensor) -> bool:
    """Return True if GEMMs like this matrix's run code that oneDNN compiles for each number of rows.

    On one core of an AMD EPYC (Zen 4) that takes 0.65 ms for a shape, and the GEMM of 512 rows of 192 by 256 0.5 ms.
    """
    own = GemmRoute.TORCH if matrix.dtype == torch.bfloat16 else GemmRoute.ONEDNN
    return matrix.device.type == "cpu" and processor.HERE.has_onednn and default_route(matrix.dtype) is own


def has_own_route(*matrices: Tensor) -> bool:
    """Return True if these are plain CPU tensors of a format that has routes other than PyTorch's own."""
    dtype = matrices[0].dtype
    if default_route(dtype) is GemmRoute.TORCH and not any(dtype == layer[0] for layer in _routes):
        return False
    return all(type(m) in (Tensor, nn.Parameter) and m.is_cpu and m.dtype == dtype for m in matrices)


def matmul_nt(x_MK: Tensor, y_NK: Tensor) -> Tensor:
    """x yᵀ, [M, N]; autograd does not see it."""
    if not has_own_route(x_MK, y_NK):
        return x_MK @ y_NK.T
    # One operation to whatever watches operations: a policy of recomputation keeps the rounded result.
    is_opaque = torch.compiler.is_compiling() or default_route(x_MK.dtype) is GemmRoute.WIDENED
    return _opaque(x_MK, y_NK) if is_opaque else _by_route(x_MK, y_NK)


def batched_matmul(x_BMK: Tensor, y_BKN: Tensor) -> Tensor:
    """x y of each of B pairs, [B, M, N]; autograd does not see it."""
    if widens(x_BMK):
        return torch.bmm(x_BMK.float(), y_BKN.float()).to(x_BMK.dtype)
    return torch.bmm(x_BMK, y_BKN)


def widens(x: Tensor) -> bool:
    """Return True if GEMMs of the format and device of `x` run in fp32."""
    return x.device.type == "cpu" and default_route(x.dtype) is GemmRoute.WIDENED


def _by_route(x_MK: Tensor, y_NK: Tensor) -> Tensor:
    if not x_MK.numel():  # an expert without tokens; oneDNN takes no empty matrix
        return x_MK @ y_NK.T
    route = None
    if _routes:
        kernel, layer = identify_gemm(x_MK, y_NK)
        route = _routes.get(layer, {}).get(kernel)
    return BY_ROUTE[route or default_route(x_MK.dtype)](x_MK, y_NK)


def identify_gemm(x_MK: Tensor, y_NK: Tensor) -> tuple[GemmKind, LinearShape]:
    """The kind of the GEMM x yᵀ and the shape of its linear layer, from the memory layout of x and y."""
    (rows, depth), columns = x_MK.shape, y_NK.shape[0]
    if not x_MK.is_contiguous():
        return GemmKind.WEIGHT_GRADIENT, (x_MK.dtype, depth, rows, columns)
    if not y_NK.is_contiguous():
        return GemmKind.INPUT_GRADIENT, (x_MK.dtype, rows, depth, columns)
    return GemmKind.FORWARD, (x_MK.dtype, rows, columns, depth)


def _by_torch(x_MK: Tensor, y_NK: Tensor) -> Tensor:
    return x_MK @ y_NK.T


def _by_onednn(x_MK: Tensor, y_NK: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_MK, y_NK, None, "none", [], "")


def _widened(x_MK: Tensor, y_NK: Tensor) -> Tensor:
    product, y_NK = BY_ROUTE[default_route(torch.float32)], y_NK.float()
    (num_rows, depth), columns = x_MK.shape, y_NK.shape[0]
    at_once = max(LEAST_WIDENED_ROWS, WIDENED_NUMBERS // max(depth, columns))
    result_MN = x_MK.new_empty(num_rows, columns)
    for rows, result in zip(x_MK.split(at_once), result_MN.split(at_once), strict=True):
        result.copy_(product(rows.float(), y_NK))
    return result_MN


BY_ROUTE: Mapping[GemmRoute, Callable[[Tensor, Tensor], Tensor]] = {
    GemmRoute.TORCH: _by_torch,
    GemmRoute.ONEDNN: _by_onednn,
    GemmRoute.TORCH_ROWS: lambda x_MK, y_NK: _by_torch(x_MK.contiguous(), y_NK.contiguous()),
    GemmRoute.ONEDNN_ROWS: lambda x_MK, y_NK: _by_onednn(x_MK.contiguous(), y_NK.contiguous()),
    GemmRoute.WIDENED: _widened,
}

# For a compiled layer: PyTorch's compiler decomposes oneDNN's operation, and fails where the weight is no constant.
# Defined by hand, as an operation of `torch.library.custom_op` imports the compiler when it is first called.
_library = torch.library.Library("meshwright", "FRAGMENT")
_library.define("gemm(Tensor x_MK, Tensor y_NK) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_library.impl("gemm", _by_route, "CompositeExplicitAutograd")
_opaque = torch.ops.meshwright.gemm.default


@torch.library.register_fake("meshwright::gemm", lib=_library)
def _(x_MK: Tensor, y_NK: Tensor) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], y_NK.shape[0])


OWN_GEMMS = {_opaque}
"""The operations that `matmul_nt` calls in addition to PyTorch's usual ones."""
if processor.HERE.has_onednn:
    OWN_GEMMS.add(torch.ops.mkldnn._linear_pointwise.default)


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, [..., N]."""
    if not has_own_route(x, weight_NK) or not _is_routed(x, weight_NK):
        return functional.linear(x, weight_NK, bias_N)
    out = _Linear.apply(x, weight_NK)
    return out if bias_N is None else out + bias_N


def _is_routed(x: Tensor, weight_NK: Tensor) -> bool:
    """Return True if any GEMM of this layer has a route other than PyTorch's own."""
    n, k = weight_NK.shape
    return default_route(x.dtype) is not GemmRoute.TORCH or (x.dtype, x.numel() // k, n, k) in _routes


class Linear(nn.Linear):
    """nn.Linear with the routes of `linear`. Layers in 8 bits have their own function in the place of `multiply`."""

    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(linear)

    def forward(self, input: Tensor) -> Tensor:
        """[..., N]."""
        return self.multiply(input, self.weight, self.bias)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return matmul_nt(x.reshape(-1, x.shape[-1]), weight_NK).view(*x.shape[:-1], weight_NK.shape[0])

    @staticmethod
    @only_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        grad_MN = grads[0].reshape(-1, grads[0].shape[-1])
        wants_x, wants_weight = ctx.needs_input_grad
        return (
            matmul_nt(grad_MN, weight_NK.T).view_as(x) if wants_x else None,
            matmul_nt(grad_MN.T, x.reshape(-1, x.shape[-1]).T) if wants_weight else None,
        )
