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

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.kernels.dispatch import choose
from meshwright.kernels.routes import KernelCall, Refusal, Route
from meshwright.kernels.triton_route import serves_triton

ALIGNED = 8
"""Divides the widths of PyTorch's grouped GEMM: 16 bytes of bf16."""


def grouped_gemm(x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """[M, N], in the format of `x_MK`."""
    route = choose("grouped_gemm", x_MK, weight_ENK, counts_E)
    return ROUTES["grouped_gemm"][route].function(x_MK, weight_ENK, counts_E)


def reference(x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """The specification."""
    # unbind, not indexing: the gradient of an index is a whole zero stack for every expert
    parts = zip(x_MK.split(counts_E.tolist()), weight_ENK.unbind(), strict=True)
    return torch.cat([functional.linear(x, weight) for x, weight in parts])


def _library(x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    ends_E = counts_E.cumsum(0).to(torch.int32)
    return functional.grouped_mm(x_MK, weight_ENK.transpose(-2, -1), offs=ends_E)


def _library_serves(call: KernelCall) -> Refusal | None:
    if call.device != "cuda" or set(call.dtypes[:2]) != {"bfloat16"}:
        return Refusal(reason="PyTorch's grouped GEMM is for bf16 on GPUs")
    if not hasattr(functional, "grouped_mm"):
        return Refusal(reason="this PyTorch has no grouped GEMM")
    if call.has_shapes and (
        not call.shapes[0][0] or any(w % ALIGNED for shape in call.shapes[:2] for w in shape[1:])
    ):
        return Refusal(reason=f"it takes widths that {ALIGNED} divides, and at least one row")
    return None


def _triton(x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    from meshwright.kernels.experts.grouped_gemm_triton import grouped_rows

    return grouped_rows(x_MK, weight_ENK, counts_E)


ROUTES = {
    "grouped_gemm": {
        "reference": Route(name="reference", kind="reference", function=reference),
        "grouped_mm": Route(name="grouped_mm", kind="library", function=_library, serves=_library_serves),
        "triton": Route(name="triton", kind="triton", function=_triton, serves=serves_triton),
    }
}
