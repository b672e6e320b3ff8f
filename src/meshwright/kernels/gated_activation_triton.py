"""Gated activations as Triton kernels: one pass forward, one backward (formulas in `gated_activation`).

N rows, F columns. A program takes BLOCK columns of one row; arithmetic is fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.operators import operator
from meshwright.kernels.sources import KernelSource, Sizes, Tile, Traffic
from meshwright.kernels.traffic import GATED_ACTIVATION
from meshwright.kernels.triton_route import launch

CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped": 3}
TILES = (
    Tile(constants={"BLOCK": 1024}, num_warps=4),
    Tile(constants={"BLOCK": 2048}, num_warps=4),
    Tile(constants={"BLOCK": 2048}, num_warps=8),
)
LARGEST = 2**31 - 2**12
"""Columns that a 32-bit column number counts, with the last block's overhang."""


@triton.jit
def _activated(gate, CODE: tl.constexpr):
    """f(gate) and f'(gate), fp32."""
    if CODE == 0:
        sigmoid = tl.sigmoid(gate)
        value = gate * sigmoid
        slope = sigmoid + value * (1.0 - sigmoid)
    elif CODE == 1:
        below = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        value = gate * below
        slope = below + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    elif CODE == 2:
        # tanh(x) = 2 sigmoid(2 x) - 1, so that (1 + tanh(x)) / 2 is one sigmoid
        below = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        value = gate * below
        inner = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
        slope = below + value * (1.0 - below) * inner
    else:
        is_inside = gate <= 7.0
        gate = tl.where(is_inside, gate, 7.0)
        sigmoid = tl.sigmoid(1.702 * gate)
        value = gate * sigmoid
        slope = tl.where(is_inside, sigmoid + 1.702 * value * (1.0 - sigmoid), 0.0)
    return value, slope


@triton.jit
def gated_value(gate, up, CODE: tl.constexpr):
    """f(gate) up, fp32."""
    value, _ = _activated(gate, CODE)
    if CODE == 3:
        up = 1.0 + tl.minimum(tl.maximum(up, -7.0), 7.0)
    return value * up


@triton.jit
def gated_gradients(grad, gate, up, CODE: tl.constexpr):
    """Gradients of gate and up, fp32."""
    value, slope = _activated(gate, CODE)
    grad_up = grad * value
    if CODE == 3:
        is_inside = (up >= -7.0) & (up <= 7.0)
        grad_up = tl.where(is_inside, grad_up, 0.0)
        up = 1.0 + tl.minimum(tl.maximum(up, -7.0), 7.0)
    return grad * slope * up, grad_up


@triton.jit
def _forward(
    gate_NF, up_NF, out_NF, gate_stride, up_stride, num_columns, num_blocks,
    CODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    column = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_columns
    gate = tl.load(gate_NF + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_NF + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_NF + row * num_columns + column, gated_value(gate, up, CODE), mask=mask)


@triton.jit
def _backward(
    grad_NF, gate_NF, up_NF, grad_gate_NF, grad_up_NF, grad_stride, gate_stride, up_stride, num_columns, num_blocks,
    CODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    column = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_columns
    grad = tl.load(grad_NF + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_NF + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_NF + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    grad_gate, grad_up = gated_gradients(grad, gate, up, CODE)
    out = row * num_columns + column
    tl.store(grad_gate_NF + out, grad_gate, mask=mask)
    tl.store(grad_up_NF + out, grad_up, mask=mask)


def in_rows(x: Tensor) -> Tensor:
    """`x` as [N, F] with contiguous columns: a view where strides allow it, else a copy. Contiguous tensors become one
    row, so that no block is cut at a row's end."""
    if x.is_contiguous():
        return x.view(1, -1) if x.numel() <= LARGEST else x.view(-1, x.shape[-1])
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _aligned(*tensors: Tensor) -> list[Tensor]:
    """All `in_rows`, and with the same number of rows."""
    if tensors[0].numel() == 0:
        return [t.reshape(0, 1) for t in tensors]
    rows = [in_rows(t) for t in tensors]
    if len({r.shape for r in rows}) > 1:
        rows = [r if r.shape[0] > 1 else r.view(-1, tensors[0].shape[-1]) for r in rows]
    return rows


@operator(
    "gated_activation_backward", fake=lambda grad, gate, up, kind: (gate.new_empty(gate.shape), up.new_empty(up.shape))
)
def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, contiguous."""
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    grad_NF, gate_NF, up_NF = _aligned(grad, gate, up)
    grid, tile = _grid(gate_NF)
    launch(
        _backward, grid, grad_NF, gate_NF, up_NF, grad_gate, grad_up,
        grad_NF.stride(0), gate_NF.stride(0), up_NF.stride(0), gate_NF.shape[1],
        *_blocks(gate_NF, tile), on=gate, CODE=CODES[kind], **tile.constants, num_warps=tile.num_warps,
    )  # fmt: skip
    return grad_gate, grad_up


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *gated_backward(grad, *ctx.saved_tensors, ctx.kind), None


@operator("gated_activation", fake=lambda gate, up, kind: gate.new_empty(gate.shape), saves=_save, gradients=_gradients)
def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """f(gate) up, contiguous."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate_NF, up_NF = _aligned(gate, up)
    grid, tile = _grid(gate_NF)
    launch(
        _forward, grid, gate_NF, up_NF, out, gate_NF.stride(0), up_NF.stride(0), gate_NF.shape[1],
        *_blocks(gate_NF, tile), on=gate, CODE=CODES[kind], **tile.constants, num_warps=tile.num_warps,
    )  # fmt: skip
    return out


def _blocks(x_NF: Tensor, tile: Tile) -> tuple[int]:
    return (triton.cdiv(x_NF.shape[1], tile.constants["BLOCK"]),)


def _grid(x_NF: Tensor) -> tuple[tuple[int], Tile]:
    tile = TILES[0]
    return (x_NF.shape[0] * _blocks(x_NF, tile)[0],), tile


def _traffic(num_tensors: int) -> Any:
    def traffic(sizes: Sizes, tile: Tile) -> Traffic:
        moved = num_tensors * 2 * sizes["rows"] * sizes["columns"]
        return Traffic(moved_bytes=moved, least_bytes=moved)

    return traffic


_SIZES = {"rows": 8192, "columns": 14336}  # one sequence of Llama 3.1 8B
_STRIDES = {"num_columns": "i32:16", "num_blocks": "i32"}

SOURCES = tuple(
    source
    for kind, code in CODES.items()
    for source in (
        KernelSource(
            name=f"gated_{kind}_forward", op="swiglu", function=_forward,
            signature={"gate_NF": "*bf16", "up_NF": "*bf16", "out_NF": "*bf16",
                       "gate_stride": "i32:16", "up_stride": "i32:16", **_STRIDES},
            constants={"CODE": code}, tiles=TILES, traffic=_traffic(GATED_ACTIVATION.forward), sizes=_SIZES,
        ),
        KernelSource(
            name=f"gated_{kind}_backward", op="swiglu", function=_backward,
            signature={"grad_NF": "*bf16", "gate_NF": "*bf16", "up_NF": "*bf16", "grad_gate_NF": "*bf16",
                       "grad_up_NF": "*bf16", "grad_stride": "i32:16", "gate_stride": "i32:16", "up_stride": "i32:16",
                       **_STRIDES},
            constants={"CODE": code}, tiles=TILES, traffic=_traffic(GATED_ACTIVATION.backward), sizes=_SIZES,
        ),
    )
)  # fmt: skip
