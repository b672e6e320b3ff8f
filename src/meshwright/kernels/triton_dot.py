"""GEMM of two tiles, with equal results in Triton's interpreter."""

# pyright: reportArgumentType=false
# Triton compiles this function from its source; as Python it has no types.

from __future__ import annotations

import triton
import triton.language as tl

from meshwright.kernels.triton_route import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def dot(a, b, total):
    """total + a b, added in fp32; fp32 operands are not rounded to TF32.

    Triton's interpreter multiplies the bit patterns of bf16 as whole numbers: there operands are widened first, which
    is exact.
    """
    if INTERPRETED and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
