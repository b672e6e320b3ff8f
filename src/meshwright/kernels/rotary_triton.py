"""Rotary position embedding as one Triton kernel for queries and keys, forward and backward (formulas in `rotary`).

A program takes a token: it reads cosine and sine once, and turns all heads of queries, then of keys. The gradient is
the same kernel with the sine negated and, where the forward pass was interleaved, with the order written back.

B sequences, T tokens, H query heads, G key heads, K width of a head, J frequencies.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.operators import operator
from meshwright.kernels.sources import KernelSource, Sizes, Tile, Traffic
from meshwright.kernels.traffic import ROTARY
from meshwright.kernels.triton_route import launch

TILES = (Tile(constants={"HEADS": 8}, num_warps=4), Tile(constants={"HEADS": 16}, num_warps=8))


@triton.jit
def _turn(
    x, out, cos, sin, x_head_stride, num_heads, width, num_pairs,
    READS_PAIRS: tl.constexpr, WRITES_PAIRS: tl.constexpr, PAIRS: tl.constexpr, PLAIN: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """All heads of one token; `out` is contiguous."""
    pair = tl.arange(0, PAIRS)[None, :]
    for start in range(0, num_heads, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        mask = (head < num_heads) & (pair < num_pairs)
        source = x + head * x_head_stride
        target = out + head * width
        if READS_PAIRS:
            first = tl.load(source + 2 * pair, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(source + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
        else:
            first = tl.load(source + pair, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(source + num_pairs + pair, mask=mask, other=0.0).to(tl.float32)
        one, other = first * cos - second * sin, second * cos + first * sin
        if WRITES_PAIRS:
            tl.store(target + 2 * pair, one, mask=mask)
            tl.store(target + 2 * pair + 1, other, mask=mask)
        else:
            tl.store(target + pair, one, mask=mask)
            tl.store(target + num_pairs + pair, other, mask=mask)
        if PLAIN > 0:
            column = 2 * num_pairs + tl.arange(0, PLAIN)[None, :]
            plain = (head < num_heads) & (column < width)
            tl.store(target + column, tl.load(source + column, mask=plain, other=0.0), mask=plain)


@triton.jit
def _rotate(
    q, k, cos, sin, q_out, k_out, q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    angle_stride_b, angle_stride_t, num_tokens, num_q_heads, num_k_heads, width, num_pairs,
    READS_PAIRS: tl.constexpr, WRITES_PAIRS: tl.constexpr, TURNS_BACK: tl.constexpr,
    PAIRS: tl.constexpr, PLAIN: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    b, t = index // num_tokens, index % num_tokens
    pair = tl.arange(0, PAIRS)[None, :]
    angle = b * angle_stride_b + t * angle_stride_t + pair
    c = tl.load(cos + angle, mask=pair < num_pairs, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=pair < num_pairs, other=0.0).to(tl.float32)
    if TURNS_BACK:
        s = -s
    _turn(q + b * q_stride_b + t * q_stride_t, q_out + index * num_q_heads * width, c, s, q_stride_h, num_q_heads,
          width, num_pairs, READS_PAIRS, WRITES_PAIRS, PAIRS, PLAIN, HEADS)  # fmt: skip
    _turn(k + b * k_stride_b + t * k_stride_t, k_out + index * num_k_heads * width, c, s, k_stride_h, num_k_heads,
          width, num_pairs, READS_PAIRS, WRITES_PAIRS, PAIRS, PLAIN, HEADS)  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.is_interleaved, ctx.turns_back = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    turned = rotated_pair(grads[0], grads[1], cos, sin, ctx.is_interleaved, not ctx.turns_back)
    return *turned, None, None, None, None


@operator(
    "rotary",
    fake=lambda q_BTHK, k_BTGK, *others: (q_BTHK.new_empty(q_BTHK.shape), k_BTGK.new_empty(k_BTGK.shape)),
    saves=_save,
    gradients=_gradients,
)
def rotated_pair(
    q_BTHK: Tensor, k_BTGK: Tensor, cos_BT1J: Tensor, sin_BT1J: Tensor, is_interleaved: bool, turns_back: bool
) -> tuple[Tensor, Tensor]:
    """Queries and keys, contiguous. `turns_back`: the gradient of the other direction."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_BTHK, k_BTGK))
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BTHK, k_BTGK))
    batch, tokens, _, width = q.shape
    num_pairs = cos_BT1J.shape[-1]
    cos, sin = (a.expand(batch, tokens, 1, num_pairs) for a in (cos_BT1J, sin_BT1J))
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    plain = width - 2 * num_pairs
    tile = TILES[0]
    launch(
        _rotate, (batch * tokens,), q, k, cos, sin, q_out, k_out, *q.stride()[:3], *k.stride()[:3], *cos.stride()[:2],
        tokens, q.shape[2], k.shape[2], width, num_pairs, on=q,
        READS_PAIRS=is_interleaved and not turns_back, WRITES_PAIRS=is_interleaved and turns_back,
        TURNS_BACK=turns_back, PAIRS=triton.next_power_of_2(max(1, num_pairs)),
        PLAIN=triton.next_power_of_2(plain) if plain else 0, **tile.constants, num_warps=tile.num_warps,
    )  # fmt: skip
    return q_out, k_out


def _traffic(sizes: Sizes, tile: Tile) -> Traffic:
    heads = sizes["q_heads"] + sizes["k_heads"]
    a_token = 2 * ROTARY.forward * heads * sizes["width"] + 2 * 4 * sizes["width"] // 2
    return Traffic(moved_bytes=sizes["tokens"] * a_token, least_bytes=sizes["tokens"] * a_token)


_SIGNATURE = {
    **dict.fromkeys(("q", "k", "q_out", "k_out"), "*bf16"),
    **dict.fromkeys(("cos", "sin"), "*fp32"),
    **dict.fromkeys(("q_stride_b", "q_stride_t", "q_stride_h", "k_stride_b", "k_stride_t", "k_stride_h"), "i32:16"),
    **dict.fromkeys(("angle_stride_b", "angle_stride_t", "width", "num_pairs"), "i32:16"),
    **dict.fromkeys(("num_tokens", "num_q_heads", "num_k_heads"), "i32"),
}

SOURCES = tuple(
    KernelSource(
        name=name, op="rotary", function=_rotate, signature=_SIGNATURE, tiles=TILES, traffic=_traffic,
        sizes={"tokens": 8192, "q_heads": 32, "k_heads": 8, "width": 128},  # Llama 3.1 8B
        constants={"READS_PAIRS": is_interleaved, "WRITES_PAIRS": False, "TURNS_BACK": turns_back,
                   "PAIRS": pairs, "PLAIN": plain},
    )
    for name, is_interleaved, turns_back, pairs, plain in (
        ("rotary_forward", False, False, 64, 0),
        ("rotary_backward", False, True, 64, 0),
        ("rotary_interleaved", True, False, 64, 0),
        ("rotary_partial", False, False, 32, 64),
    )
)  # fmt: skip
