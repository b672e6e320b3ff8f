"""GEMMs of groups of rows, each with a matrix of its own: the routes of `grouped_gemm`.

    Y[m] = W_e X[m]        e the expert of row m; the first counts[0] rows belong to expert 0, and so on
    dX[m] = W_e^T dY[m]        dW_e = Σ_(m of e) dY[m] X[m]^T

    route        computes by                                            serves
    reference    one GEMM an expert; the host waits for the counts      all
    grouped_mm   PyTorch's grouped GEMM (CUTLASS, CK)                   bf16 on a GPU
    triton       ours: tiles find their expert on the device            all on a GPU

M rows, E experts, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.kernels.dispatch import choose
from meshwright.kernels.linear import linear, matmul_nt
from meshwright.kernels.operators import operator, save_inputs
from meshwright.kernels.routes import KernelCall, Refusal, Route
from meshwright.kernels.shapes import require_format, require_shapes
from meshwright.kernels.triton_route import serves_triton

ALIGNED = 8
"""Divides the widths of PyTorch's grouped GEMM: 16 bytes of bf16."""


def grouped_gemm(x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """[M, N], in the format of `x_MK`."""
    require_shapes("grouped_gemm", x_MK=x_MK, weight_ENK=weight_ENK, counts_E=counts_E)
    require_format("grouped_gemm", x=x_MK, weight=weight_ENK)
    route = choose("grouped_gemm", x_MK, weight_ENK, counts_E)
    return ROUTES["grouped_gemm"][route].function(x_MK, weight_ENK, counts_E)


def reference(x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """The specification."""
    if torch.compiler.is_compiling():
        return opaque_reference(x_MK, weight_ENK, counts_E)
    # unbind, not indexing: the gradient of an index is a whole zero stack for every expert
    parts = zip(parts_of(x_MK, counts_E), weight_ENK.unbind(), strict=True)
    return joined([linear(x, weight) for x, weight in parts], num_rows=len(x_MK))


def parts_of(x_MK: Tensor, counts_E: Tensor) -> Sequence[Tensor]:
    """The rows of each expert. Rows of zeros behind the last expert are no one's."""
    counts = counts_E.tolist()
    return x_MK.split([*counts, len(x_MK) - sum(counts)])[:-1]


def joined(parts: list[Tensor], *, num_rows: int) -> Tensor:
    """The parts below each other, with rows of zeros behind them up to `num_rows`."""
    missing = num_rows - sum(map(len, parts))
    return torch.cat([*parts, parts[0].new_zeros(missing, parts[0].shape[1])] if missing else parts)


def like_rows(x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """Return an empty result of a grouped GEMM."""
    return x_MK.new_empty(x_MK.shape[0], weight_ENK.shape[1])


def like_operands(grad_MN: Tensor, x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty gradients of rows and matrices."""
    return x_MK.new_empty(x_MK.shape), weight_ENK.new_empty(weight_ENK.shape)


@operator("grouped_reference_backward", fake=like_operands)
def opaque_gradients(grad_MN: Tensor, x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows and matrices, by the GEMMs of `reference`."""
    parts = list(zip(parts_of(grad_MN, counts_E), parts_of(x_MK, counts_E), weight_ENK.unbind(), strict=True))
    grad_x = joined([matmul_nt(grad, weight.T) for grad, _, weight in parts], num_rows=len(x_MK))
    return grad_x, torch.stack([matmul_nt(grad.T, x.T) for grad, x, _ in parts])


def _gradients(ctx: Any, grad_MN: Tensor) -> tuple[Tensor, Tensor, None]:
    return *opaque_gradients(grad_MN, *ctx.saved_tensors), None


# For a compiled layer: the host waits for the counts, which a graph cannot.
@operator("grouped_reference", fake=like_rows, saves=save_inputs, gradients=_gradients)
def opaque_reference(x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """`reference` as one operation."""
    return reference(x_MK, weight_ENK, counts_E)


def _library(x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    ends_E = counts_E.cumsum(0).to(torch.int32)
    return functional.grouped_mm(x_MK, weight_ENK.transpose(-2, -1), offs=ends_E)


def _library_serves(call: KernelCall) -> Refusal | None:
    if call.device != "cuda" or set(call.dtypes[:2]) != {"bfloat16"}:
        return Refusal(reason="PyTorch's grouped GEMM is for bf16 on GPUs")
    if not hasattr(functional, "grouped_mm"):
        return Refusal(reason="this PyTorch has no grouped GEMM")
    if call.has_shapes and (not call.shapes[0][0] or any(w % ALIGNED for shape in call.shapes[:2] for w in shape[1:])):
        return Refusal(reason=f"it takes widths that {ALIGNED} divides, and at least one row")
    return None


def _triton(x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    from meshwright.kernels.experts.grouped_gemm_triton import grouped_rows

    return grouped_rows(x_MK, weight_ENK, counts_E)


ROUTES = {
    "grouped_gemm": {
        "reference": Route(reference),
        "grouped_mm": Route(_library, serves=_library_serves),
        "triton": Route(_triton, serves=serves_triton),
    }
}
