"""Grouped GEMMs in 8 bits whose tiles find their expert on the device (Triton); definitions in `grouped_gemm`.

As in `experts.grouped_gemm_triton`, the host launches the most tiles that there can be and waits for nothing.
Scales of rows and tensors multiply the whole sum, scales of blocks and MX the sum over their group, as in
`triton_gemm`. The rows of an expert are a multiple of `grouped_gemm.ALIGNMENT`: no tile has rows of two
experts, and none is ragged.

P rows, E experts (EP: the next power of two), K inputs, N outputs; TM, TN, TK of a tile.
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
from meshwright.kernels.fp8.triton_cast import element_types, scale_stride
from meshwright.kernels.fp8.triton_gemm import BEHIND, INSIDE, scales_at
from meshwright.kernels.operators import operator
from meshwright.kernels.sources import KernelSource, Sizes, Tile, Traffic
from meshwright.kernels.triton_route import launch

ROWS_TILE = Tile(constants={"TM": 64, "TN": 128, "TK": BLOCK}, num_warps=4, num_stages=3)
ROWS_MX = Tile(constants={"TM": 64, "TN": 128, "TK": MX_BLOCK}, num_warps=4, num_stages=3)
WEIGHTS_TILE = Tile(constants={"TM": BLOCK, "TN": 64, "TK": 128}, num_warps=4, num_stages=3)
WEIGHTS_MX = Tile(constants={"TM": MX_BLOCK, "TN": 64, "TK": 128}, num_warps=4, num_stages=3)


@triton.jit
def fp8_grouped_rows_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, counts_ptr, y_ptr, P, N, K, E,
    stride_x_scale, stride_we_scale, stride_wn_scale,
    WHERE: tl.constexpr, MX: tl.constexpr, W_ROWS: tl.constexpr,
    EP: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """One tile of Y: rows of one expert, or zeros behind the last one's.

    INSIDE: TK is the width of a group. `W_ROWS`: rows of W that share a scale.
    """
    tile = tl.program_id(0)
    experts = tl.arange(0, EP)
    counts = tl.load(counts_ptr + experts, mask=experts < E, other=0).to(tl.int32)
    expert = tl.sum((tl.cumsum(counts, 0) <= tile * TM).to(tl.int32), 0)
    row = tile * TM + tl.arange(0, TM)
    n, k = tl.program_id(1) * TN + tl.arange(0, TN), tl.arange(0, TK)
    row_64, is_row = row.to(tl.int64), row < P
    total = tl.zeros((TM, TN), tl.float32)
    if expert < E:
        expert_64 = expert.to(tl.int64)
        weight_scale_ptr += expert_64 * stride_we_scale
        x_at = x_ptr + row_64[:, None] * K + k[None, :]
        w_at = weight_ptr + (expert_64 * N + n.to(tl.int64)[None, :]) * K + k[:, None]
        for group in range(0, tl.cdiv(K, TK)):
            left = k < K - group * TK
            x = tl.load(x_at, mask=is_row[:, None] & left[None, :], other=0.0)
            w = tl.load(w_at, mask=(n < N)[None, :] & left[:, None], other=0.0)
            if WHERE == INSIDE:
                x_scale = scales_at(x_scale_ptr, row, is_row, group, stride_x_scale, MX)
                w_scale = scales_at(weight_scale_ptr, n // W_ROWS, n < N, group, stride_wn_scale, MX)
                total += tl.dot(x, w) * x_scale[:, None] * w_scale[None, :]
            else:
                total = tl.dot(x, w, total)
            x_at += TK
            w_at += TK
        if WHERE == BEHIND:
            x_scale = tl.load(x_scale_ptr + row_64 * stride_x_scale, mask=is_row, other=0.0)
            w_scale = tl.load(weight_scale_ptr + n.to(tl.int64) * stride_wn_scale, mask=n < N, other=0.0)
            total = total * x_scale[:, None] * w_scale[None, :]
    y_at = y_ptr + row_64[:, None] * N + n[None, :]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & (n < N)[None, :])


@triton.jit
def fp8_grouped_weights_kernel(
    grad_ptr, grad_scale_ptr, x_ptr, x_scale_ptr, counts_ptr, out_ptr, N, K, E, P,
    stride_grad_scale, stride_x_scale,
    WHERE: tl.constexpr, MX: tl.constexpr,
    EP: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """One tile of dW of one expert: a sum over its rows, 0 where it has none. INSIDE: TM rows share a scale."""
    expert = tl.program_id(0)
    experts = tl.arange(0, EP)
    counts = tl.load(counts_ptr + experts, mask=experts < E, other=0).to(tl.int32)
    first = tl.sum(tl.where(experts < expert, counts, 0), 0)
    stop = first + tl.sum(tl.where(experts == expert, counts, 0), 0)
    first = first // 128 * 128  # it is a multiple: Triton 3.4 keeps no hint of a sum
    n, k = tl.program_id(1) * TN + tl.arange(0, TN), tl.program_id(2) * TK + tl.arange(0, TK)
    n_64, k_64 = n.to(tl.int64), k.to(tl.int64)
    total = tl.zeros((TN, TK), tl.float32)
    row = first + tl.arange(0, TM)
    grad_at = grad_ptr + n_64[:, None] * P + row[None, :]
    x_at = x_ptr + k_64[None, :] * P + row[:, None]
    for base in range(first, stop, TM):
        grad = tl.load(grad_at, mask=(n < N)[:, None], other=0.0)
        x = tl.load(x_at, mask=(k < K)[None, :], other=0.0)
        if WHERE == INSIDE:
            grad_scale = scales_at(grad_scale_ptr, n, n < N, base // TM, stride_grad_scale, MX)
            x_scale = scales_at(x_scale_ptr, k, k < K, base // TM, stride_x_scale, MX)
            total += tl.dot(grad, x) * grad_scale[:, None] * x_scale[None, :]
        else:
            total = tl.dot(grad, x, total)
        grad_at += TM
        x_at += TM
    if WHERE == BEHIND:
        grad_scale = tl.load(grad_scale_ptr + n_64 * stride_grad_scale, mask=n < N, other=0.0)
        x_scale = tl.load(x_scale_ptr + k_64 * stride_x_scale, mask=k < K, other=0.0)
        total = total * grad_scale[:, None] * x_scale[None, :]
    at = (expert.to(tl.int64) * N + n_64[:, None]) * K + k[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


@operator(
    "fp8_grouped_rows", fake=lambda *given: given[0].new_empty(given[0].shape[0], given[3].shape[1], dtype=given[7])
)
def fp8_grouped_rows(
    x_PK: Tensor,
    x_scales: Tensor,
    x_scaling: str,
    weight_ENK: Tensor,
    weight_scales: Tensor,
    weight_scaling: str,
    counts_E: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Each row times the matrix of its expert, [P, N] in `dtype`."""
    (num_rows, k), (num, n, _) = x_PK.shape, weight_ENK.shape
    y_PN = x_PK.new_empty(num_rows, n, dtype=dtype)
    is_mx, where = _kind(x_scaling)
    tile = ROWS_MX if is_mx else ROWS_TILE
    launch(
        fp8_grouped_rows_kernel,
        (triton.cdiv(num_rows, tile.constants["TM"]), triton.cdiv(n, tile.constants["TN"])),
        x_PK.contiguous(), x_scales, weight_ENK.contiguous(), weight_scales, counts_E.contiguous(), y_PN,
        num_rows, n, k, num,
        scale_stride(x_scales, x_scaling), weight_scales.stride(0), scale_stride(weight_scales, weight_scaling),
        on=x_PK, WHERE=where, MX=is_mx, W_ROWS=BLOCK if weight_scaling == Scaling.SQUARE else 1,
        EP=triton.next_power_of_2(num), **tile.constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return y_PN


@operator(
    "fp8_grouped_weights",
    fake=lambda *given: given[0].new_empty(given[6].shape[0], given[0].shape[0], given[3].shape[0], dtype=given[7]),
)
def fp8_grouped_weights(
    grad_NP: Tensor,
    grad_scales: Tensor,
    grad_scaling: str,
    x_KP: Tensor,
    x_scales: Tensor,
    x_scaling: str,
    counts_E: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Sums over the rows of each expert, [E, N, K] in `dtype`."""
    (n, num_rows), k, num = grad_NP.shape, x_KP.shape[0], len(counts_E)
    out_ENK = grad_NP.new_empty(num, n, k, dtype=dtype)
    is_mx, where = _kind(grad_scaling)
    tile = WEIGHTS_MX if is_mx else WEIGHTS_TILE
    launch(
        fp8_grouped_weights_kernel, (num, triton.cdiv(n, tile.constants["TN"]), triton.cdiv(k, tile.constants["TK"])),
        grad_NP.contiguous(), grad_scales, x_KP.contiguous(), x_scales, counts_E.contiguous(), out_ENK, n, k, num,
        num_rows, scale_stride(grad_scales, grad_scaling), scale_stride(x_scales, x_scaling),
        on=x_KP, WHERE=where, MX=is_mx, EP=triton.next_power_of_2(num), **tile.constants,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out_ENK


def _kind(scaling: str) -> tuple[bool, int]:
    """True for scales of MX, and the place where scales multiply."""
    is_behind = scaling in (Scaling.TENSOR, Scaling.ROW)
    return scaling == Scaling.MX, BEHIND.value if is_behind else INSIDE.value


def _traffic(sizes: Sizes, tile: Tile) -> Traffic:
    """Rows, results and matrices, once each: the cache holds the rows of one tile and the matrix of one expert."""
    m, n, k, num = sizes["m"], sizes["n"], sizes["k"], sizes["experts"]
    moved = m * k + 2 * m * n + num * n * k
    return Traffic(moved_bytes=moved, least_bytes=moved)


def _weights_traffic(sizes: Sizes, tile: Tile) -> Traffic:
    """Both operands once in 8 bits, the gradients of the matrices in 16."""
    m, n, k, num = sizes["m"], sizes["n"], sizes["k"], sizes["experts"]
    moved = m * k + m * n + 2 * num * n * k
    return Traffic(moved_bytes=moved, least_bytes=moved)


_SIZES = {"m": 65536, "n": 2048, "k": 7168, "experts": 32}  # DeepSeek-V3, 8192 tokens, 8 expert ranks
_INTEGERS = {"N": "i32:16", "K": "i32:16", "E": "i32"}


def _sources(name: str, rows: Tile, weights: Tile, *, scale: str = "*fp32", **constants: Any) -> list[KernelSource]:
    """Both kernels, for each of `element_types`."""
    found = []
    for element, where in element_types(scale).items():
        found.append(KernelSource(
            name=f"fp8_grouped_rows_{name}", op="fp8_grouped_gemm", function=fp8_grouped_rows_kernel,
            signature={"x_ptr": element, "weight_ptr": element, "x_scale_ptr": scale, "weight_scale_ptr": scale,
                       "counts_ptr": "*i64", "y_ptr": "*bf16", "P": "i32:16", **_INTEGERS, "stride_x_scale": "i32",
                       "stride_we_scale": "i32", "stride_wn_scale": "i32"},
            constants={"EP": 32, "W_ROWS": 1} | constants, tiles=(replace(rows, architectures=where),),
            traffic=_traffic, sizes=_SIZES, is_memory_bound=False,
        ))  # fmt: skip
        if constants.get("W_ROWS", 1) > 1:
            continue  # no operand of dW has scales of squares
        found.append(KernelSource(
            name=f"fp8_grouped_weights_{name}", op="fp8_grouped_gemm", function=fp8_grouped_weights_kernel,
            signature={"grad_ptr": element, "x_ptr": element, "grad_scale_ptr": scale, "x_scale_ptr": scale,
                       "counts_ptr": "*i64", "out_ptr": "*bf16", **_INTEGERS, "P": "i32:16",
                       "stride_grad_scale": "i32", "stride_x_scale": "i32"},
            constants={"EP": 32} | constants, tiles=(replace(weights, architectures=where),),
            traffic=_weights_traffic, sizes=_SIZES, is_memory_bound=False,
        ))  # fmt: skip
    return found


SOURCES = (
    *_sources("scaled_behind", ROWS_TILE, WEIGHTS_TILE, WHERE=BEHIND.value, MX=False),
    *_sources("blocks", ROWS_TILE, WEIGHTS_TILE, WHERE=INSIDE.value, MX=False),
    *_sources("blocks_by_squares", ROWS_TILE, WEIGHTS_TILE, WHERE=INSIDE.value, MX=False, W_ROWS=BLOCK),
    *_sources("mx", ROWS_MX, WEIGHTS_MX, WHERE=INSIDE.value, MX=True, scale="*u8"),
)
