"""GEMM of two quantised matrices, C = A B^T: the routes of operation `fp8_gemm`."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.kernels.dispatch import choose
from meshwright.kernels.fp8.casting import serves_gemm
from meshwright.kernels.fp8.formats import Quantized, Scaling, require_scalings
from meshwright.kernels.routes import ANY, KernelCall, Refusal, Route

LIBRARY_MULTIPLE = 16
"""Divides every width of cuBLASLt's and hipBLASLt's fp8 GEMMs."""


def scaled_gemm(a_MK: Quantized, b_NK: Quantized, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A B^T in `dtype`, [M, N]. Both are scaled alike, or `a_MK` by blocks and `b_NK` by squares."""
    if a_MK.shape[1] != b_NK.shape[1]:
        raise InputError(
            "fp8_gemm: the factors sum over other numbers of columns", got=b_NK.shape[1], allowed=a_MK.shape[1]
        )
    require_scalings("fp8_gemm", a_MK, b_NK)
    flags = frozenset({f"scaling:{a_MK.scaling}", f"element:{a_MK.element}", f"element:{b_NK.element}"})
    route = choose("fp8_gemm", a_MK.values, b_NK.values, flags=flags)
    return ROUTES["fp8_gemm"][route].function(a_MK, b_NK, dtype=dtype)


def reference(a_MK: Quantized, b_NK: Quantized, *, dtype: torch.dtype) -> Tensor:
    """The specification: the dequantised matrices, multiplied in fp32 (in fp64 where `dtype` is)."""
    wide = torch.promote_types(dtype, torch.float32)
    return (a_MK.dequantized(wide) @ b_NK.dequantized(wide).T).to(dtype)


def _library(a_MK: Quantized, b_NK: Quantized, *, dtype: torch.dtype) -> Tensor:
    """PyTorch's `_scaled_mm` (cuBLASLt, hipBLASLt)."""
    b_scales = b_NK.scales if b_NK.scaling is Scaling.TENSOR else b_NK.scales.T
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]  # the only fp8 GEMM that torch 2.11 has
        a_MK.values, b_NK.values.T, scale_a=a_MK.scales, scale_b=b_scales, out_dtype=dtype
    )


def _library_serves(call: KernelCall) -> Refusal | None:
    if call.device != "cuda":
        return Refusal(reason="_scaled_mm multiplies on GPUs")
    if ANY in call.flags:
        return None
    if not call.flags & {f"scaling:{s}" for s in (Scaling.TENSOR, Scaling.ROW)}:
        return Refusal(reason="_scaled_mm is called for scales of tensors and rows")
    sizes = [call.shapes[0][1], *call.shapes[1]] if call.shapes else []
    if any(size % LIBRARY_MULTIPLE for size in sizes) or not all(map(all, call.shapes)):
        return Refusal(reason=f"the libraries take widths that {LIBRARY_MULTIPLE} divides, and no empty matrix")
    return None


def _triton(a_MK: Quantized, b_NK: Quantized, *, dtype: torch.dtype) -> Tensor:
    from meshwright.kernels.fp8.triton_gemm import fp8_gemm

    return fp8_gemm(a_MK.values, a_MK.scales, a_MK.scaling, b_NK.values, b_NK.scales, b_NK.scaling, dtype)


ROUTES = {
    "fp8_gemm": {
        "reference": Route(reference),
        "triton": Route(_triton, serves=serves_gemm),
        "scaled_mm": Route(_library, serves=_library_serves),
    }
}
