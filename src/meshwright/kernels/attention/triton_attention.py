"""Attention that never writes its scores (Triton): forward and backward.

    S = scale Q K^T, capped: c tanh(S / c)       P = exp(S - L),  L = log(Σ exp S + exp sink)       O = P V
    D = Σ dO O       dS = P (dO V^T - D), of capped scores times 1 - (S / c)²       dsink = -Σ exp(sink - L) D
    dQ = scale dS K       dK = scale dS^T Q       dV = P^T dO

A program of the forward pass and of dQ takes TM queries of one head and walks over the keys that they see; one of dK
and dV takes TN keys of one key/value head and walks over the queries that see them, of all query heads that share it.
Nothing is added atomically: the result is the same each time. Ranges of keys (`key_ranges`) bound both walks, so tiles
that no query of a program sees are skipped, and the forward pass masks only tiles that some of its queries do not see.

Scores, sums and gradients accumulate in fp32; P and dS are rounded to the format of the operands for their GEMMs.
Sources: Dao et al. 2022 and Dao 2023 (FlashAttention, FlashAttention-2), algorithms 1 and 2.

B sequences, T queries, S keys, H query heads, G key/value heads, R = H / G, K width of queries and keys, V of values
(KP and VP: the next power of two).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from meshwright.kernels.attention.triton_kernels import (
    attention_delta_kernel,
    attention_forward_kernel,
    attention_key_gradient_kernel,
    attention_query_gradient_kernel,
)
from meshwright.kernels.operators import operator
from meshwright.kernels.sources import KernelSource, Sizes, Tile, Traffic
from meshwright.kernels.triton_route import contiguous_rows, launch

FORWARD, QUERIES, KEYS = "forward", "query_gradient", "key_gradient"


NVIDIA, AMD = ("sm90", "sm100"), ("gfx942", "gfx950")


def _tiles(rows: int, columns: int, *, warps: int, stages: int = 2, on: tuple[str, ...] = ()) -> Tile:
    return Tile(constants={"TM": rows, "TN": columns}, num_warps=warps, num_stages=stages, architectures=on)


TILES = {
    (FORWARD, 64): (_tiles(128, 64, warps=8, on=NVIDIA), _tiles(128, 32, warps=8, on=AMD)),
    (FORWARD, 128): (_tiles(128, 64, warps=8, on=NVIDIA), _tiles(128, 32, warps=8, on=AMD)),
    (FORWARD, 256): (_tiles(64, 32, warps=8, on=NVIDIA), _tiles(64, 16, warps=8, on=AMD)),
    (QUERIES, 64): (_tiles(64, 64, warps=4),),
    (QUERIES, 128): (_tiles(64, 32, warps=4, on=NVIDIA), _tiles(64, 16, warps=8, on=AMD)),
    (QUERIES, 256): (_tiles(64, 32, warps=8, on=NVIDIA), _tiles(32, 16, warps=4, on=AMD)),
    (KEYS, 64): (_tiles(32, 64, warps=4),),
    (KEYS, 128): (_tiles(32, 64, warps=8, on=NVIDIA), _tiles(32, 64, warps=4, stages=1, on=AMD)),
    (KEYS, 256): (_tiles(16, 64, warps=8, on=NVIDIA), _tiles(16, 32, warps=4, stages=1, on=AMD)),
}
"""Tiles by kernel and the wider of KP and VP, 64 at least: large tiles that do not spill in Triton 3.4 and
3.9. A thread of AMD's devices has 512 registers with 4 warps and 256 with 8. Matrix instructions of NVIDIA's take
64 rows, of queries in one gradient and of keys in the other."""
DELTA_ROWS = 64
WIDEST = 256


def tile_of(kernel: str, width: int) -> Tile:
    """The tile of a kernel for heads of this width, on the devices that PyTorch was built for."""
    tiles = TILES[kernel, max(64, triton.next_power_of_2(width))]
    return tiles[-1 if torch.version.hip else 0]


def _widths(q_BTHK: Tensor, v_BSGV: Tensor) -> dict[str, int]:
    k, v = q_BTHK.shape[-1], v_BSGV.shape[-1]
    return {"K": k, "V": v, "KP": max(16, triton.next_power_of_2(k)), "VP": max(16, triton.next_power_of_2(v))}


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _outputs(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    b, t, h, _ = q_BTHK.shape
    return q_BTHK.new_empty(b, t, h, v_BSGV.shape[-1]), q_BTHK.new_empty(b, h, t, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, first, last, sinks, ctx.scale, ctx.cap = inputs
    ctx.save_for_backward(q, k, v, *output, first, last, sinks)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_BTHV: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *given, first, last, sinks = ctx.saved_tensors
    *grads, of_sinks = attention_backward(grad_BTHV, *given, first, last, sinks, ctx.scale, ctx.cap)
    return *grads, None, None, None if sinks is None else of_sinks, None, None


@operator("attention", fake=_outputs, saves=_save, gradients=_gradients)
def attention_forward(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    first_BT: Tensor | None,
    last_BT: Tensor | None,
    sinks_H: Tensor | None,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, V] and log sums of the softmax [B, H, T], fp32."""
    (b, t, h, _), (_, s, g, _) = q_BTHK.shape, k_BSGK.shape
    out, lse = _outputs(q_BTHK, k_BSGK, v_BSGV)
    q, k, v = (contiguous_rows(x) for x in (q_BTHK, k_BSGK, v_BSGV))
    tile = tile_of(FORWARD, max(q.shape[-1], v.shape[-1]))
    launch(
        attention_forward_kernel, (triton.cdiv(t, tile.constants["TM"]), b * h),
        q, k, v, out, lse, *_range_arguments(first_BT, last_BT, q), lse if sinks_H is None else sinks_H.contiguous(),
        *_strides(q, k, v), _range_stride(first_BT), t, s, h, h // max(g, 1), scale, cap,
        on=q, HAS_RANGES=first_BT is not None, HAS_SINKS=sinks_H is not None, HAS_CAP=cap > 0, **_widths(q, v),
        **tile.constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out, lse


def _range_arguments(first_BT: Tensor | None, last_BT: Tensor | None, otherwise: Tensor) -> tuple[Tensor, Tensor]:
    if first_BT is None or last_BT is None:
        return otherwise, otherwise
    return first_BT.contiguous(), last_BT.contiguous()


def _range_stride(first_BT: Tensor | None) -> int:
    """Elements from one sequence's ranges to the next; 0 where all sequences share them."""
    return 0 if first_BT is None or len(first_BT) == 1 else first_BT.shape[1]


def _gradients_like(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sinks = q.new_empty(0) if sinks_H is None else torch.empty_like(sinks_H)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_sinks


@operator("attention_backward", fake=lambda grad, q, k, v, *others: _gradients_like(q, k, v, others[4]))
def attention_backward(
    grad_BTHV: Tensor,
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    out_BTHV: Tensor,
    lse_BHT: Tensor,
    first_BT: Tensor | None,
    last_BT: Tensor | None,
    sinks_H: Tensor | None,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and sinks (empty without)."""
    (b, t, h, _), (_, s, g, _) = q_BTHK.shape, k_BSGK.shape
    grad, q, k, v = (contiguous_rows(x) for x in (grad_BTHV, q_BTHK, k_BSGK, v_BSGV))
    grads = _gradients_like(q, k, v, sinks_H)
    if not (t and s):
        for x in grads:
            x.zero_()
        return grads
    delta, width = torch.empty_like(lse_BHT), max(q.shape[-1], v.shape[-1])
    widths, ratio = _widths(q, v), h // max(g, 1)
    launch(
        attention_delta_kernel, (triton.cdiv(t, DELTA_ROWS), b * h), out_BTHV, grad, delta, *_strides(grad), t, h,
        on=q, V=widths["V"], VP=widths["VP"], TM=DELTA_ROWS, num_warps=4,
    )  # fmt: skip
    ranges = _range_arguments(first_BT, last_BT, q)
    shared = (*_strides(q, k, v, grad), _range_stride(first_BT))
    flags = {"HAS_RANGES": first_BT is not None, "HAS_CAP": cap > 0, **widths}
    tile = tile_of(QUERIES, width)
    launch(
        attention_query_gradient_kernel, (triton.cdiv(t, tile.constants["TM"]), b * h),
        q, k, v, grad, lse_BHT, delta, grads[0], *ranges, *shared, t, s, h, ratio, scale, cap,
        on=q, **flags, **tile.constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    tile = tile_of(KEYS, width)
    tiles = _tiles_of_queries(first_BT, last_BT, tile, num_keys=s)
    launch(
        attention_key_gradient_kernel, (triton.cdiv(s, tile.constants["TN"]), b * g),
        q, k, v, grad, lse_BHT, delta, grads[1], grads[2], *ranges, q if tiles is None else tiles,
        *shared, 0 if tiles is None or len(tiles) == 1 else tiles.stride(0), t, s, h, ratio, scale, cap,
        on=q, **flags, **tile.constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if sinks_H is not None:
        shares_BHT = torch.exp(sinks_H.float()[:, None] - lse_BHT)
        grads[3].copy_(-(shares_BHT * delta).sum(dim=(0, 2)))
    return grads


def _tiles_of_queries(first_BT: Tensor | None, last_BT: Tensor | None, tile: Tile, *, num_keys: int) -> Tensor | None:
    """First and last + 1 tile of queries that see some key of a tile of keys, int32 [B, tiles, 2]."""
    if first_BT is None or last_BT is None:
        return None
    rows, columns = tile.constants["TM"], tile.constants["TN"]
    padding = -first_BT.shape[1] % rows
    low_BI = torch.nn.functional.pad(first_BT, (0, padding), value=2**30).unflatten(1, (-1, rows)).amin(dim=2)
    high_BI = torch.nn.functional.pad(last_BT, (0, padding), value=-1).unflatten(1, (-1, rows)).amax(dim=2)
    start_J = torch.arange(0, num_keys, columns, device=first_BT.device)[:, None]
    sees_BJI = (low_BI[:, None] < start_J + columns) & (high_BI[:, None] >= start_J)
    index_I = torch.arange(1, low_BI.shape[1] + 1, device=first_BT.device)
    end_BJ = (sees_BJI * index_I).amax(dim=2)
    begin_BJ = low_BI.shape[1] - (sees_BJI * index_I.flip(0)).amax(dim=2)
    return torch.stack([begin_BJ.clamp(max=low_BI.shape[1]).minimum(end_BJ), end_BJ], dim=-1).int().contiguous()


# --- what `inspection` compiles ---

_SIZES = {"sequences": 1, "queries": 8192, "heads": 32, "kv_heads": 8, "width": 128}  # Llama 3.1 8B


def _traffic(sizes: Sizes, tile: Tile, *, reads: int, writes: int) -> Traffic:
    """Tensors of queries and of keys, once each: programs of one head run together and share its keys in the cache."""
    rows = 2 * sizes["sequences"] * sizes["queries"] * sizes["width"]
    moved = rows * (reads * sizes["heads"] + writes * sizes["kv_heads"])
    return Traffic(moved_bytes=moved, least_bytes=moved)


def _strided(*names: str) -> dict[str, str]:
    return {f"stride_{name}": "i32:16" for name in names}


def _sources() -> tuple[KernelSource, ...]:
    operands = {f"{name}_ptr": "*bf16" for name in ("q", "k", "v")}
    strides = _strided("qb", "qt", "qh", "kb", "ks", "kg", "vb", "vs", "vg")
    grad_strides = _strided("gb", "gt", "gh")
    ranges = {"first_ptr": "*i32", "last_ptr": "*i32", "stride_range": "i32"}
    sizes = {"T": "i32:16", "S": "i32:16", "H": "i32", "R": "i32", "scale": "fp32", "cap": "fp32"}
    sums = {"lse_ptr": "*fp32", "delta_ptr": "*fp32"}
    backward = sums | grad_strides | {"grad_ptr": "*bf16"}
    kernels = {  # function, reads and writes, arguments of its own
        FORWARD: (attention_forward_kernel, (2, 2), {"out_ptr": "*bf16", "lse_ptr": "*fp32", "sinks_ptr": "*bf16"}),
        QUERIES: (attention_query_gradient_kernel, (3, 2), backward | {"grad_q_ptr": "*bf16"}),
        KEYS: (
            attention_key_gradient_kernel, (2, 4),
            backward | {"grad_k_ptr": "*bf16", "grad_v_ptr": "*bf16", "tiles_ptr": "*i32", "stride_tiles": "i32"},
        ),
    }  # fmt: skip
    found = []
    for (kernel, widest), tiles in TILES.items():
        function, traffic, own = kernels[kernel]
        for k_dim, v_dim in {64: ((64, 64),), 128: ((128, 128),), 256: ((192, 128), (256, 256))}[widest]:
            widths = {"K": k_dim, "V": v_dim, "KP": triton.next_power_of_2(k_dim), "VP": v_dim}
            for has_ranges in (False, True):
                flags = {"HAS_RANGES": has_ranges, "HAS_CAP": False, **widths}
                flags |= {"HAS_SINKS": has_ranges} if kernel == FORWARD else {}
                found.append(KernelSource(
                    name=f"attention_{kernel}_{k_dim}_{v_dim}{'_ranges' if has_ranges else ''}", op="attention",
                    function=function, signature=operands | own | strides | ranges | sizes, constants=flags,
                    tiles=tiles, traffic=_traffic_of(*traffic), sizes=_SIZES | {"width": k_dim}, is_memory_bound=False,
                ))  # fmt: skip
    found.append(KernelSource(
        name="attention_delta", op="attention", function=attention_delta_kernel,
        signature={"out_ptr": "*bf16", "grad_ptr": "*bf16", "delta_ptr": "*fp32", "T": "i32:16", "H": "i32"}
        | grad_strides, constants={"V": 128, "VP": 128, "TM": DELTA_ROWS}, tiles=(Tile(num_warps=4),),
        traffic=_traffic_of(2, 0), sizes=_SIZES,
    ))  # fmt: skip
    return tuple(found)


def _traffic_of(reads: int, writes: int) -> Any:
    return lambda sizes, tile: _traffic(sizes, tile, reads=reads, writes=writes)


SOURCES = _sources()
