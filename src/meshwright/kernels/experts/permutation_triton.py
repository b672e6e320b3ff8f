"""Rows to experts and back in one pass each (Triton); definitions in `permutation`.

    copy       one row of P: read a token, times a weight or not, write a row; or write a row of zeros
    combine    one token of N: read its C rows, write their weighted sum
    weigh      one pair of a token and a choice: the gradient of its weight, a dot product

N tokens, C choices of a token, M = N C pairs, P rows: M and the rows of zeros, D hidden.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton compiles these functions from their source; as Python they have no types.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.experts.permutation import inverse
from meshwright.kernels.operators import operator, save_inputs
from meshwright.kernels.sources import KernelSource, Sizes, Tile, Traffic
from meshwright.kernels.triton_route import contiguous_rows, launch

TILE = Tile(constants={"BLOCK": 1024}, num_warps=4)


@triton.jit
def copy_rows_kernel(
    x_ptr, order_ptr, weights_ptr, rows_ptr, stride_x, D, C, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """rows[p] = w[order[p]] x[order[p] // C], or 0 of no pair (-1); one block of columns."""
    p = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(order_ptr + p)
    row = tl.zeros((BLOCK,), rows_ptr.dtype.element_ty)
    if pair >= 0:
        x = tl.load(x_ptr + pair // C * stride_x + column, mask=column < D, other=0.0)
        if HAS_WEIGHTS:
            x = x.to(tl.float32) * tl.load(weights_ptr + pair).to(tl.float32)
        row = x.to(rows_ptr.dtype.element_ty)
    tl.store(rows_ptr + p * D + column, row, mask=column < D)


@triton.jit
def combine_rows_kernel(
    rows_ptr, place_ptr, weights_ptr, out_ptr, stride_rows, D, C, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[n] = Σ_c w[n, c] rows[place[n, c]], one block of columns."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for c in range(0, C):
        row = tl.load(place_ptr + n * C + c)
        value = tl.load(rows_ptr + row * stride_rows + column, mask=column < D, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value = value * tl.load(weights_ptr + n * C + c).to(tl.float32)
        total += value
    tl.store(out_ptr + n * D + column, total.to(out_ptr.dtype.element_ty), mask=column < D)


@triton.jit
def weigh_rows_kernel(rows_ptr, place_ptr, grad_ptr, out_ptr, stride_rows, stride_grad, D, C, BLOCK: tl.constexpr):
    """d w[n, c] = grad[n] · rows[place[n, c]], of all choices of one token."""
    n = tl.program_id(0).to(tl.int64)
    for c in range(0, C):
        row = tl.load(place_ptr + n * C + c)
        total = tl.zeros((BLOCK,), tl.float32)
        for base in range(0, D, BLOCK):
            column = base + tl.arange(0, BLOCK)
            value = tl.load(rows_ptr + row * stride_rows + column, mask=column < D, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + n * stride_grad + column, mask=column < D, other=0.0).to(tl.float32)
            total += value * grad
        tl.store(out_ptr + n * C + c, tl.sum(total, 0))


def _copy(x_ND: Tensor, order_P: Tensor, weights_NC: Tensor | None, *, top_k: int) -> Tensor:
    x_ND, num_columns = contiguous_rows(x_ND), x_ND.shape[1]
    rows_PD = x_ND.new_empty(len(order_P), num_columns)
    launch(
        copy_rows_kernel, (len(order_P), triton.cdiv(num_columns, TILE.constants["BLOCK"])),
        x_ND, order_P.contiguous(), x_ND if weights_NC is None else weights_NC.contiguous(), rows_PD, x_ND.stride(0),
        num_columns, top_k, on=x_ND, HAS_WEIGHTS=weights_NC is not None, **TILE.constants, num_warps=TILE.num_warps,
    )  # fmt: skip
    return rows_PD


def _combine(rows_PD: Tensor, place_M: Tensor, weights_NC: Tensor | None, *, top_k: int) -> Tensor:
    rows_PD, num_columns = contiguous_rows(rows_PD), rows_PD.shape[1]
    out_ND = rows_PD.new_empty(len(place_M) // top_k, num_columns)
    launch(
        combine_rows_kernel, (len(out_ND), triton.cdiv(num_columns, TILE.constants["BLOCK"])),
        rows_PD, place_M, rows_PD if weights_NC is None else weights_NC.contiguous(), out_ND, rows_PD.stride(0),
        num_columns, top_k, on=rows_PD, HAS_WEIGHTS=weights_NC is not None, **TILE.constants, num_warps=TILE.num_warps,
    )  # fmt: skip
    return out_ND


@operator(
    "permute_rows_backward",
    fake=lambda grad_PD, order_P, num_tokens, top_k: grad_PD.new_empty(num_tokens, grad_PD.shape[1]),
)
def permute_rows_backward(grad_PD: Tensor, order_P: Tensor, num_tokens: int, top_k: int) -> Tensor:
    """Gradient of the tokens, [N, D]."""
    return _combine(grad_PD, inverse(order_P, num_pairs=num_tokens * top_k), None, top_k=top_k)


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_ND, order_P, top_k = inputs
    ctx.shape = (x_ND.shape[0], top_k)
    ctx.save_for_backward(order_P)


def _permute_gradient(ctx: Any, grad_PD: Tensor) -> tuple[Tensor, None, None]:
    return permute_rows_backward(grad_PD, *ctx.saved_tensors, *ctx.shape), None, None


@operator(
    "permute_rows",
    fake=lambda x_ND, order_P, top_k: x_ND.new_empty(order_P.shape[0], x_ND.shape[1]),
    saves=_save_permute,
    gradients=_permute_gradient,
)
def permute_rows(x_ND: Tensor, order_P: Tensor, top_k: int) -> Tensor:
    """Rows of the pairs in `order_P`, [P, D]."""
    return _copy(x_ND, order_P, None, top_k=top_k)


@operator(
    "unpermute_rows_backward",
    fake=lambda grad_ND, rows_PD, order_P, weights_NC: (
        rows_PD.new_empty(rows_PD.shape), weights_NC.new_empty(weights_NC.shape),
    ),
)  # fmt: skip
def unpermute_rows_backward(
    grad_ND: Tensor, rows_PD: Tensor, order_P: Tensor, weights_NC: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weights."""
    grad_ND, rows_PD, top_k = contiguous_rows(grad_ND), contiguous_rows(rows_PD), weights_NC.shape[1]
    grad_rows = _copy(grad_ND, order_P, weights_NC, top_k=top_k).to(rows_PD.dtype)
    place_M = inverse(order_P, num_pairs=weights_NC.numel())
    grad_weights = weights_NC.new_empty(weights_NC.shape)
    launch(
        weigh_rows_kernel, (len(weights_NC),), rows_PD, place_M, grad_ND, grad_weights, rows_PD.stride(0),
        grad_ND.stride(0), rows_PD.shape[1], top_k, on=rows_PD, **TILE.constants, num_warps=TILE.num_warps,
    )  # fmt: skip
    return grad_rows, grad_weights


def _unpermute_gradient(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, Tensor]:
    grad_rows, grad_weights = unpermute_rows_backward(grad_ND, *ctx.saved_tensors)
    return grad_rows, None, grad_weights


@operator(
    "unpermute_rows",
    fake=lambda rows_PD, order_P, weights_NC: rows_PD.new_empty(weights_NC.shape[0], rows_PD.shape[1]),
    saves=save_inputs,
    gradients=_unpermute_gradient,
)
def unpermute_rows(rows_PD: Tensor, order_P: Tensor, weights_NC: Tensor) -> Tensor:
    """Weighted sums of the rows of each token, [N, D]."""
    place_M = inverse(order_P, num_pairs=weights_NC.numel())
    return _combine(rows_PD, place_M, weights_NC, top_k=weights_NC.shape[1])


_SIZES = {"tokens": 8192, "choices": 8, "hidden": 7168}  # DeepSeek-V3, two sequences


def _rows_traffic(reads_of_rows: int, reads_of_tokens: int, writes: str) -> Any:
    """Bytes of 16 bits; a token that is read for each of its rows comes from the cache but once."""

    def traffic(sizes: Sizes, tile: Tile) -> Traffic:
        tokens = 2 * sizes["tokens"] * sizes["hidden"]
        rows, pairs = tokens * sizes["choices"], sizes["tokens"] * sizes["choices"]
        written = {"rows": rows, "tokens": tokens, "pairs": 4 * pairs}[writes]
        moved = reads_of_rows * rows + reads_of_tokens * tokens + written + 12 * pairs
        return Traffic(moved_bytes=moved, least_bytes=moved)

    return traffic


_INTEGERS = {"D": "i32:16", "C": "i32"}
SOURCES = (
    *(
        KernelSource(
            name=f"copy_rows{'_weighted' if weighted else ''}", op="permute", function=copy_rows_kernel,
            signature={"x_ptr": "*bf16", "order_ptr": "*i64", "weights_ptr": "*fp32", "rows_ptr": "*bf16",
                       "stride_x": "i32:16", **_INTEGERS},
            constants={"HAS_WEIGHTS": weighted}, tiles=(TILE,), traffic=_rows_traffic(0, 1, "rows"), sizes=_SIZES,
        )
        for weighted in (False, True)
    ),
    *(
        KernelSource(
            name=f"combine_rows{'_weighted' if weighted else ''}", op="unpermute", function=combine_rows_kernel,
            signature={"rows_ptr": "*bf16", "place_ptr": "*i64", "weights_ptr": "*fp32", "out_ptr": "*bf16",
                       "stride_rows": "i32:16", **_INTEGERS},
            constants={"HAS_WEIGHTS": weighted}, tiles=(TILE,), traffic=_rows_traffic(1, 0, "tokens"), sizes=_SIZES,
        )
        for weighted in (False, True)
    ),
    KernelSource(
        name="weigh_rows", op="unpermute", function=weigh_rows_kernel,
        signature={"rows_ptr": "*bf16", "place_ptr": "*i64", "grad_ptr": "*bf16", "out_ptr": "*fp32",
                   "stride_rows": "i32:16", "stride_grad": "i32:16", **_INTEGERS},
        tiles=(TILE,), traffic=_rows_traffic(1, 1, "pairs"), sizes=_SIZES,
    ),
)  # fmt: skip
