"""A gated activation, or its gradients, cast to 8 bits in both orientations from registers (Triton).

Written apart, the activation writes 16 bits that the cast reads again. Here they never reach memory:

    forward    gate and up read (4 bytes an element), f(gate) up cast twice (2)             6 instead of 10
    backward   its gradient, gate and up read (6), both gradients cast twice (4)            10 instead of 18

Scales of tensors and rows need a pass before, which finds the largest magnitudes in the same tensors. Values
are rounded to the format of gate before they are cast, so that the result has the bits of both operations
after each other. `gated_activation` and `formats` have the definitions.

M rows, K columns; R rows and C columns of a tile, W of a group.
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

from meshwright.kernels.fp8.formats import BLOCK, Scaling
from meshwright.kernels.fp8.triton_cast import (
    CAST_MODES,
    SCALED,
    WHOLE,
    cast_constants,
    cast_formats,
    cast_tile,
    empty_casts,
    form_of,
    given_scales,
    partial_amax,
    scale_stride,
    store_largest,
    tiles_of,
    with_scales,
)
from meshwright.kernels.gated_activation_triton import CODES, gated_gradients, gated_value
from meshwright.kernels.operators import operator
from meshwright.kernels.sources import KernelSource, Sizes, Tile, Traffic
from meshwright.kernels.triton_route import contiguous_rows, launch

TILE = Tile(constants={"R": 64, "C": 64, "PART": 64}, num_warps=8)
BLOCK_TILE = Tile(constants={"R": BLOCK, "C": BLOCK, "PART": 32}, num_warps=8)
"""Tile for scales of blocks: whole groups of rows and of columns do not fit into registers, so the inputs
are read for the rows and, from the cache, again for the columns."""
AMAX_TILE = Tile(constants={"R": 64, "C": 64}, num_warps=8)


@triton.jit
def tile_at(ptr, row, column, stride, inside):
    """A tile in fp32; zeros outside."""
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def value_tile(gate_ptr, up_ptr, m, k, M, K, stride_gate, stride_up, CODE: tl.constexpr):
    """f(gate) up, rounded to the format of gate."""
    inside = (m < M)[:, None] & (k < K)[None, :]
    gate = tile_at(gate_ptr, m, k, stride_gate, inside)
    up = tile_at(up_ptr, m, k, stride_up, inside)
    return gated_value(gate, up, CODE).to(gate_ptr.dtype.element_ty)


@triton.jit
def gradient_tiles(grad_ptr, gate_ptr, up_ptr, m, k, M, K, stride_grad, stride_gate, stride_up, CODE: tl.constexpr):
    """Gradients of gate and up, rounded to the format of gate."""
    inside = (m < M)[:, None] & (k < K)[None, :]
    grad = tile_at(grad_ptr, m, k, stride_grad, inside)
    gate = tile_at(gate_ptr, m, k, stride_gate, inside)
    up = tile_at(up_ptr, m, k, stride_up, inside)
    grad_gate, grad_up = gated_gradients(grad, gate, up, CODE)
    return grad_gate.to(gate_ptr.dtype.element_ty), grad_up.to(gate_ptr.dtype.element_ty)


@triton.jit
def fp8_gated_amax_kernel(
    gate_ptr, up_ptr, rows_ptr, columns_ptr, M, K, stride_gate, stride_up,
    CODE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Largest magnitudes of f(gate) up by rows and columns of every tile."""
    tile_m, tile_k = tl.program_id(0), tl.program_id(1)
    m, k = tile_m * R + tl.arange(0, R), tile_k * C + tl.arange(0, C)
    value = value_tile(gate_ptr, up_ptr, m, k, M, K, stride_gate, stride_up, CODE).to(tl.float32)
    store_largest(value, rows_ptr, columns_ptr, tile_m, tile_k, m, k, M, K)


@triton.jit
def cast_value(
    gate_ptr, up_ptr, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr, tile_m, tile_k, m, k, M, K,
    stride_gate, stride_up, stride_rows_scale, stride_columns_scale,
    CODE: tl.constexpr, MODE: tl.constexpr, W: tl.constexpr, LARGEST_VALUE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr,
    WITH_ROWS: tl.constexpr, WITH_COLUMNS: tl.constexpr,
):  # fmt: skip
    """`cast_tile` of f(gate) up at rows m and columns k."""
    value = value_tile(gate_ptr, up_ptr, m, k, M, K, stride_gate, stride_up, CODE).to(tl.float32)
    cast_tile(
        value, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr, tile_m, tile_k, m, k, M, K,
        stride_rows_scale, stride_columns_scale,
        MODE, W, LARGEST_VALUE, POWER_OF_TWO, EXPONENT, MANTISSA, SMALLEST, WITH_ROWS, WITH_COLUMNS,
    )  # fmt: skip


@triton.jit
def fp8_gated_cast_kernel(
    gate_ptr, up_ptr, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr, M, K, stride_gate, stride_up,
    stride_rows_scale, stride_columns_scale,
    CODE: tl.constexpr, MODE: tl.constexpr, W: tl.constexpr, LARGEST_VALUE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr,
    WITH_ROWS: tl.constexpr, WITH_COLUMNS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """f(gate) up of one tile in both orientations, PART rows and PART columns at a time."""
    tile_m, tile_k = tl.program_id(0), tl.program_id(1)
    m, k = tile_m * R + tl.arange(0, R), tile_k * C + tl.arange(0, C)
    if PART == R:
        cast_value(
            gate_ptr, up_ptr, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr, tile_m, tile_k, m, k, M, K,
            stride_gate, stride_up, stride_rows_scale, stride_columns_scale,
            CODE, MODE, W, LARGEST_VALUE, POWER_OF_TWO, EXPONENT, MANTISSA, SMALLEST, WITH_ROWS, WITH_COLUMNS,
        )  # fmt: skip
    else:
        if WITH_ROWS:
            for base in range(0, R, PART):
                cast_value(
                    gate_ptr, up_ptr, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr, tile_m, tile_k,
                    tile_m * R + base + tl.arange(0, PART), k, M, K,
                    stride_gate, stride_up, stride_rows_scale, stride_columns_scale,
                    CODE, MODE, W, LARGEST_VALUE, POWER_OF_TWO, EXPONENT, MANTISSA, SMALLEST, True, False,
                )  # fmt: skip
        if WITH_COLUMNS:
            for base in range(0, C, PART):
                cast_value(
                    gate_ptr, up_ptr, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr, tile_m, tile_k,
                    m, tile_k * C + base + tl.arange(0, PART), M, K,
                    stride_gate, stride_up, stride_rows_scale, stride_columns_scale,
                    CODE, MODE, W, LARGEST_VALUE, POWER_OF_TWO, EXPONENT, MANTISSA, SMALLEST, False, True,
                )  # fmt: skip


@triton.jit
def fp8_gated_gradients_amax_kernel(
    grad_ptr, gate_ptr, up_ptr, gate_rows_ptr, gate_columns_ptr, up_rows_ptr, up_columns_ptr, M, K,
    stride_grad, stride_gate, stride_up,
    CODE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Largest magnitudes of both gradients by rows and columns of every tile."""
    tile_m, tile_k = tl.program_id(0), tl.program_id(1)
    m, k = tile_m * R + tl.arange(0, R), tile_k * C + tl.arange(0, C)
    grad_gate, grad_up = gradient_tiles(
        grad_ptr, gate_ptr, up_ptr, m, k, M, K, stride_grad, stride_gate, stride_up, CODE
    )
    store_largest(grad_gate.to(tl.float32), gate_rows_ptr, gate_columns_ptr, tile_m, tile_k, m, k, M, K)
    store_largest(grad_up.to(tl.float32), up_rows_ptr, up_columns_ptr, tile_m, tile_k, m, k, M, K)


@triton.jit
def cast_gradients(
    grad_ptr, gate_ptr, up_ptr,
    gate_rows_ptr, gate_rows_scale_ptr, gate_columns_ptr, gate_columns_scale_ptr, gate_sums_ptr,
    up_rows_ptr, up_rows_scale_ptr, up_columns_ptr, up_columns_scale_ptr, up_sums_ptr,
    tile_m, tile_k, m, k, M, K, stride_grad, stride_gate, stride_up, stride_rows_scale, stride_columns_scale,
    CODE: tl.constexpr, MODE: tl.constexpr, W: tl.constexpr, LARGEST_VALUE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr,
    WITH_ROWS: tl.constexpr, WITH_COLUMNS: tl.constexpr, WITH_SUMS: tl.constexpr,
):  # fmt: skip
    """`cast_tile` of both gradients at rows m and columns k; WITH_SUMS: their sums over m too, in row `tile_m`."""
    grad_gate, grad_up = gradient_tiles(
        grad_ptr, gate_ptr, up_ptr, m, k, M, K, stride_grad, stride_gate, stride_up, CODE
    )
    if WITH_SUMS:
        at = tile_m.to(tl.int64) * K + k
        tl.store(gate_sums_ptr + at, tl.sum(grad_gate.to(tl.float32), 0), mask=k < K)
        tl.store(up_sums_ptr + at, tl.sum(grad_up.to(tl.float32), 0), mask=k < K)
    cast_tile(
        grad_gate.to(tl.float32), gate_rows_ptr, gate_rows_scale_ptr, gate_columns_ptr, gate_columns_scale_ptr,
        tile_m, tile_k, m, k, M, K, stride_rows_scale, stride_columns_scale,
        MODE, W, LARGEST_VALUE, POWER_OF_TWO, EXPONENT, MANTISSA, SMALLEST, WITH_ROWS, WITH_COLUMNS,
    )  # fmt: skip
    cast_tile(
        grad_up.to(tl.float32), up_rows_ptr, up_rows_scale_ptr, up_columns_ptr, up_columns_scale_ptr,
        tile_m, tile_k, m, k, M, K, stride_rows_scale, stride_columns_scale,
        MODE, W, LARGEST_VALUE, POWER_OF_TWO, EXPONENT, MANTISSA, SMALLEST, WITH_ROWS, WITH_COLUMNS,
    )  # fmt: skip


@triton.jit
def fp8_gated_gradients_kernel(
    grad_ptr, gate_ptr, up_ptr,
    gate_rows_ptr, gate_rows_scale_ptr, gate_columns_ptr, gate_columns_scale_ptr, gate_sums_ptr,
    up_rows_ptr, up_rows_scale_ptr, up_columns_ptr, up_columns_scale_ptr, up_sums_ptr,
    M, K, stride_grad, stride_gate, stride_up, stride_rows_scale, stride_columns_scale,
    CODE: tl.constexpr, MODE: tl.constexpr, W: tl.constexpr, LARGEST_VALUE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr,
    WITH_ROWS: tl.constexpr, WITH_COLUMNS: tl.constexpr, WITH_SUMS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Both gradients of one tile in both orientations, PART rows and PART columns at a time."""
    tile_m, tile_k = tl.program_id(0), tl.program_id(1)
    m, k = tile_m * R + tl.arange(0, R), tile_k * C + tl.arange(0, C)
    if PART == R:
        cast_gradients(
            grad_ptr, gate_ptr, up_ptr,
            gate_rows_ptr, gate_rows_scale_ptr, gate_columns_ptr, gate_columns_scale_ptr, gate_sums_ptr,
            up_rows_ptr, up_rows_scale_ptr, up_columns_ptr, up_columns_scale_ptr, up_sums_ptr,
            tile_m, tile_k, m, k, M, K,
            stride_grad, stride_gate, stride_up, stride_rows_scale, stride_columns_scale,
            CODE, MODE, W, LARGEST_VALUE, POWER_OF_TWO, EXPONENT, MANTISSA, SMALLEST, WITH_ROWS, WITH_COLUMNS,
            WITH_SUMS,
        )  # fmt: skip
    else:
        if WITH_ROWS:
            for base in range(0, R, PART):
                cast_gradients(
                    grad_ptr, gate_ptr, up_ptr,
                    gate_rows_ptr, gate_rows_scale_ptr, gate_columns_ptr, gate_columns_scale_ptr, gate_sums_ptr,
                    up_rows_ptr, up_rows_scale_ptr, up_columns_ptr, up_columns_scale_ptr, up_sums_ptr,
                    tile_m, tile_k, tile_m * R + base + tl.arange(0, PART), k, M, K,
                    stride_grad, stride_gate, stride_up, stride_rows_scale, stride_columns_scale,
                    CODE, MODE, W, LARGEST_VALUE, POWER_OF_TWO, EXPONENT, MANTISSA, SMALLEST, True, False, False,
                )  # fmt: skip
        if WITH_COLUMNS or WITH_SUMS:
            for base in range(0, C, PART):
                cast_gradients(
                    grad_ptr, gate_ptr, up_ptr,
                    gate_rows_ptr, gate_rows_scale_ptr, gate_columns_ptr, gate_columns_scale_ptr, gate_sums_ptr,
                    up_rows_ptr, up_rows_scale_ptr, up_columns_ptr, up_columns_scale_ptr, up_sums_ptr,
                    tile_m, tile_k, m, tile_k * C + base + tl.arange(0, PART), M, K,
                    stride_grad, stride_gate, stride_up, stride_rows_scale, stride_columns_scale,
                    CODE, MODE, W, LARGEST_VALUE, POWER_OF_TWO, EXPONENT, MANTISSA, SMALLEST, False, WITH_COLUMNS,
                    WITH_SUMS,
                )  # fmt: skip


@operator("fp8_gated_amax", fake=lambda gate, up, kind: partial_amax(gate, AMAX_TILE))
def fp8_gated_amax(gate: Tensor, up: Tensor, kind: str) -> list[Tensor]:
    """`partial_amax` of f(gate) up."""
    gate, up, tile = contiguous_rows(gate), contiguous_rows(up), AMAX_TILE
    partial = partial_amax(gate, tile)
    launch(
        fp8_gated_amax_kernel, tiles_of(gate, tile), gate, up, *partial, *gate.shape, gate.stride(0), up.stride(0),
        on=gate, CODE=CODES[kind], **tile.constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return partial


@operator("fp8_gated_cast", fake=lambda gate, up, kind, *how: empty_casts(gate, form_of(*how[:3], *how[4:])))
def fp8_gated_cast(
    gate: Tensor,
    up: Tensor,
    kind: str,
    element: str,
    scaling: str,
    power_of_two: bool,
    amax: Tensor | None,
    with_rows: bool,
    with_columns: bool,
) -> list[Tensor]:
    """Values and scales of f(gate) up, then of its transpose; empty ones for a side that is not wanted."""
    form, tile = form_of(element, scaling, power_of_two, with_rows, with_columns), tile_of(scaling)
    gate, up = contiguous_rows(gate), contiguous_rows(up)
    found = empty_casts(gate, form)
    scales = [found[1], found[3]]
    if form.scaling in WHOLE:
        partial = fp8_gated_amax(gate, up, kind) if amax is None else None
        scales = given_scales(partial, form, amax=amax)
        found = with_scales(found, scales, form)
    launch(
        fp8_gated_cast_kernel, tiles_of(gate, tile), gate, up, found[0], scales[0], found[2], scales[1],
        *gate.shape, gate.stride(0), up.stride(0), *(scale_stride(side, scaling) for side in scales),
        on=gate, CODE=CODES[kind], **cast_constants(form), **tile.constants,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return found


@operator(
    "fp8_gated_gradients_amax",
    fake=lambda grad, gate, up, kind: [*partial_amax(gate, AMAX_TILE), *partial_amax(gate, AMAX_TILE)],
)
def fp8_gated_gradients_amax(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> list[Tensor]:
    """`partial_amax` of the gradient of gate, then of up."""
    grad, gate, up, tile = contiguous_rows(grad), contiguous_rows(gate), contiguous_rows(up), AMAX_TILE
    partial = [*partial_amax(gate, tile), *partial_amax(gate, tile)]
    launch(
        fp8_gated_gradients_amax_kernel, tiles_of(gate, tile), grad, gate, up, *partial, *gate.shape,
        grad.stride(0), gate.stride(0), up.stride(0), on=gate, CODE=CODES[kind],
        **tile.constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return partial


def _empty_sums(gate: Tensor, tile: Tile, *, with_sums: bool) -> Tensor:
    shape = (tiles_of(gate, tile)[0], gate.shape[1]) if with_sums else (0, 0)
    return gate.new_empty(shape, dtype=torch.float32)


def _empty_gradients(*given: Any) -> list[Tensor]:
    _, gate, _, _, *how, _, with_rows, with_columns, with_sums = given
    form = form_of(*how, with_rows, with_columns)
    each = ([*empty_casts(gate, form), _empty_sums(gate, tile_of(form.scaling), with_sums=with_sums)] for _ in range(2))
    return [tensor for one in each for tensor in one]


@operator("fp8_gated_gradients", fake=_empty_gradients)
def fp8_gated_gradients(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    kind: str,
    element: str,
    scaling: str,
    power_of_two: bool,
    amax: list[Tensor],
    with_rows: bool,
    with_columns: bool,
    with_sums: bool,
) -> list[Tensor]:
    """Return the cast gradients of gate, then of up: values and scales of both orientations, sums by `tile_of` rows.

    `amax`: one for each gradient, or empty.
    """
    form, tile = form_of(element, scaling, power_of_two, with_rows, with_columns), tile_of(scaling)
    grad, gate, up = contiguous_rows(grad), contiguous_rows(gate), contiguous_rows(up)
    partial = fp8_gated_gradients_amax(grad, gate, up, kind) if form.scaling in WHOLE and not amax else None
    results, outputs, strides = [], [], []
    for index in range(2):
        found = empty_casts(gate, form)
        scales = [found[1], found[3]]
        if form.scaling in WHOLE:
            own = partial and partial[2 * index : 2 * index + 2]
            scales = given_scales(own, form, amax=amax[index] if amax else None)
            found = with_scales(found, scales, form)
        sums = _empty_sums(gate, tile, with_sums=with_sums)
        outputs += [found[0], scales[0], found[2], scales[1], sums]
        results += [*found, sums]
        strides = [scale_stride(side, scaling) for side in scales]
    launch(
        fp8_gated_gradients_kernel, tiles_of(gate, tile), grad, gate, up, *outputs, *gate.shape,
        grad.stride(0), gate.stride(0), up.stride(0), *strides, on=gate, CODE=CODES[kind],
        **cast_constants(form), WITH_SUMS=with_sums, **tile.constants,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return results


def tile_of(scaling: str) -> Tile:
    """Tile of casts with these scales."""
    return BLOCK_TILE if scaling == Scaling.BLOCK else TILE


def _amax_traffic(num_read: int) -> Any:
    """Traffic of the first of two passes: 16 bits of each input. Both must read them, as the scale depends on all."""

    def traffic(sizes: Sizes, tile: Tile) -> Traffic:
        elements = sizes["rows"] * sizes["columns"]
        partial = 4 * elements // tile.constants["R"] + 4 * elements // tile.constants["C"]
        least = 2 * num_read * elements
        return Traffic(moved_bytes=least + (num_read - 1) * partial, least_bytes=least)

    return traffic


def _cast_traffic(num_read: int, num_cast: int) -> Any:
    """16 bits of each input read; 8 bits of each result written twice, with the scales of both orientations."""

    def traffic(sizes: Sizes, tile: Tile) -> Traffic:
        elements = sizes["rows"] * sizes["columns"]
        read, part = 2 * num_read, tile.constants["R"] * tile.constants["C"]
        least = read * elements + num_cast * (2 * elements + 2 * 4 * elements // BLOCK)
        if tile.constants["PART"] == tile.constants["R"]:
            return Traffic(moved_bytes=least, least_bytes=least)
        return Traffic(moved_bytes=least, least_bytes=least, reread_bytes=read * elements, working_bytes=read * part)

    return traffic


_SIZES = {"rows": 8192, "columns": 14336}  # one sequence of Llama 3.1 8B
_SHAPE = {"M": "i32:16", "K": "i32:16", "stride_gate": "i32:16", "stride_up": "i32:16"}
_INPUTS = {"gate_ptr": "*bf16", "up_ptr": "*bf16"} | _SHAPE
_GRADIENT_INPUTS = {"grad_ptr": "*bf16", "stride_grad": "i32:16"} | _INPUTS


def _amax_sources(kind: str, code: int) -> tuple[KernelSource, ...]:
    """The passes before casts whose scales are of tensors and rows."""
    shared: dict[str, Any] = {"constants": {"CODE": code}, "tiles": (AMAX_TILE,), "sizes": _SIZES}
    return (
        KernelSource(
            name=f"fp8_gated_{kind}_amax", op="fp8_gated_cast", function=fp8_gated_amax_kernel,
            signature=_INPUTS | {"rows_ptr": "*fp32", "columns_ptr": "*fp32"}, traffic=_amax_traffic(2), **shared,
        ),
        KernelSource(
            name=f"fp8_gated_{kind}_gradients_amax", op="fp8_gated_gradients",
            function=fp8_gated_gradients_amax_kernel,
            signature=_GRADIENT_INPUTS | {f"{of}_{side}_ptr": "*fp32" for of in ("gate", "up")
                                          for side in ("rows", "columns")},
            traffic=_amax_traffic(3), **shared,
        ),
    )  # fmt: skip


def _cast_sources(kind: str, code: int, mode: str) -> list[KernelSource]:
    scale, chosen = CAST_MODES[mode]
    found = []
    for element, where, constants in cast_formats(scale, CODE=code, **chosen):
        shared: dict[str, Any] = {"tiles": (replace(tile_of(mode), architectures=where),), "sizes": _SIZES}
        found += [
            KernelSource(
                name=f"fp8_gated_{kind}_cast_{mode}", op="fp8_gated_cast", function=fp8_gated_cast_kernel,
                signature=_INPUTS | SCALED | {
                    "rows_ptr": element, "columns_ptr": element, "rows_scale_ptr": scale, "columns_scale_ptr": scale,
                },
                constants=constants, traffic=_cast_traffic(2, 1), **shared,
            ),
            KernelSource(
                name=f"fp8_gated_{kind}_gradients_{mode}", op="fp8_gated_gradients",
                function=fp8_gated_gradients_kernel,
                signature=_GRADIENT_INPUTS | SCALED | {
                    f"{of}_{part}_ptr": dtype
                    for of in ("gate", "up")
                    for part, dtype in (("rows", element), ("columns", element), ("rows_scale", scale),
                                        ("columns_scale", scale), ("sums", "*fp32"))
                },
                constants=constants | {"WITH_SUMS": code == CODES["clamped"]}, traffic=_cast_traffic(3, 2), **shared,
            ),
        ]  # fmt: skip
    return found


SOURCES = tuple(
    source
    for kind, code in CODES.items()
    for source in (
        *_amax_sources(kind, code),
        *(cast for mode in ("given", "block", "mx") for cast in _cast_sources(kind, code, mode)),
    )
)
