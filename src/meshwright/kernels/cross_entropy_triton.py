"""Cross-entropy in place as Triton kernels (formulas in `cross_entropy`).

A program takes a row, in blocks: one pass for its largest logit and the sum of exponentials, and one that
overwrites the row with the gradient. The second pass reads the row from the cache if the cache holds the rows
of all programs that run at once. Rows of weight zero are cleared without being read.

N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.architectures import architecture_of
from meshwright.kernels.operators import operator
from meshwright.kernels.sources import KernelSource, Sizes, Tile, Traffic
from meshwright.kernels.traffic import LOSS_OF_LOGITS, LOSS_OF_SHARDED_LOGITS
from meshwright.kernels.triton_route import launch

TILES = (
    Tile(constants={"BLOCK": 16384}, num_warps=32, architectures=("sm90",)),
    Tile(constants={"BLOCK": 8192}, num_warps=16, architectures=("sm100", "gfx942", "gfx950")),
)
"""Tiles whose rows in flight stay in the cache: 132 rows of 128,256 logits in bf16 on sm90."""

LEAST_BLOCK = 128
"""Values of a block at least, however small the vocabulary is."""


@triton.jit
def _capped(x, cap, CAPPED: tl.constexpr):
    if CAPPED:
        x = cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)  # tanh
    return x


@triton.jit
def _row_statistics(row, num_columns, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Largest logit of the row and the sum of exponentials over it."""
    largest = float("-inf")
    total = 0.0
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        if CAPPED:
            x = tl.where(column < num_columns, _capped(x, cap, CAPPED), float("-inf"))
        now = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - now) + tl.sum(tl.exp(x - now), axis=0)
        largest = now
    return largest, total


@triton.jit
def _write_gradient(row, num_columns, label, lse, weight, z_loss, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Overwrite the row; `label` is none of its columns where it is elsewhere."""
    factor = weight * (1.0 + 2.0 * z_loss * lse)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < num_columns
        x = _capped(tl.load(row + column, mask=mask, other=0.0).to(tl.float32), cap, CAPPED)
        gradient = factor * tl.exp(x - lse) - tl.where(column == label, weight, 0.0)
        if CAPPED:
            gradient *= 1.0 - (x / cap) * (x / cap)
        tl.store(row + column, gradient, mask=mask)


@triton.jit
def _clear(row, num_columns, BLOCK: tl.constexpr):
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(row + column, tl.zeros([BLOCK], tl.float32), mask=column < num_columns)


@triton.jit
def _fused(
    logits_NV, labels_N, weights_N, losses_N, row_stride, weight_stride, num_columns, z_loss, cap,
    WITH_GRAD: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits_NV + index * row_stride
    weight = tl.load(weights_N + index * weight_stride)
    if weight == 0.0:
        tl.store(losses_N + index, 0.0)
        if WITH_GRAD:
            _clear(row, num_columns, BLOCK)
    else:
        label = tl.load(labels_N + index)
        largest, total = _row_statistics(row, num_columns, cap, CAPPED, BLOCK)
        lse = largest + tl.log(total)
        of_label = _capped(tl.load(row + label).to(tl.float32), cap, CAPPED)  # `row_weights` has made it a column
        tl.store(losses_N + index, weight * (lse - of_label))
        if WITH_GRAD:
            tl.debug_barrier()  # every thread has read the label's logit before one overwrites it
            _write_gradient(row, num_columns, label, lse, weight, z_loss, cap, CAPPED, BLOCK)


@triton.jit
def _statistics(
    logits_NV, labels_N, found_3N, row_stride, num_rows, num_columns, first, cap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits_NV + index * row_stride
    largest, total = _row_statistics(row, num_columns, cap, CAPPED, BLOCK)
    label = tl.load(labels_N + index)
    is_here = (label >= first) & (label < first + num_columns) & (label >= 0)
    of_label = tl.load(row + tl.where(is_here, label - first, 0)).to(tl.float32)
    of_label = tl.where(is_here, _capped(of_label, cap, CAPPED), 0.0)
    tl.store(found_3N + index, largest)
    tl.store(found_3N + num_rows + index, total)
    tl.store(found_3N + 2 * num_rows + index, of_label)


@triton.jit
def _gradient(
    logits_NV, labels_N, lse_N, weights_N, row_stride, weight_stride, num_columns, first, z_loss, cap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits_NV + index * row_stride
    weight = tl.load(weights_N + index * weight_stride)
    if weight == 0.0:
        _clear(row, num_columns, BLOCK)
    else:
        label = tl.load(labels_N + index)
        local = tl.where(label >= 0, label - first, -1)
        _write_gradient(row, num_columns, local, tl.load(lse_N + index), weight, z_loss, cap, CAPPED, BLOCK)


@triton.jit
def _scale(x_NV, scale_N, row_stride, scale_stride, num_columns, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_N + index * scale_stride).to(tl.float32)
    if scale != 1.0:
        row = x_NV + index * row_stride
        for start in range(0, num_columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < num_columns
            x = tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
            tl.store(row + column, x * scale, mask=mask)


def _tile(num_columns: int, *, architecture: str) -> Tile:
    """The tile of the architecture, with a smaller block for a smaller vocabulary."""
    tile = next((t for t in TILES if architecture in t.architectures), TILES[-1])
    block = min(tile.constants["BLOCK"], max(LEAST_BLOCK, triton.next_power_of_2(num_columns)))
    return Tile(constants={"BLOCK": block}, num_warps=max(1, tile.num_warps * block // tile.constants["BLOCK"]))


def _launch(kernel: object, x_NV: Tensor, *arguments: object, **constants: object) -> None:
    tile = _tile(x_NV.shape[1], architecture=architecture_of(x_NV.device))
    rows = len(x_NV) if x_NV.shape[1] else 0
    launch(kernel, (rows,), x_NV, *arguments, on=x_NV, **tile.constants, **constants, num_warps=tile.num_warps)


@operator(
    "cross_entropy_fused_",
    fake=lambda logits_NV, *others, **settings: logits_NV.new_empty(logits_NV.shape[0], dtype=torch.float32),
    overwrites=("logits_NV",),
)
def fused(
    logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, *, z_loss: float, cap: float, with_grad: bool
) -> Tensor:
    """See `cross_entropy.RowFunctions`."""
    losses_N = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    _launch(
        _fused, logits_NV, labels_N.contiguous(), weights_N, losses_N, logits_NV.stride(0), weights_N.stride(0),
        logits_NV.shape[1], z_loss, cap, WITH_GRAD=with_grad, CAPPED=cap != 0,
    )  # fmt: skip
    return losses_N


@operator(
    "cross_entropy_statistics",
    fake=lambda logits_NV, *others, **settings: logits_NV.new_empty(3, logits_NV.shape[0], dtype=torch.float32),
)
def statistics(logits_NV: Tensor, labels_N: Tensor, *, cap: float, first: int) -> Tensor:
    """See `cross_entropy.RowFunctions`."""
    found_3N = torch.empty(3, len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    _launch(
        _statistics, logits_NV, labels_N.contiguous(), found_3N, logits_NV.stride(0), len(logits_NV),
        logits_NV.shape[1], first, cap, CAPPED=cap != 0,
    )  # fmt: skip
    return found_3N


@operator("cross_entropy_gradient_", overwrites=("logits_NV",))
def gradient(
    logits_NV: Tensor, labels_N: Tensor, lse_N: Tensor, weights_N: Tensor, *, z_loss: float, cap: float, first: int
) -> None:
    """See `cross_entropy.RowFunctions`."""
    _launch(
        _gradient, logits_NV, labels_N.contiguous(), lse_N.contiguous(), weights_N, logits_NV.stride(0),
        weights_N.stride(0), logits_NV.shape[1], first, z_loss, cap, CAPPED=cap != 0,
    )  # fmt: skip


@operator("scale_rows_", overwrites=("x_NV",))
def scale_rows(x_NV: Tensor, scale_N: Tensor) -> None:
    """See `cross_entropy.RowFunctions`."""
    _launch(_scale, x_NV, scale_N, x_NV.stride(0), scale_N.stride(0), x_NV.shape[1])


def _traffic(passes: int, rereads: int) -> Callable[[Sizes, Tile], Traffic]:
    def traffic(sizes: Sizes, tile: Tile) -> Traffic:
        row = 2 * sizes["vocab"]
        whole = sizes["rows"] * row
        return Traffic(
            moved_bytes=passes * whole,
            least_bytes=passes * whole,
            reread_bytes=rereads * whole,
            working_bytes=row if rereads else 0,
        )

    return traffic


_SIZES = {"rows": 512, "vocab": 128256}  # a chunk of Llama 3.1 8B
_ROW = {"logits_NV": "*bf16", "labels_N": "*i64", "row_stride": "i32:16", "num_columns": "i32:16", "cap": "fp32"}
_WEIGHTS = {"weights_N": "*fp32", "weight_stride": "i32", "z_loss": "fp32"}

SOURCES = (
    *(
        KernelSource(
            name=f"cross_entropy_fused{'_capped' if is_capped else ''}", op="linear_cross_entropy", function=_fused,
            signature={**_ROW, **_WEIGHTS, "losses_N": "*fp32"}, tiles=TILES, sizes=_SIZES,
            traffic=_traffic(LOSS_OF_LOGITS, 1), constants={"WITH_GRAD": True, "CAPPED": is_capped},
        )
        for is_capped in (False, True)
    ),
    KernelSource(
        name="cross_entropy_losses", op="linear_cross_entropy", function=_fused,
        signature={**_ROW, **_WEIGHTS, "losses_N": "*fp32"}, tiles=TILES, traffic=_traffic(1, 0), sizes=_SIZES,
        constants={"WITH_GRAD": False, "CAPPED": False},
    ),
    KernelSource(
        name="cross_entropy_statistics", op="linear_cross_entropy", function=_statistics,
        signature={**_ROW, "found_3N": "*fp32", "num_rows": "i32", "first": "i32"}, tiles=TILES,
        traffic=_traffic(1, 0), sizes=_SIZES, constants={"CAPPED": False},
    ),
    KernelSource(
        name="cross_entropy_gradient", op="linear_cross_entropy", function=_gradient,
        signature={**_ROW, **_WEIGHTS, "lse_N": "*fp32", "first": "i32"}, tiles=TILES, sizes=_SIZES,
        traffic=_traffic(LOSS_OF_SHARDED_LOGITS - 1, 0), constants={"CAPPED": False},
    ),
    KernelSource(
        name="scale_rows", op="linear_cross_entropy", function=_scale,
        signature={"x_NV": "*bf16", "scale_N": "*fp32", "row_stride": "i32:16", "scale_stride": "i32",
                   "num_columns": "i32:16"},
        tiles=TILES, traffic=_traffic(2, 0), sizes=_SIZES,
    ),
)  # fmt: skip
