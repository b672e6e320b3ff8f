"""AdamW as a Triton kernel in one pass (formulas in `adamw`).

A program takes ROWS blocks of 256 values, which share a scale in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.adamw import AdamStates, AdamWStep
from meshwright.kernels.sources import KernelSource, Sizes, Tile, Traffic
from meshwright.kernels.triton_route import launch

WIDTH = 256
"""Values of a block with one scale (`specs.precision.STATE_BLOCK`)."""

SMALLEST = tl.constexpr(2.0**-38)
"""The least scale of a block."""

TILES = (Tile(constants={"ROWS": 4}, num_warps=4), Tile(constants={"ROWS": 8}, num_warps=8))
FP32, BF16, BYTES = 0, 1, 2


@triton.jit
def _encoded(values, scales, table, first, noise, block, is_block, LAST):
    """Codes of `values` [ROWS, 256] by their blocks' largest; writes the scales. `LAST` is 254 with signs, else 255."""
    scale = tl.maximum(tl.max(tl.abs(values), axis=1), SMALLEST)
    tl.store(scales + block, scale, mask=is_block)
    ratio = values / scale[:, None]
    upper = (ratio.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    code = tl.load(first + upper).to(tl.int32)
    above = tl.load(table + tl.minimum(code + 1, LAST))
    code = tl.where((code < LAST) & (above <= ratio), code + 1, code)
    low = tl.load(table + code)
    high = tl.load(table + tl.minimum(code + 1, LAST))
    gap = tl.where(code < LAST, high - low, 1.0)
    code += tl.where((ratio - low) / gap > (noise.to(tl.float32) + 0.5) / 65536.0, 1, 0)
    code = tl.minimum(code, LAST)
    code = tl.where((LAST == 255) & (values > 0.0), tl.maximum(code, 1), code)  # a denominator stays one
    return code.to(tl.uint8)


@triton.jit
def _update(
    parameter, gradient, first, second, scale, first_scales, second_scales, signed_table, signed_first,
    unsigned_table, unsigned_first, size, start, rate, beta1, beta2, epsilon, kept, correction1, correction2, noise,
    FORMAT: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * 256 + tl.arange(0, 256)[None, :]
    mask = place < size
    is_block = row * 256 < size
    g = tl.load(gradient + place, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        g *= tl.load(scale)
    p = tl.load(parameter + place, mask=mask, other=0.0)
    m_stored = tl.load(first + place, mask=mask, other=0)
    v_stored = tl.load(second + place, mask=mask, other=0)
    if FORMAT == 2:
        m = (
            tl.load(signed_table + m_stored.to(tl.int32))
            * tl.load(first_scales + row, mask=is_block, other=0.0)[:, None]
        )
        root = (
            tl.load(unsigned_table + v_stored.to(tl.int32))
            * tl.load(second_scales + row, mask=is_block, other=0.0)[:, None]
        )
        v = root * root
        # what lies behind the tensor's end must not become a block's largest
        m = tl.where(mask, m, 0.0)
        v = tl.where(mask, v, 0.0)
    else:
        m = m_stored.to(tl.float32)
        v = v_stored.to(tl.float32)
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p * kept - rate / correction1 * m / (tl.sqrt(v / correction2) + epsilon)
    tl.store(parameter + place, p, mask=mask)
    if FORMAT == 0:
        tl.store(first + place, m, mask=mask)
        tl.store(second + place, v, mask=mask)
    else:
        bits = tl.randint(noise, (start + place).to(tl.int32)).to(tl.int32, bitcast=True)
        if FORMAT == 1:
            tl.store(first + place, m, mask=mask)
            rounded = ((v.to(tl.int32, bitcast=True) + (bits & 0xFFFF)) & -65536).to(tl.float32, bitcast=True)
            tl.store(second + place, rounded, mask=mask)
        else:
            low, high = bits & 0xFFFF, (bits >> 16) & 0xFFFF
            m_code = _encoded(m, first_scales, signed_table, signed_first, low, row, is_block, 254)
            v_code = _encoded(tl.sqrt(v), second_scales, unsigned_table, unsigned_first, high, row, is_block, 255)
            tl.store(first + place, m_code, mask=mask)
            tl.store(second + place, v_code, mask=mask)


def update(parameter: Tensor, gradient: Tensor, states: AdamStates, step: AdamWStep, scale: Tensor | None) -> None:
    """See `adamw.adamw`. `parameter` is contiguous."""
    assert parameter.is_contiguous(), "masters are contiguous"
    signed, unsigned = states.tables or (None, None)
    narrow = (
        (None, None, None, None, None, None)
        if signed is None or unsigned is None
        else (signed.scales, unsigned.scales, signed.values, signed.first, unsigned.values, unsigned.first)
    )
    run = _opaque_update if torch.compiler.is_compiling() else _launch_update
    run(
        parameter, gradient.contiguous(), states.first, states.second, scale, *narrow,
        states.start, step.learning_rate, step.betas[0], step.betas[1], step.epsilon, step.weight_decay, step.number,
        step.noise,
    )  # fmt: skip


def _launch_update(
    parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, scale: Tensor | None,
    first_scales: Tensor | None, second_scales: Tensor | None, signed_table: Tensor | None,
    signed_first: Tensor | None, unsigned_table: Tensor | None, unsigned_first: Tensor | None, start: int,
    rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, number: int, noise: int,
) -> None:  # fmt: skip
    """One launch over a tensor. States of 8 bits have scales and tables of their codes."""
    tables = (first_scales, second_scales, signed_table, signed_first, unsigned_table, unsigned_first)
    is_narrow = first_scales is not None
    code = BYTES if is_narrow else {torch.float32: FP32, torch.bfloat16: BF16}[first.dtype]
    tile = TILES[0]
    size = parameter.numel()
    launch(
        _update, (triton.cdiv(size, WIDTH * tile.constants["ROWS"]),), parameter, gradient, first, second,
        parameter if scale is None else scale, *(tables if is_narrow else [first] * len(tables)), size, start,
        rate, beta1, beta2, epsilon, 1.0 - rate * weight_decay,
        1.0 - beta1**number, 1.0 - beta2**number, noise, on=parameter, FORMAT=code, SCALED=scale is not None,
        **tile.constants, num_warps=tile.num_warps,
    )  # fmt: skip


# For a traced optimizer: a launch is nothing that a graph knows. Eager steps save its overhead.
_opaque_update = torch.library.custom_op(
    "meshwright::adamw_", _launch_update,
    mutates_args=("parameter", "first", "second", "first_scales", "second_scales"),
)  # fmt: skip


def _traffic(state_bytes: float) -> Callable[[Sizes, Tile], Traffic]:
    """A parameter is read and written in fp32, its gradient read in fp32, both states are read and written."""

    def traffic(sizes: Sizes, tile: Tile) -> Traffic:
        moved = int(sizes["values"] * (8 + 4 + 2 * state_bytes))
        return Traffic(moved_bytes=moved, least_bytes=moved)

    return traffic


_SIZES = {"values": 4096 * 14336}  # a matrix of Llama 3.1 8B


def _signature(state: str) -> dict[str, Any]:
    floats = ("rate", "beta1", "beta2", "epsilon", "kept", "correction1", "correction2")
    tables = ("first_scales", "second_scales", "signed_table", "unsigned_table", "scale")
    return {
        "parameter": "*fp32", "gradient": "*fp32", "first": f"*{state}", "second": f"*{state}",
        **dict.fromkeys(tables, "*fp32"), "signed_first": "*u8", "unsigned_first": "*u8",
        "size": "i32", "start": "i64:16", "noise": "i64", **dict.fromkeys(floats, "fp32"),
    }  # fmt: skip


SOURCES = (
    *(
        KernelSource(
            name=f"adamw_{name}", op="adamw", function=_update, signature=_signature(state), tiles=TILES,
            traffic=_traffic(2 * width), sizes=_SIZES, constants={"FORMAT": code, "SCALED": True},
        )
        for name, state, width, code in (
            ("fp32", "fp32", 4, FP32), ("bf16", "bf16", 2, BF16), ("int8", "u8", 1 + 4 / WIDTH, BYTES),
        )
    ),
)  # fmt: skip
