"""RMSNorm as Triton kernels (formulas in `rms_norm`): one pass forward, one backward.

A program holds whole rows in registers. It takes rows wider than the largest tile block after block, twice:
for the sum, and from the cache again for the results. In the backward pass each of P programs takes every
P-th row and adds up its part of the weight's gradient [P, D]. The sum over programs has a fixed order: the
same bits each time.

N rows, D columns, P programs of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.architectures import architecture_of
from meshwright.kernels.operators import operator
from meshwright.kernels.sources import KernelSource, Sizes, Tile, Traffic
from meshwright.kernels.traffic import ADD_RMS_NORM, RMS_NORM
from meshwright.kernels.triton_route import launch

TILES = (
    Tile(constants={"BLOCK": 1024}, num_warps=4),
    Tile(constants={"BLOCK": 4096}, num_warps=8),
    Tile(constants={"BLOCK": 8192}, num_warps=16),
    Tile(constants={"BLOCK": 16384}, num_warps=32, architectures=("sm90", "sm100")),
    Tile(constants={"BLOCK": 16384}, num_warps=16, architectures=("gfx942", "gfx950")),
)
WIDE_FORWARD_TILES = (
    Tile(constants={"BLOCK": 16384}, num_warps=32, architectures=("sm90", "sm100")),
    Tile(constants={"BLOCK": 8192}, num_warps=16, architectures=("gfx942", "gfx950")),
)
WIDE_BACKWARD_TILES = (
    Tile(constants={"BLOCK": 8192}, num_warps=32, architectures=("sm90", "sm100")),
    Tile(constants={"BLOCK": 8192}, num_warps=16, architectures=("gfx942", "gfx950")),
)
"""Tiles for rows that no tile above holds. On NVIDIA one program fills a multiprocessor, so that the rows
of all stay in the cache; wider blocks of the backward pass spill."""
NUM_PROGRAMS = 512
"""Programs of a backward pass: two to four for each multiprocessor of today's devices."""
NUM_WIDE_PROGRAMS = 128
"""Programs of a backward pass over wide rows, whose part of the weight's gradient is in the cache, not in registers."""


@triton.jit
def _weight(weight_D, column, mask, CENTERED: tl.constexpr):
    weight = tl.load(weight_D + column, mask=mask, other=0.0).to(tl.float32)
    if CENTERED:
        weight += 1.0
    return weight


@triton.jit
def _summed(x_D, residual_D, total_D, mask, ADDS: tl.constexpr):
    """Columns of a row, with the residual stream added and the sum stored where the norm adds."""
    x = tl.load(x_D, mask=mask, other=0.0)
    if ADDS:
        residual = tl.load(residual_D, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_D, x, mask=mask)
    return x.to(tl.float32)


@triton.jit
def _forward(
    x_ND, residual_ND, weight_D, out_ND, total_ND, scale_N, x_stride, residual_stride, num_columns, epsilon,
    ADDS: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < num_columns
    x = _summed(
        x_ND + row * x_stride + column, residual_ND + row * residual_stride + column,
        total_ND + row * num_columns + column, mask, ADDS,
    )  # fmt: skip
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / num_columns + epsilon)
    tl.store(scale_N + row, scale)
    weight = _weight(weight_D, column, mask, CENTERED)
    tl.store(out_ND + row * num_columns + column, weight * (x * scale), mask=mask)


@triton.jit
def _backward(
    grad_ND, grad_total_ND, total_ND, weight_D, scale_N, grad_x_ND, grad_weight_PD,
    grad_stride, grad_total_stride, total_stride, num_rows, num_columns, num_programs,
    ADDS: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    mask = column < num_columns
    weight = _weight(weight_D, column, mask, CENTERED)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    row = tl.program_id(0).to(tl.int64)
    for _ in range(tl.program_id(0), num_rows, num_programs):
        grad = tl.load(grad_ND + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(total_ND + row * total_stride + column, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_N + row)
        normed = x * scale
        grad_weight += grad * normed
        grad *= weight
        mean = tl.sum(normed * grad, axis=0) / num_columns
        if BLOCK > 8192:  # read from the cache again: held through the sum, the row would spill on NVIDIA
            grad = tl.load(grad_ND + row * grad_stride + column, mask=mask, other=0.0, eviction_policy="evict_first")
            grad = grad.to(tl.float32) * weight
            x = tl.load(total_ND + row * total_stride + column, mask=mask, other=0.0, eviction_policy="evict_first")
            normed = x.to(tl.float32) * scale
        grad_x = scale * (grad - normed * mean)
        if ADDS:
            grad_x += tl.load(grad_total_ND + row * grad_total_stride + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ND + row * num_columns + column, grad_x, mask=mask)
        row += num_programs
    tl.store(grad_weight_PD + tl.program_id(0).to(tl.int64) * num_columns + column, grad_weight, mask=mask)


@triton.jit
def _forward_wide(
    x_ND, residual_ND, weight_D, out_ND, total_ND, scale_N, x_stride, residual_stride, num_columns, epsilon,
    ADDS: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < num_columns
        x = _summed(
            x_ND + row * x_stride + column, residual_ND + row * residual_stride + column,
            total_ND + row * num_columns + column, mask, ADDS,
        )  # fmt: skip
        squares += x * x
    scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / num_columns + epsilon)
    tl.store(scale_N + row, scale)
    tl.debug_barrier()  # a thread may read a sum that another one has written
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < num_columns
        if ADDS:
            x = tl.load(total_ND + row * num_columns + column, mask=mask, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_ND + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        weight = _weight(weight_D, column, mask, CENTERED)
        tl.store(out_ND + row * num_columns + column, weight * (x * scale), mask=mask)


@triton.jit
def _backward_wide(
    grad_ND, grad_total_ND, total_ND, weight_D, scale_N, grad_x_ND, grad_weight_PD,
    grad_stride, grad_total_stride, total_stride, num_rows, num_columns, num_programs,
    ADDS: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = grad_weight_PD + tl.program_id(0).to(tl.int64) * num_columns
    row = tl.program_id(0).to(tl.int64)
    for _ in range(tl.program_id(0), num_rows, num_programs):
        later = tl.where(row < num_programs, 0, num_columns)  # its first row adds to nothing
        scale = tl.load(scale_N + row)
        products = tl.zeros([BLOCK], tl.float32)
        for start in range(0, num_columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < num_columns
            grad = tl.load(grad_ND + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(total_ND + row * total_stride + column, mask=mask, other=0.0).to(tl.float32)
            weight = _weight(weight_D, column, mask, CENTERED)
            products += x * scale * (grad * weight)
        mean = tl.sum(products, axis=0) / num_columns
        tl.debug_barrier()  # a thread may read a part that another one has written for the row before
        for start in range(0, num_columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < num_columns
            grad = tl.load(grad_ND + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(total_ND + row * total_stride + column, mask=mask, other=0.0).to(tl.float32)
            normed = x * scale
            before = tl.load(part + column, mask=column < later, other=0.0)
            tl.store(part + column, before + grad * normed, mask=mask)
            weight = _weight(weight_D, column, mask, CENTERED)
            grad_x = scale * (grad * weight - normed * mean)
            if ADDS:
                behind = tl.load(grad_total_ND + row * grad_total_stride + column, mask=mask, other=0.0)
                grad_x += behind.to(tl.float32)
            tl.store(grad_x_ND + row * num_columns + column, grad_x, mask=mask)
        row += num_programs


def _rows(x: Tensor) -> Tensor:
    """[N, D] with contiguous columns."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _tile(num_columns: int, wide: tuple[Tile, ...], *, device: torch.device) -> Tile:
    """Return the narrowest tile that holds a row, else the device's tile among `wide`."""
    fitting = [tile for tile in TILES if num_columns <= tile.constants["BLOCK"]] or [*wide]
    made_for_it = [tile for tile in fitting if architecture_of(device) in tile.architectures]
    return fitting[0] if not fitting[0].architectures else (made_for_it or fitting)[0]


def _is_wide(num_columns: int) -> bool:
    return num_columns > max(tile.constants["BLOCK"] for tile in TILES)


def _normed(
    x: Tensor, residual: Tensor | None, weight_D: Tensor, epsilon: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm, the sum (or an empty tensor) and 1 / rms [N]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out) if residual is not None else x.new_empty(0)
    num_rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    scale_N = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if not num_rows:
        return out, total, scale_N
    x_ND = _rows(x)
    residual_ND = x_ND if residual is None else _rows(residual)
    tile = _tile(x.shape[-1], WIDE_FORWARD_TILES, device=x.device)
    kernel = _forward_wide if _is_wide(x.shape[-1]) else _forward
    launch(
        kernel, (num_rows,), x_ND, residual_ND, weight_D.contiguous(), out, total, scale_N, x_ND.stride(0),
        residual_ND.stride(0), x.shape[-1], epsilon, on=x, ADDS=residual is not None, CENTERED=zero_centered,
        **tile.constants, num_warps=tile.num_warps,
    )  # fmt: skip
    return out, total, scale_N


@operator(
    "rms_norm_backward",
    fake=lambda grad, grad_total, total, weight_D, *others: (total.new_empty(total.shape), torch.empty_like(weight_D)),
)
def norm_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight_D: Tensor, scale_N: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the sum that is normed, and of the weight."""
    grad_x = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    num_rows, num_columns = len(scale_N), total.shape[-1]
    is_wide = _is_wide(num_columns)
    num_programs = min(num_rows, NUM_WIDE_PROGRAMS if is_wide else NUM_PROGRAMS)
    parts_PD = torch.empty(num_programs, num_columns, dtype=torch.float32, device=total.device)
    if num_rows:
        grad_ND, total_ND = _rows(grad), _rows(total)
        from_behind_ND = grad_ND if grad_total is None else _rows(grad_total)
        tile = _tile(num_columns, WIDE_BACKWARD_TILES, device=total.device)
        kernel = _backward_wide if is_wide else _backward
        launch(
            kernel, (num_programs,), grad_ND, from_behind_ND, total_ND, weight_D.contiguous(), scale_N, grad_x,
            parts_PD, grad_ND.stride(0), from_behind_ND.stride(0), total_ND.stride(0), num_rows, num_columns,
            num_programs, on=total, ADDS=grad_total is not None, CENTERED=zero_centered,
            **tile.constants, num_warps=tile.num_warps,
        )  # fmt: skip
    return grad_x, parts_PD.sum(dim=0).to(weight_D.dtype)


def _fake_scale(x: Tensor) -> Tensor:
    return torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight_D, _, ctx.zero_centered = inputs
    ctx.save_for_backward(x, weight_D, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    x, weight_D, scale_N = ctx.saved_tensors
    return *norm_backward(grads[0], None, x, weight_D, scale_N, ctx.zero_centered), None, None


@operator("rms_norm", fake=lambda x, *others: (x.new_empty(x.shape), _fake_scale(x)), saves=_save, gradients=_gradients)
def norm(x: Tensor, weight_D: Tensor, epsilon: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """The norm and 1 / rms [N]."""
    out, _, scale_N = _normed(x, None, weight_D, epsilon, zero_centered)
    return out, scale_N


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, weight_D, _, ctx.zero_centered = inputs
    ctx.save_for_backward(output[1], weight_D, output[2])
    ctx.mark_non_differentiable(output[2])


def _gradients_of_sum(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    total, weight_D, scale_N = ctx.saved_tensors
    grad_x, grad_weight = norm_backward(grads[0], grads[1], total, weight_D, scale_N, ctx.zero_centered)
    return grad_x, grad_x, grad_weight, None, None


@operator(
    "add_rms_norm",
    fake=lambda x, *others: (x.new_empty(x.shape), x.new_empty(x.shape), _fake_scale(x)),
    saves=_save_sum,
    gradients=_gradients_of_sum,
)
def norm_of_sum(
    x: Tensor, residual: Tensor, weight_D: Tensor, epsilon: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x + residual, that sum, and 1 / rms [N]."""
    return _normed(x, residual, weight_D, epsilon, zero_centered)


def _traffic(num_tensors: int, *, has_parts: bool = False) -> Callable[[Sizes, Tile], Traffic]:
    """Return the traffic of a pass over `num_tensors` tensors. Wide rows are read again: two tensors in
    the backward pass, which also reads and writes the part of the weight's gradient for each row, one
    tensor in the forward pass."""

    def traffic(sizes: Sizes, tile: Tile) -> Traffic:
        rows, columns, is_wide = sizes["rows"], sizes["columns"], _is_wide(sizes["columns"])
        least = num_tensors * 2 * rows * columns
        num_parts = min(rows, NUM_WIDE_PROGRAMS if is_wide else NUM_PROGRAMS) if has_parts else 0
        again = 2 * (2 if has_parts else 1) + (8 if has_parts else 0)  # bytes a value
        held = 2 * num_tensors + (4 if has_parts else 0)
        return Traffic(
            moved_bytes=least + 2 * 4 * num_parts * columns + 4 * rows,  # parts are written, and read by their sum
            least_bytes=least + 4 * rows,
            reread_bytes=again * rows * columns if is_wide else 0,
            working_bytes=held * columns if is_wide else 0,
        )

    return traffic


_FORWARD = {"x_ND": "*bf16", "residual_ND": "*bf16", "weight_D": "*bf16", "out_ND": "*bf16", "total_ND": "*bf16",
            "scale_N": "*fp32", "x_stride": "i32:16", "residual_stride": "i32:16", "num_columns": "i32:16",
            "epsilon": "fp32"}  # fmt: skip
_BACKWARD = {"grad_ND": "*bf16", "grad_total_ND": "*bf16", "total_ND": "*bf16", "weight_D": "*bf16",
             "scale_N": "*fp32", "grad_x_ND": "*bf16", "grad_weight_PD": "*fp32", "grad_stride": "i32:16",
             "grad_total_stride": "i32:16", "total_stride": "i32:16", "num_rows": "i32",
             "num_columns": "i32:16", "num_programs": "i32"}  # fmt: skip


def _sources(forward: tuple[Tile, ...], backward: tuple[Tile, ...], *, columns: int) -> Iterator[KernelSource]:
    """Yield both passes over rows of `columns` columns, with and without a residual."""
    is_wide, shared = _is_wide(columns), {"op": "rms_norm", "sizes": {"rows": 32768, "columns": columns}}
    for adds in (False, True):
        name = f"{'add_' if adds else ''}rms_norm_{{}}_{columns}"
        constants, passes = {"ADDS": adds, "CENTERED": False}, ADD_RMS_NORM if adds else RMS_NORM
        yield KernelSource(
            name=name.format("forward"), function=_forward_wide if is_wide else _forward, signature=_FORWARD,
            constants=constants, tiles=forward, traffic=_traffic(passes.forward), **shared,
        )  # fmt: skip
        yield KernelSource(
            name=name.format("backward"), function=_backward_wide if is_wide else _backward, signature=_BACKWARD,
            constants=constants, tiles=backward, traffic=_traffic(passes.backward, has_parts=True), **shared,
        )  # fmt: skip


SOURCES = (
    *(source for tile in TILES for source in _sources((tile,), (tile,), columns=tile.constants["BLOCK"])),
    *_sources(WIDE_FORWARD_TILES, WIDE_BACKWARD_TILES, columns=32768),
)
