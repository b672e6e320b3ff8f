"""GEMMs of groups of rows in 8 or 4 bits, each with the matrix of its expert: the routes of `fp8_grouped_gemm`.

    Y[m] = W_e X[m]                     X by rows [P, K], W a stack [E, N, K]; the transposed stack gives dX
    dW_e = Σ_(m of e) dY[m] X[m]^T      both operands transposed, [N, P] and [K, P]

The first counts[0] of the P rows belong to expert 0, and so on. Counts and P are multiples of `ALIGNMENT`: the caller
has put rows of zeros between (`aligned_rows`). So a scale of several rows belongs to one expert, and tiles are not
ragged. Rows behind the last expert's are zeros, in Y too.

    route               computes by                                             serves
    reference           one GEMM an expert, dequantised; the host waits         all
    triton              ours: tiles find their expert on the device             8 bits on a GPU
    scaled_grouped_mm   PyTorch's grouped GEMM                                  Y with scales of rows or tensors, e4m3

P rows, E experts, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.kernels.dispatch import choose
from meshwright.kernels.fp8.casting import serves_gemm
from meshwright.kernels.fp8.formats import BLOCK, Element, Quantized, Scaling, require_scalings
from meshwright.kernels.fp8.gemm import LIBRARY_MULTIPLE
from meshwright.kernels.operators import operator
from meshwright.kernels.routes import ANY, KernelCall, Refusal, Route

ALIGNMENT = BLOCK
"""Rows of an expert are a multiple of this: the largest number of values that share a scale."""
ROWS, WEIGHTS = "rows", "weights"


def grouped_rows(x_PK: Quantized, weight_ENK: Quantized, counts_E: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Each row times the matrix of its expert, [P, N]."""
    return _chosen(ROWS, x_PK, weight_ENK, counts_E, dtype=dtype)


def grouped_weights(grad_NP: Quantized, x_KP: Quantized, counts_E: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Sums over the rows of each expert, [E, N, K]; 0 where it has none."""
    return _chosen(WEIGHTS, grad_NP, x_KP, counts_E, dtype=dtype)


def _chosen(which: str, a: Quantized, b: Quantized, counts_E: Tensor, *, dtype: torch.dtype) -> Tensor:
    num_experts = b.values.shape[0] if b.is_stack else len(counts_E)
    if a.shape[1] != b.shape[1] or num_experts != len(counts_E):
        got = f"{a.shape[1]} and {b.shape[1]} columns, {num_experts} matrices for {len(counts_E)} experts"
        raise InputError("fp8_grouped_gemm: factors that do not fit together", got=got)
    require_scalings("fp8_grouped_gemm", a, b)
    flags = frozenset({which, f"scaling:{a.scaling}", f"element:{a.element}", f"element:{b.element}"})
    route = choose("fp8_grouped_gemm", a.values, b.values, counts_E, flags=flags)
    return ROUTES["fp8_grouped_gemm"][route].function(a, b, counts_E, dtype=dtype)


def reference(a: Quantized, b: Quantized, counts_E: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The specification: the dequantised matrices, multiplied in fp32 (in fp64 where `dtype` is)."""
    if torch.compiler.is_compiling():
        operands = (a.values, a.scales, a.element, a.scaling, a.shape[1],
                    b.values, b.scales, b.element, b.scaling, b.shape[1])  # fmt: skip
        return opaque_reference(*operands, counts_E, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    counts = counts_E.tolist()
    if b.is_stack:
        x_PK, num = a.dequantized(wide), b.shape[0]
        out_PN = x_PK.new_zeros(len(x_PK), num)
        for expert, rows in enumerate(_ranges(counts)):
            out_PN[rows] = x_PK[rows] @ b.matrix(expert).dequantized(wide).T
        return out_PN.to(dtype)
    grad_NP, x_KP = a.dequantized(wide), b.dequantized(wide)
    return torch.stack([grad_NP[:, rows] @ x_KP[:, rows].T for rows in _ranges(counts)]).to(dtype)


def _empty(*given: Any) -> Tensor:
    a_values, b_values, counts_E, dtype = given[0], given[5], *given[-2:]
    rows = a_values.shape[0]
    shape = (rows, b_values.shape[1]) if b_values.dim() == 3 else (counts_E.shape[0], rows, b_values.shape[0])
    return a_values.new_empty(shape, dtype=dtype)


# For a compiled layer: the host waits for the counts, which a graph cannot.
@operator("fp8_grouped_reference", fake=_empty)
def opaque_reference(
    a_values: Tensor, a_scales: Tensor, a_element: str, a_scaling: str, a_columns: int,
    b_values: Tensor, b_scales: Tensor, b_element: str, b_scaling: str, b_columns: int,
    counts_E: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`reference` of values, scales and their form; `b_values` of three dimensions are a stack."""
    a, b = (
        Quantized(
            values=values,
            scales=scales,
            element=Element(element),
            scaling=Scaling(scaling),
            shape=(values.shape[-2], columns),
        )
        for values, scales, element, scaling, columns in (
            (a_values, a_scales, a_element, a_scaling, a_columns),
            (b_values, b_scales, b_element, b_scaling, b_columns),
        )
    )
    return reference(a, b, counts_E, dtype=dtype)


def _ranges(counts: list[int]) -> list[slice]:
    """Rows of each expert."""
    stops = torch.tensor(counts).cumsum(0).tolist()
    return [slice(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def _library(x_PK: Quantized, weight_ENK: Quantized, counts_E: Tensor, *, dtype: torch.dtype) -> Tensor:
    """PyTorch's `_scaled_grouped_mm` (CUTLASS, CK), which takes a scale for each row of both operands."""
    num_rows, (num_experts, n, _) = len(x_PK.values), weight_ENK.values.shape
    return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]  # PyTorch's only one
        x_PK.values,
        weight_ENK.values.transpose(-2, -1),
        x_PK.scales.expand(num_rows, 1).reshape(num_rows).contiguous(),
        weight_ENK.scales.expand(num_experts, n, 1).reshape(num_experts, n).contiguous(),
        offs=counts_E.cumsum(0).to(torch.int32),
        out_dtype=dtype,
    )


def _library_serves(call: KernelCall) -> Refusal | None:
    if call.device != "cuda":
        return Refusal(reason="_scaled_grouped_mm multiplies on GPUs")
    if not hasattr(torch, "_scaled_grouped_mm"):
        return Refusal(reason="this PyTorch has no _scaled_grouped_mm")
    if ANY in call.flags:
        return None
    if WEIGHTS in call.flags:
        return Refusal(reason="_scaled_grouped_mm is called for rows; sums over rows want scales of each expert")
    if not call.flags & {f"scaling:{s}" for s in (Scaling.TENSOR, Scaling.ROW)}:
        return Refusal(reason="_scaled_grouped_mm has scales of rows")
    if call.flags & {f"element:{e}" for e in (Element.E5M2, Element.E5M2_FNUZ)}:
        return Refusal(reason="_scaled_grouped_mm multiplies e4m3")
    if call.has_shapes and (
        not call.shapes[0][0] or any(w % LIBRARY_MULTIPLE for shape in call.shapes[:2] for w in shape[1:])
    ):
        return Refusal(reason=f"it takes widths that {LIBRARY_MULTIPLE} divides, and at least one row")
    return None


def _triton(a: Quantized, b: Quantized, counts_E: Tensor, *, dtype: torch.dtype) -> Tensor:
    from meshwright.kernels.fp8 import triton_grouped_gemm as kernels

    operation = kernels.fp8_grouped_rows if b.is_stack else kernels.fp8_grouped_weights
    return operation(a.values, a.scales, a.scaling, b.values, b.scales, b.scaling, counts_E, dtype)


ROUTES = {
    "fp8_grouped_gemm": {
        "reference": Route(reference),
        "triton": Route(_triton, serves=serves_gemm),
        "scaled_grouped_mm": Route(_library, serves=_library_serves),
    }
}
