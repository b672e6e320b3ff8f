"""GEMM of two quantised matrices, C = A B^T, with the scales inside the sum or behind it (Triton).

    tensor, row   C[m, n] = sA[m] sB[n] Σ A[m, k] B[n, k]                        scales behind the whole sum
    block         C[m, n] = Σ_g sA[m, g] sB[n, g] Σ_(k in g) A[m, k] B[n, k]     g of 128 values; square: sB[n/128, g]
    mx            as block, g of 32 values

Partial sums are fp32, as are scales; tensor cores of Hopper add 8-bit values with fewer bits than fp32 within a GEMM
instruction, which the sums over g in registers repair (DeepSeek-V3, section 3.3.2). The result is deterministic.

M rows of A, N rows of B, K columns that are summed; TM, TN, TK of a tile.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton compiles these functions from their source; as Python they have no types.

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.fp8.formats import BLOCK, MX_BLOCK, Scaling
from meshwright.kernels.fp8.triton_cast import element_types, mx_scales_of, scale_stride
from meshwright.kernels.operators import operator
from meshwright.kernels.sources import KernelSource, Sizes, Tile, Traffic
from meshwright.kernels.triton_route import launch

BEHIND, INSIDE = tl.constexpr(0), tl.constexpr(1)
GROUP = 8  # rows of tiles that follow one another, and share what the cache holds
SMALL = Tile(constants={"TM": 64, "TN": 128, "TK": BLOCK}, num_warps=4, num_stages=3)
LARGE = Tile(constants={"TM": 128, "TN": 128, "TK": BLOCK}, num_warps=8, num_stages=3)
NARROW = Tile(constants={"TM": 64, "TN": 128, "TK": MX_BLOCK}, num_warps=4, num_stages=3)
"""Scales of both operands inside the sum need registers of two tiles of C: LARGE spills on sm90 and gfx942."""


@triton.jit
def tile_of(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile, in an order in which neighbours share operands in the cache."""
    in_group = GROUP * tiles_n
    first = pid // in_group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + pid % in_group % height, pid % in_group // height


@triton.jit
def scales_at(ptr, rows, is_row, group, stride_row, MX: tl.constexpr):
    """Scales of `rows` in one group, fp32."""
    scale = tl.load(ptr + rows.to(tl.int64) * stride_row + group, mask=is_row, other=0)
    return mx_scales_of(scale.to(tl.int32)) if MX else scale


@triton.jit
def fp8_gemm_kernel(
    a_ptr, b_ptr, c_ptr, a_scale_ptr, b_scale_ptr, M, N, K, stride_am, stride_bn, stride_cm,
    stride_a_scale, stride_b_scale,
    WHERE: tl.constexpr, MX: tl.constexpr, B_ROWS: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of C. INSIDE: TK is the width of a group. `B_ROWS`: rows of B that share a scale."""
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, TM), tl.cdiv(N, TN), GROUP)
    m, n, k = tile_m * TM + tl.arange(0, TM), tile_n * TN + tl.arange(0, TN), tl.arange(0, TK)
    a_at = a_ptr + m.to(tl.int64)[:, None] * stride_am + k[None, :]
    b_at = b_ptr + n.to(tl.int64)[None, :] * stride_bn + k[:, None]
    total = tl.zeros((TM, TN), tl.float32)
    for group in range(0, tl.cdiv(K, TK)):
        left = k < K - group * TK
        a = tl.load(a_at, mask=(m < M)[:, None] & left[None, :], other=0.0)
        b = tl.load(b_at, mask=(n < N)[None, :] & left[:, None], other=0.0)
        if WHERE == INSIDE:
            a_scale = scales_at(a_scale_ptr, m, m < M, group, stride_a_scale, MX)
            b_scale = scales_at(b_scale_ptr, n // B_ROWS, n < N, group, stride_b_scale, MX)
            total += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
        else:
            total = tl.dot(a, b, total)
        a_at += TK
        b_at += TK
    if WHERE == BEHIND:
        a_scale = tl.load(a_scale_ptr + m.to(tl.int64) * stride_a_scale, mask=m < M, other=0.0)
        b_scale = tl.load(b_scale_ptr + n.to(tl.int64) * stride_b_scale, mask=n < N, other=0.0)
        total = total * a_scale[:, None] * b_scale[None, :]
    c_at = c_ptr + m.to(tl.int64)[:, None] * stride_cm + n[None, :]
    tl.store(c_at, total.to(c_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@operator("fp8_gemm", fake=lambda *given: given[0].new_empty(given[0].shape[0], given[3].shape[0], dtype=given[6]))
def fp8_gemm(
    a_MK: Tensor, a_scales: Tensor, a_scaling: str, b_NK: Tensor, b_scales: Tensor, b_scaling: str, dtype: torch.dtype
) -> Tensor:
    """A B^T in `dtype`, [M, N]."""
    (m, k), n = a_MK.shape, b_NK.shape[0]
    c_MN = a_MK.new_empty(m, n, dtype=dtype)
    if not k:
        return c_MN.zero_()
    a_MK, b_NK = a_MK.contiguous(), b_NK.contiguous()
    is_mx, inside = a_scaling == Scaling.MX, a_scaling not in (Scaling.TENSOR, Scaling.ROW)
    tile = _tile(m, is_mx=is_mx, has_both_inside=inside and b_scaling != Scaling.SQUARE)
    launch(
        fp8_gemm_kernel, (triton.cdiv(m, tile.constants["TM"]) * triton.cdiv(n, tile.constants["TN"]),),
        a_MK, b_NK, c_MN, a_scales, b_scales, m, n, k, k, k, n,
        scale_stride(a_scales, a_scaling), scale_stride(b_scales, b_scaling),
        on=a_MK, WHERE=INSIDE if inside else BEHIND, MX=is_mx, B_ROWS=BLOCK if b_scaling == Scaling.SQUARE else 1,
        **tile.constants, GROUP=GROUP, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return c_MN


def _tile(rows: int, *, is_mx: bool, has_both_inside: bool) -> Tile:
    if is_mx:
        return NARROW
    return SMALL if has_both_inside or rows <= SMALL.constants["TM"] else LARGE


def _traffic(sizes: Sizes, tile: Tile) -> Traffic:
    """A is read once, B once for each GROUP rows of tiles: the cache holds the rows of A that these share."""
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    sweeps = -(-m // (GROUP * tile.constants["TM"]))
    written = 2 * m * n
    return Traffic(moved_bytes=m * k + n * k * sweeps + written, least_bytes=m * k + n * k + written)


def _sources(name: str, *tiles: Tile, scale: str = "*fp32", **constants: Any) -> tuple[KernelSource, ...]:
    return tuple(
        KernelSource(
            name=name, op="fp8_gemm", function=fp8_gemm_kernel,
            signature={"a_ptr": element, "b_ptr": element, "c_ptr": "*bf16", "a_scale_ptr": scale, "b_scale_ptr": scale,
                       "M": "i32:16", "N": "i32:16", "K": "i32:16", "stride_am": "i32:16", "stride_bn": "i32:16",
                       "stride_cm": "i32:16", "stride_a_scale": "i32", "stride_b_scale": "i32"},
            constants={"GROUP": GROUP, "B_ROWS": 1} | constants,
            tiles=tuple(replace(tile, architectures=where) for tile in tiles),
            traffic=_traffic, sizes={"m": 8192, "n": 14336, "k": 4096}, is_memory_bound=False,
        )
        for element, where in element_types(scale).items()
    )  # fmt: skip


SOURCES = (
    *_sources("fp8_gemm_scaled_behind", SMALL, LARGE, WHERE=BEHIND.value, MX=False),
    *_sources("fp8_gemm_blocks", SMALL, WHERE=INSIDE.value, MX=False),
    *_sources("fp8_gemm_blocks_by_squares", SMALL, LARGE, WHERE=INSIDE.value, MX=False, B_ROWS=BLOCK),
    *_sources("fp8_gemm_mx", NARROW, WHERE=INSIDE.value, MX=True, scale="*u8"),
)
