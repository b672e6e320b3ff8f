"""Grouped GEMMs whose tiles find their expert on the device (Triton); definitions in `grouped_gemm`.

The host knows M and E, and neither waits for the counts nor copies them: it launches as many tiles as there can be,
ceil(M / TM) + E, and a tile whose number is beyond the last one ends at once. No tile has rows of two experts.

M rows, E experts (EP: the next power of two), K inputs, N outputs; TM, TN, TK of a tile.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton compiles these functions from their source; as Python they have no types.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.experts.grouped_gemm import like_operands, like_rows
from meshwright.kernels.operators import operator, save_inputs
from meshwright.kernels.sources import KernelSource, Sizes, Tile, Traffic
from meshwright.kernels.triton_dot import dot
from meshwright.kernels.triton_route import contiguous_rows, launch

ROWS_TILE = Tile(constants={"TM": 64, "TN": 128, "TK": 32}, num_warps=4, num_stages=3)
WEIGHTS_TILE = Tile(constants={"TM": 32, "TN": 64, "TK": 128}, num_warps=4, num_stages=3)


@triton.jit
def grouped_rows_kernel(
    x_ptr, weight_ptr, counts_ptr, y_ptr, N, K, E, stride_x, stride_we, stride_wn, stride_wk,
    EP: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """One tile of Y: rows of one expert."""
    tile = tl.program_id(0)
    experts = tl.arange(0, EP)
    counts = tl.load(counts_ptr + experts, mask=experts < E, other=0).to(tl.int32)
    tiles = (counts + TM - 1) // TM
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert < E:
        is_before = experts < expert
        first = tl.sum(tl.where(is_before, counts, 0), 0)
        row = first + (tile - tl.sum(tl.where(is_before, tiles, 0), 0)) * TM + tl.arange(0, TM)
        is_row = row < first + tl.sum(tl.where(experts == expert, counts, 0), 0)
        n, k = tl.program_id(1) * TN + tl.arange(0, TN), tl.arange(0, TK)
        row_64 = row.to(tl.int64)
        weight_ptr += expert.to(tl.int64) * stride_we
        total = tl.zeros((TM, TN), tl.float32)
        for base in range(0, K, TK):
            inner = base + k
            x = tl.load(
                x_ptr + row_64[:, None] * stride_x + inner[None, :],
                mask=is_row[:, None] & (inner < K)[None, :],
                other=0.0,
            )
            w_at = weight_ptr + n.to(tl.int64)[None, :] * stride_wn + inner.to(tl.int64)[:, None] * stride_wk
            w = tl.load(w_at, mask=(n < N)[None, :] & (inner < K)[:, None], other=0.0)
            total = dot(x, w, total)
        y_at = y_ptr + row_64[:, None] * N + n[None, :]
        tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & (n < N)[None, :])


@triton.jit
def grouped_weights_kernel(
    grad_ptr, x_ptr, counts_ptr, out_ptr, N, K, E, stride_grad, stride_x,
    EP: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """One tile of dW of one expert: a sum over its rows, 0 where it has none."""
    expert = tl.program_id(0)
    experts = tl.arange(0, EP)
    counts = tl.load(counts_ptr + experts, mask=experts < E, other=0).to(tl.int32)
    first = tl.sum(tl.where(experts < expert, counts, 0), 0)
    stop = first + tl.sum(tl.where(experts == expert, counts, 0), 0)
    n, k = tl.program_id(1) * TN + tl.arange(0, TN), tl.program_id(2) * TK + tl.arange(0, TK)
    total = tl.zeros((TN, TK), tl.float32)
    for base in range(first, stop, TM):
        row = base + tl.arange(0, TM)
        row_64 = row.to(tl.int64)
        grad = tl.load(
            grad_ptr + row_64[:, None] * stride_grad + n[None, :],
            mask=(row < stop)[:, None] & (n < N)[None, :],
            other=0.0,
        )
        x = tl.load(
            x_ptr + row_64[:, None] * stride_x + k[None, :], mask=(row < stop)[:, None] & (k < K)[None, :], other=0.0
        )
        total = dot(tl.trans(grad), x, total)
    at = (expert.to(tl.int64) * N + n.to(tl.int64)[:, None]) * K + k[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def _rows(x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """Y of any weight strides: the transposed view of the weights gives dX."""
    x_MK, (num, n, k) = contiguous_rows(x_MK), weight_ENK.shape
    y_MN = x_MK.new_empty(len(x_MK), n)
    tile = ROWS_TILE
    most = triton.cdiv(len(x_MK), tile.constants["TM"]) + num if len(x_MK) else 0
    launch(
        grouped_rows_kernel, (most, triton.cdiv(n, tile.constants["TN"])),
        x_MK, weight_ENK, counts_E.contiguous(), y_MN, n, k, num, x_MK.stride(0), *weight_ENK.stride(),
        on=x_MK, EP=triton.next_power_of_2(num), **tile.constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return y_MN


@operator("grouped_rows_backward", fake=like_operands)
def grouped_rows_backward(grad_MN: Tensor, x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows and matrices."""
    grad_MN, x_MK, (num, n, k), tile = contiguous_rows(grad_MN), contiguous_rows(x_MK), weight_ENK.shape, WEIGHTS_TILE
    grad_x = _rows(grad_MN, weight_ENK.transpose(1, 2), counts_E)
    grad_weight = weight_ENK.new_empty(weight_ENK.shape)
    launch(
        grouped_weights_kernel, (num, triton.cdiv(n, tile.constants["TN"]), triton.cdiv(k, tile.constants["TK"])),
        grad_MN, x_MK, counts_E.contiguous(), grad_weight, n, k, num, grad_MN.stride(0), x_MK.stride(0),
        on=x_MK, EP=triton.next_power_of_2(num), **tile.constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return grad_x, grad_weight


def _gradients(ctx: Any, grad_MN: Tensor) -> tuple[Tensor, Tensor, None]:
    return *grouped_rows_backward(grad_MN, *ctx.saved_tensors), None


@operator("grouped_rows", fake=like_rows, saves=save_inputs, gradients=_gradients)
def grouped_rows(x_MK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """[M, N]: each row times the matrix of its expert."""
    return _rows(x_MK, weight_ENK, counts_E)


def _traffic(sizes: Sizes, tile: Tile) -> Traffic:
    """Rows, results and matrices, once each: the cache holds the rows of one tile and the matrix of one expert."""
    m, n, k, num = sizes["m"], sizes["n"], sizes["k"], sizes["experts"]
    moved = 2 * (m * k + m * n + num * n * k)
    return Traffic(moved_bytes=moved, least_bytes=moved)


_SIZES = {"m": 65536, "n": 2048, "k": 7168, "experts": 32}  # DeepSeek-V3, 8192 tokens, 8 expert ranks
_INTEGERS = {"N": "i32:16", "K": "i32:16", "E": "i32", "stride_x": "i32:16"}
SOURCES = (
    KernelSource(
        name="grouped_rows", op="grouped_gemm", function=grouped_rows_kernel,
        signature={"x_ptr": "*bf16", "weight_ptr": "*bf16", "counts_ptr": "*i64", "y_ptr": "*bf16", **_INTEGERS,
                   "stride_we": "i32:16", "stride_wn": "i32:16", "stride_wk": "1"},
        constants={"EP": 32}, tiles=(ROWS_TILE,), traffic=_traffic, sizes=_SIZES, is_memory_bound=False,
    ),
    KernelSource(
        name="grouped_rows_transposed", op="grouped_gemm", function=grouped_rows_kernel,
        signature={"x_ptr": "*bf16", "weight_ptr": "*bf16", "counts_ptr": "*i64", "y_ptr": "*bf16", **_INTEGERS,
                   "stride_we": "i32:16", "stride_wn": "1", "stride_wk": "i32:16"},
        constants={"EP": 32}, tiles=(ROWS_TILE,), traffic=_traffic, sizes=_SIZES, is_memory_bound=False,
    ),
    KernelSource(
        name="grouped_weights", op="grouped_gemm", function=grouped_weights_kernel,
        signature={"grad_ptr": "*bf16", "x_ptr": "*bf16", "counts_ptr": "*i64", "out_ptr": "*bf16", **_INTEGERS,
                   "stride_grad": "i32:16"},
        constants={"EP": 32}, tiles=(WEIGHTS_TILE,), traffic=_traffic, sizes=_SIZES, is_memory_bound=False,
    ),
)  # fmt: skip
