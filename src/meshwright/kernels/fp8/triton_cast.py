"""Cast of a matrix and of its transpose to fp8, in one pass over it (Triton).

Both operands of every GEMM of a linear layer must be contiguous along the dimension that is summed, so each of X, W
and dY is needed in both orientations:

    forward   Y = X W^T         X [M, K], W [N, K]
    input     dX = dY W         dY [M, N], W^T [K, N]
    weight    dW = dY^T X       dY^T [N, M], X^T [K, M]

Written apart, cast and transpose read or write a matrix of 16 bits four times: 2 + 1 bytes an element for the cast,
1 + 1 for the transpose. One pass reads 2 and writes 2.

    tensor, row   two passes: largest magnitudes of the rows and columns of every tile, then the cast
    block, mx     one pass: a tile holds whole groups of rows and of columns
    square        one pass; both orientations have the same values and scales

The same launches cast a stack of experts' matrices [E, M, K]: its matrices are the third dimension of the
grid, each with scales of its own.

`formats` defines the scales. E matrices, M rows, K columns; R rows and C columns of a tile, W of a group.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton compiles these functions from their source; as Python they have no types.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.fp8.formats import (
    BLOCK,
    DTYPES,
    LARGEST,
    MANTISSA_BITS,
    MX_BLOCK,
    MX_EXPONENTS,
    CastForm,
    Element,
    Scaling,
    scale_of,
    scales_shape,
)
from meshwright.kernels.operators import operator
from meshwright.kernels.sources import KernelSource, Sizes, Tile, Traffic
from meshwright.kernels.triton_route import is_interpreted, launch

CAST_TILE = Tile(constants={"R": 128, "C": 128}, num_warps=8)
WHOLE = (Scaling.TENSOR, Scaling.ROW)
"""Scales that a pass before the cast finds."""
GIVEN, GROUPS, SQUARE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def scales_of(amax, LARGEST_VALUE: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """`formats.scale_of`: fp32 scales of groups with these largest magnitudes."""
    # A division by a constant may become a multiplication, which rounds differently.
    scale = tl.math.div_rn(amax, tl.full(amax.shape, LARGEST_VALUE, tl.float32))
    scale = tl.maximum(scale, 1.1754943508222875e-38)
    if POWER_OF_TWO:  # up: the exponent, plus one where the mantissa is not 0
        bits = scale.to(tl.int32, bitcast=True)
        bits = ((bits + 0x7FFFFF) >> 23) << 23
        scale = bits.to(tl.float32, bitcast=True)
    scale = tl.where(amax == 0, 1.0, scale)
    return tl.where(amax < float("inf"), scale, float("nan"))  # NaN is not less


@triton.jit
def mx_codes_of(amax, EXPONENT: tl.constexpr):
    """`formats.e8m0_codes`: biased exponents as int32."""
    bits = amax.to(tl.int32, bitcast=True)
    codes = tl.maximum(((bits >> 23) & 0xFF) - EXPONENT, 0)
    return tl.where(amax < float("inf"), codes, 255)


@triton.jit
def mx_scales_of(codes):
    """Scales of biased exponents. 2^-127 is subnormal, which the shift cannot make."""
    scale = (codes << 23).to(tl.float32, bitcast=True)
    scale = tl.where(codes == 0, 5.877471754111438e-39, scale)
    return tl.where(codes == 255, float("nan"), scale)


@triton.jit
def largest_magnitude(x, axis: tl.constexpr):
    """Largest magnitude along an axis; NaN where there is one."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=axis)


@triton.jit
def store_largest(x, rows_ptr, columns_ptr, tile_m, tile_k, m, k, M, K):
    """Largest magnitudes of the rows of every tile [K tiles, M] and of its columns [M tiles, K]."""
    tl.store(rows_ptr + tile_k.to(tl.int64) * M + m, largest_magnitude(x, 1), mask=m < M)
    tl.store(columns_ptr + tile_m.to(tl.int64) * K + k, largest_magnitude(x, 0), mask=k < K)


@triton.jit
def fp8_amax_kernel(
    x_ptr, rows_ptr, columns_ptr, M, K, stride_e, stride_m, stride_k,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`store_largest` of a tile of one matrix of x."""
    tile_m, tile_k, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    x_ptr += e * stride_e
    rows_ptr += e * tl.num_programs(1) * M
    columns_ptr += e * tl.num_programs(0) * K
    m, k = tile_m * R + tl.arange(0, R), tile_k * C + tl.arange(0, C)
    at = m.to(tl.int64)[:, None] * stride_m + k.to(tl.int64)[None, :] * stride_k
    x = tl.load(x_ptr + at, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
    store_largest(x, rows_ptr, columns_ptr, tile_m, tile_k, m, k, M, K)


@triton.jit
def cast_group(x, W: tl.constexpr, LARGEST_VALUE: tl.constexpr, POWER_OF_TWO: tl.constexpr, EXPONENT: tl.constexpr):
    """x [R, C] over the scales of groups of W columns [R, C / W]; the scales, or their codes."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    grouped = tl.reshape(x, (R, C // W, W))
    amax = largest_magnitude(grouped, 2)
    if EXPONENT > 0:
        kept = mx_codes_of(amax, EXPONENT)
        scale = mx_scales_of(kept)
    else:
        kept = scales_of(amax, LARGEST_VALUE, POWER_OF_TWO)
        scale = kept
    unit = tl.math.div_rn(grouped, tl.broadcast_to(scale[:, :, None], (R, C // W, W)))
    return tl.reshape(unit, (R, C)), kept


@triton.jit
def saturated(unit, LARGEST_VALUE: tl.constexpr):
    """Clamped to the largest value; NaN stays."""
    return tl.where(unit == unit, tl.minimum(tl.maximum(unit, -LARGEST_VALUE), LARGEST_VALUE), unit)


@triton.jit
def rounded(unit, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr):
    """Round to nearest even in a format of MANTISSA bits whose smallest normal number is SMALLEST.

    GPUs round so when they cast. Triton's interpreter loses the carry out of the mantissa, and casts rounded
    values exactly: only there MANTISSA is not 0.
    """
    if MANTISSA == 0:
        return unit
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = unit.to(tl.int32, bitcast=True)
    bits += ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)
    normal = ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
    STEP: tl.constexpr = SMALLEST * 2.0**DROPPED  # a sum with it has units of the smallest subnormal number
    magnitude = (tl.abs(unit) + STEP) - STEP
    sign = unit.to(tl.int32, bitcast=True) & -0x80000000  # kept of zero too: Triton 3.4 negates by 0 - x
    subnormal = (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(unit == unit, tl.where(tl.abs(unit) < SMALLEST, subnormal, normal), unit)


@triton.jit
def cast_side(
    x, values_ptr, scale_ptr, tile, row, column, ROWS, COLUMNS, stride_scale,
    MODE: tl.constexpr, W: tl.constexpr, LARGEST_VALUE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Cast one tile [R, C] along its rows and store it at `row` and `column` of a matrix; `tile`: of columns.

    GIVEN reads the scales of the rows, GROUPS computes and stores scales of groups, SQUARE takes x divided already.
    """
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    row_64, is_row = row.to(tl.int64), row < ROWS
    unit = x
    if MODE == GIVEN:
        scale = tl.load(scale_ptr + row_64 * stride_scale, mask=is_row, other=1.0)
        unit = tl.math.div_rn(x, tl.broadcast_to(scale[:, None], (R, C)))
    if MODE == GROUPS:
        unit, kept = cast_group(x, W, LARGEST_VALUE, POWER_OF_TWO, EXPONENT)
        group = tile * (C // W) + tl.arange(0, C // W)
        at_scale = row_64[:, None] * stride_scale + group[None, :]
        is_group = is_row[:, None] & (group * W < COLUMNS)[None, :]
        tl.store(scale_ptr + at_scale, kept.to(scale_ptr.dtype.element_ty), mask=is_group)
    q = rounded(saturated(unit, LARGEST_VALUE), MANTISSA, SMALLEST).to(values_ptr.dtype.element_ty)
    at = row_64[:, None] * COLUMNS + column[None, :]
    tl.store(values_ptr + at, q, mask=is_row[:, None] & (column < COLUMNS)[None, :])


@triton.jit
def cast_tile(
    x, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr, tile_m, tile_k, m, k, M, K,
    stride_rows_scale, stride_columns_scale,
    MODE: tl.constexpr, W: tl.constexpr, LARGEST_VALUE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr,
    WITH_ROWS: tl.constexpr, WITH_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile in both orientations: values by rows [M, K] and of the transpose [K, M], with their scales."""
    if WITH_ROWS:
        cast_side(
            x, rows_ptr, rows_scale_ptr, tile_k, m, k, M, K, stride_rows_scale,
            MODE, W, LARGEST_VALUE, POWER_OF_TWO, EXPONENT, MANTISSA, SMALLEST,
        )  # fmt: skip
    if WITH_COLUMNS:
        cast_side(
            tl.trans(x), columns_ptr, columns_scale_ptr, tile_m, k, m, K, M, stride_columns_scale,
            MODE, W, LARGEST_VALUE, POWER_OF_TWO, EXPONENT, MANTISSA, SMALLEST,
        )  # fmt: skip


@triton.jit
def fp8_cast_kernel(
    x_ptr, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr, M, K, stride_e, stride_m, stride_k,
    stride_e_rows_scale, stride_e_columns_scale, stride_rows_scale, stride_columns_scale,
    MODE: tl.constexpr, W: tl.constexpr, LARGEST_VALUE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr,
    WITH_ROWS: tl.constexpr, WITH_COLUMNS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`cast_tile` of a tile of one matrix of x; scales that are given are of rows [M] and columns [K] (strides 0: one
    scale)."""
    tile_m, tile_k, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    x_ptr += e * stride_e
    rows_ptr += e * M * K
    columns_ptr += e * M * K
    rows_scale_ptr += e * stride_e_rows_scale
    columns_scale_ptr += e * stride_e_columns_scale
    m, k = tile_m * R + tl.arange(0, R), tile_k * C + tl.arange(0, C)
    inside = (m < M)[:, None] & (k < K)[None, :]
    at = m.to(tl.int64)[:, None] * stride_m + k.to(tl.int64)[None, :] * stride_k
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if MODE == SQUARE:
        amax = largest_magnitude(largest_magnitude(x, 1)[None, :], 1)
        scale = scales_of(amax, LARGEST_VALUE, POWER_OF_TWO)
        x = tl.math.div_rn(x, tl.broadcast_to(scale[:, None], (R, C)))
        one = tl.arange(0, 1)
        if WITH_ROWS:
            tl.store(rows_scale_ptr + tile_m.to(tl.int64) * stride_rows_scale + tile_k + one, scale)
        if WITH_COLUMNS:
            tl.store(columns_scale_ptr + tile_k.to(tl.int64) * stride_columns_scale + tile_m + one, scale)
    cast_tile(
        x, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr, tile_m, tile_k, m, k, M, K,
        stride_rows_scale, stride_columns_scale,
        MODE, W, LARGEST_VALUE, POWER_OF_TWO, EXPONENT, MANTISSA, SMALLEST, WITH_ROWS, WITH_COLUMNS,
    )  # fmt: skip


def form_of(element: str, scaling: str, power_of_two: bool, with_rows: bool, with_columns: bool) -> CastForm:
    """The form of a cast from the arguments of an operator."""
    return CastForm(
        element=Element(element), scaling=Scaling(scaling), power_of_two=power_of_two, with_rows=with_rows,
        with_columns=with_columns,
    )  # fmt: skip


def empty_casts(x: Tensor, form: CastForm) -> list[Tensor]:
    """Empty values and scales of both orientations, of a matrix or of each one of a stack."""
    *stack, rows, columns = x.shape
    dtype = torch.uint8 if form.scaling is Scaling.MX else torch.float32
    found = []
    for height, width, is_wanted in ((rows, columns, form.with_rows), (columns, rows, form.with_columns)):
        shape = scales_shape(form.scaling, rows=height, columns=width)
        found += [
            x.new_empty((*stack, height, width) if is_wanted else (0, 0), dtype=DTYPES[form.element]),
            x.new_empty((*stack, *shape) if is_wanted else (0, 0), dtype=dtype),
        ]
    return found


@operator("fp8_cast", fake=lambda x, *how: empty_casts(x, form_of(*how[:3], *how[4:])))
def fp8_cast(
    x: Tensor, element: str, scaling: str, power_of_two: bool, amax: Tensor | None, with_rows: bool, with_columns: bool
) -> list[Tensor]:
    """Values and scales of `x` [M, K] or of each matrix of [E, M, K], then of its transpose; empty ones for a side that
    is not wanted."""
    form, tile = form_of(element, scaling, power_of_two, with_rows, with_columns), CAST_TILE
    *stack, rows, columns = x.shape
    grid, strides = (*tiles_of(x, tile), *(stack or [1])), (x.stride(0) if stack else 0, *x.stride()[-2:])
    found = empty_casts(x, form)
    scales = [found[1], found[3]]
    if form.scaling in WHOLE:
        partial = None
        if amax is None:
            partial = partial_amax(x, tile)
            launch(
                fp8_amax_kernel, grid, x, *partial, rows, columns, *strides,
                on=x, **tile.constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
            )  # fmt: skip
        else:
            amax = amax.expand(*stack, 1, 1)
        scales = given_scales(partial, form, amax=amax)
        found = with_scales(found, scales, form)
    of_matrices = [s.stride(0) if s.dim() == 3 else 0 for s in scales]
    launch(
        fp8_cast_kernel, grid, x, found[0], scales[0], found[2], scales[1], rows, columns, *strides, *of_matrices,
        *(scale_stride(side, scaling) for side in scales),
        on=x, **cast_constants(form), **tile.constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return found


def cast_constants(form: CastForm) -> dict[str, Any]:
    """Compile-time constants of `cast_tile`."""
    element, is_mx = form.element, form.scaling is Scaling.MX
    return {
        "MODE": GIVEN if form.scaling in WHOLE else SQUARE if form.scaling is Scaling.SQUARE else GROUPS,
        "W": MX_BLOCK if is_mx else BLOCK,
        "LARGEST_VALUE": LARGEST[element],
        "POWER_OF_TWO": form.power_of_two,
        "EXPONENT": MX_EXPONENTS[element] if is_mx else 0,
        "MANTISSA": MANTISSA_BITS[element] if is_interpreted() else 0,
        "SMALLEST": torch.finfo(DTYPES[element]).smallest_normal,
        "WITH_ROWS": form.with_rows,
        "WITH_COLUMNS": form.with_columns,
    }


def scale_stride(scales: Tensor, scaling: str) -> int:
    """Distance of the scales of neighbouring rows; 0: one scale for all."""
    return 0 if scaling == Scaling.TENSOR else scales.stride(-2)


def with_scales(found: list[Tensor], scales: list[Tensor], form: CastForm) -> list[Tensor]:
    """`empty_casts` with scales that are given, on the sides that are wanted."""
    return [found[0], scales[0] if form.with_rows else found[1], found[2], scales[1] if form.with_columns else found[3]]


def partial_amax(x: Tensor, tile: Tile) -> list[Tensor]:
    """Return places for the largest magnitudes of the rows [K tiles, M] and columns [M tiles, K] of every
    tile; a stack has them for each matrix."""
    *stack, rows, columns = x.shape
    tiles_m, tiles_k = tiles_of(x, tile)
    return [
        x.new_zeros(*stack, max(num, 1), size, dtype=torch.float32)
        for num, size in ((tiles_k, rows), (tiles_m, columns))
    ]


def given_scales(partial: list[Tensor] | None, form: CastForm, *, amax: Tensor | None) -> list[Tensor]:
    """Return scales of the rows [M, 1] and of the columns [K, 1], or of the tensor [1, 1] twice; a stack
    has them for each matrix. `amax` [1, 1], a magnitude of earlier steps, replaces `partial`."""
    how = {"element": form.element, "power_of_two": form.power_of_two}
    if form.scaling is Scaling.ROW:
        assert partial is not None
        return [scale_of(a.amax(dim=-2).unsqueeze(-1), **how) for a in partial]
    if amax is None:
        assert partial is not None
        amax = largest_of(partial)
    scale = scale_of(amax, **how)
    return [scale, scale.clone()]


def largest_of(partial: list[Tensor]) -> Tensor:
    """Return the largest magnitude of all [1, 1], or of each matrix of a stack; 0 if there are no values."""
    of_rows, _ = partial
    if of_rows.shape[-1]:
        return of_rows.amax(dim=(-2, -1), keepdim=True)
    return of_rows.new_zeros(*of_rows.shape[:-2], 1, 1)


def tiles_of(x: Tensor, tile: Tile) -> tuple[int, int]:
    """Tiles of rows and of columns of a matrix."""
    rows, columns = x.shape[-2:]
    return triton.cdiv(rows, tile.constants["R"]), triton.cdiv(columns, tile.constants["C"])


def _cast_traffic(sizes: Sizes, tile: Tile) -> Traffic:
    """16 bits read, 8 written twice, and the scales of both orientations."""
    elements = sizes["rows"] * sizes["columns"]
    least = 4 * elements + 2 * 4 * elements // BLOCK
    return Traffic(moved_bytes=least, least_bytes=least)


def _amax_traffic(sizes: Sizes, tile: Tile) -> Traffic:
    """Traffic of the first of two passes: 16 bits read. Both passes must read them, as the scale depends on all."""
    elements = sizes["rows"] * sizes["columns"]
    partial = 4 * elements // tile.constants["R"] + 4 * elements // tile.constants["C"]
    return Traffic(moved_bytes=2 * elements + partial, least_bytes=2 * elements)


_SIZES = {"rows": 8192, "columns": 14336}  # hidden of the feed-forward of Llama 3.1 8B, one sequence
_INTEGERS = {"M": "i32:16", "K": "i32:16", "stride_e": "i32:16", "stride_m": "i32:16", "stride_k": "1"}
_OF_MATRICES = {"stride_e_rows_scale": "i32", "stride_e_columns_scale": "i32"}
SCALED = {"stride_rows_scale": "i32", "stride_columns_scale": "i32"}


def element_types(scale: str) -> dict[str, tuple[str, ...]]:
    """Architectures by their type of e4m3. MI300X has a type of its own, and no MX, whose scales are bytes."""
    types = {"*fp8e4nv": ("sm90", "sm100", "gfx950")}
    return types | {"*fp8e4b8": ("gfx942",)} if scale == "*fp32" else types


def cast_formats(scale: str, **constants: Any) -> Iterator[tuple[str, tuple[str, ...], dict[str, Any]]]:
    """`element_types` with the constants of `cast_tile`."""
    shared = {"POWER_OF_TWO": False, "SMALLEST": 2.0**-6, "MANTISSA": 0, "WITH_ROWS": True, "WITH_COLUMNS": True,
              "W": BLOCK, "EXPONENT": 0}  # fmt: skip
    largest = {"*fp8e4nv": 448.0, "*fp8e4b8": 240.0}
    for element, where in element_types(scale).items():
        yield element, where, shared | {"LARGEST_VALUE": largest[element]} | constants


CAST_MODES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "given": ("*fp32", {"MODE": GIVEN.value}),
    "block": ("*fp32", {"MODE": GROUPS.value}),
    "square": ("*fp32", {"MODE": SQUARE.value}),
    "mx": ("*u8", {"MODE": GROUPS.value, "W": MX_BLOCK, "EXPONENT": MX_EXPONENTS[Element.E4M3]}),
}
"""Type of the scales and constants by the name of a cast."""


SOURCES = (
    KernelSource(
        name="fp8_amax", op="fp8_cast", function=fp8_amax_kernel,
        signature={"x_ptr": "*bf16", "rows_ptr": "*fp32", "columns_ptr": "*fp32", **_INTEGERS},
        tiles=(CAST_TILE,), traffic=_amax_traffic, sizes=_SIZES,
    ),
    *(
        KernelSource(
            name=f"fp8_cast_{mode}", op="fp8_cast", function=fp8_cast_kernel,
            signature={"x_ptr": "*bf16", "rows_ptr": element, "columns_ptr": element, "rows_scale_ptr": scale,
                       "columns_scale_ptr": scale, **_INTEGERS, **_OF_MATRICES, **SCALED},
            constants=constants, tiles=(replace(CAST_TILE, architectures=where),), traffic=_cast_traffic, sizes=_SIZES,
        )
        for mode, (scale, chosen) in CAST_MODES.items()
        for element, where, constants in cast_formats(scale, **chosen)
    ),
)  # fmt: skip
