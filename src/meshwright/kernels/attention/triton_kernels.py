"""Triton kernels of attention: forward, D, dQ, and dK with dV. `triton_attention` has formulas and launches.

T queries, S keys, H query heads, R query heads that share a key/value head, K width of queries and keys, V of values
(KP and VP: the next power of two). A program takes TM queries or TN keys.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton compiles these functions from their source; as Python they have no types.

from __future__ import annotations

import triton
import triton.language as tl

from meshwright.kernels.triton_dot import dot

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(scores, cap):
    """cap tanh(scores / cap); tanh(x) = 2 sigmoid(2 x) - 1."""
    return cap * (2.0 * tl.sigmoid(scores * (2.0 / cap)) - 1.0)


@triton.jit
def bounds_of(first, last, S, TN: tl.constexpr):
    """Return bounds of keys that some query sees, [low, high), and that all queries see, [all_low, all_high)."""
    low = tl.maximum(tl.min(first), 0) // TN * TN
    high = tl.minimum(tl.max(last) + 1, S)
    all_low = tl.maximum((tl.maximum(tl.max(first), 0) + TN - 1) // TN * TN, low)
    all_high = tl.minimum(tl.min(last) + 1, S) // TN * TN
    all_low = tl.minimum(all_low, tl.maximum(all_high, low))
    return low, high, all_low, tl.maximum(all_high, all_low)


@triton.jit
def visible(first, last, keys, S):
    """[queries, keys]: True where a query sees a key."""
    return (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None]) & (keys < S)[None, :]


@triton.jit
def ranges_of(first_ptr, last_ptr, b, stride_b, t, T, S, HAS_RANGES: tl.constexpr):
    """First and last keys of queries `t`; queries behind the end have the last query's keys."""
    row = tl.minimum(t, T - 1)
    if HAS_RANGES:
        first = tl.load(first_ptr + b * stride_b + row)
        last = tl.load(last_ptr + b * stride_b + row)
    else:
        first = row * 0
        last = row + (S - T)
    return first, last


@triton.jit
def forward_walk(
    acc, m, total, q, k_ptr, v_ptr, stride_ks, stride_vs, first, last, start, stop, S, scale, cap,
    MASKED: tl.constexpr, HAS_CAP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    TN: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [start, stop); scores are in units of log 2."""
    k_dim, v_dim = tl.arange(0, KP), tl.arange(0, VP)
    for base in range(start, stop, TN):
        s = base + tl.arange(0, TN)
        s_64 = s.to(tl.int64)
        k = tl.load(
            k_ptr + s_64[None, :] * stride_ks + k_dim[:, None], mask=(s < S)[None, :] & (k_dim < K)[:, None], other=0.0
        )
        scores = dot(q, k, tl.zeros((q.shape[0], TN), tl.float32)) * scale
        if HAS_CAP:
            scores = capped(scores, cap)
        scores = scores * LOG2_E
        if MASKED:
            scores = tl.where(visible(first, last, s, S), scores, float("-inf"))
        highest = tl.maximum(m, tl.max(scores, 1))
        reference = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.math.exp2(scores - reference[:, None])
        shrink = tl.math.exp2(m - reference)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(
            v_ptr + s_64[:, None] * stride_vs + v_dim[None, :], mask=(s < S)[:, None] & (v_dim < V)[None, :], other=0.0
        )
        acc = dot(p.to(v.dtype), v, acc * shrink[:, None])
        m = highest
    return acc, m, total


@triton.jit
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, first_ptr, last_ptr, sinks_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kg, stride_vb, stride_vs, stride_vg, stride_range,
    T, S, H, R, scale, cap,
    HAS_RANGES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """TM queries of one head: out [B, T, H, V] and log sums L [B, H, T], infinite where a query sees nothing."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries have the most keys: first
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // R
    t = tile * TM + tl.arange(0, TM)
    k_dim, v_dim = tl.arange(0, KP), tl.arange(0, VP)
    q_at = b * stride_qb + t.to(tl.int64)[:, None] * stride_qt + h * stride_qh + k_dim[None, :]
    q = tl.load(q_ptr + q_at, mask=(t < T)[:, None] & (k_dim < K)[None, :], other=0.0)
    k_ptr += b * stride_kb + g * stride_kg
    v_ptr += b * stride_vb + g * stride_vg
    first, last = ranges_of(first_ptr, last_ptr, b, stride_range, t, T, S, HAS_RANGES)
    low, high, all_low, all_high = bounds_of(first, last, S, TN)
    acc = tl.zeros((TM, VP), tl.float32)
    m = tl.full((TM,), float("-inf"), tl.float32)
    total = tl.zeros((TM,), tl.float32)
    if HAS_SINKS:
        m = tl.zeros((TM,), tl.float32) + tl.load(sinks_ptr + h).to(tl.float32) * LOG2_E
        total += 1.0
    if HAS_RANGES:
        acc, m, total = forward_walk(
            acc, m, total, q, k_ptr, v_ptr, stride_ks, stride_vs, first, last, low, all_low, S, scale, cap,
            True, HAS_CAP, K, V, KP, VP, TN,
        )  # fmt: skip
    acc, m, total = forward_walk(
        acc, m, total, q, k_ptr, v_ptr, stride_ks, stride_vs, first, last, all_low, all_high, S, scale, cap,
        False, HAS_CAP, K, V, KP, VP, TN,
    )  # fmt: skip
    acc, m, total = forward_walk(
        acc, m, total, q, k_ptr, v_ptr, stride_ks, stride_vs, first, last, all_high, high, S, scale, cap,
        True, HAS_CAP, K, V, KP, VP, TN,
    )  # fmt: skip
    is_seen = total > 0
    out = acc / tl.where(is_seen, total, 1.0)[:, None]
    lse = tl.where(is_seen, m / LOG2_E + tl.log(tl.where(is_seen, total, 1.0)), float("inf"))
    tl.store(lse_ptr + (b * H + h) * T + t, lse, mask=t < T)
    out_at = ((b * T + t.to(tl.int64)[:, None]) * H + h) * V + v_dim[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=(t < T)[:, None] & (v_dim < V)[None, :])


@triton.jit
def attention_delta_kernel(
    out_ptr, grad_ptr, delta_ptr, stride_gb, stride_gt, stride_gh, T, H,
    V: tl.constexpr, VP: tl.constexpr, TM: tl.constexpr,
):  # fmt: skip
    """D [B, H, T]: the sum of dO O over the width."""
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    t, v_dim = tl.program_id(0) * TM + tl.arange(0, TM), tl.arange(0, VP)
    mask = (t < T)[:, None] & (v_dim < V)[None, :]
    t_64 = t.to(tl.int64)
    out = tl.load(out_ptr + ((b * T + t_64[:, None]) * H + h) * V + v_dim[None, :], mask=mask, other=0.0)
    at = b * stride_gb + t_64[:, None] * stride_gt + h * stride_gh + v_dim[None, :]
    grad = tl.load(grad_ptr + at, mask=mask, other=0.0)
    tl.store(delta_ptr + (b * H + h) * T + t, tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1), mask=t < T)


@triton.jit
def score_gradient(scores, lse, grad_p, delta, is_visible, scale, cap, HAS_CAP: tl.constexpr):
    """P and dS / scale from the scores without scale; queries and keys in either orientation."""
    scores = scores * scale
    if HAS_CAP:
        scores = capped(scores, cap)
    p = tl.where(is_visible, tl.math.exp2((scores - lse) * LOG2_E), 0.0)
    ds = p * (grad_p - delta)
    if HAS_CAP:
        ds = ds * (1.0 - (scores / cap) * (scores / cap))
    return p, ds


@triton.jit
def attention_query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, grad_q_ptr, first_ptr, last_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kg, stride_vb, stride_vs, stride_vg,
    stride_gb, stride_gt, stride_gh, stride_range, T, S, H, R, scale, cap,
    HAS_RANGES: tl.constexpr, HAS_CAP: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """dQ of TM queries of one head."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    t = tile * TM + tl.arange(0, TM)
    t_64 = t.to(tl.int64)
    k_dim, v_dim = tl.arange(0, KP), tl.arange(0, VP)
    q_mask, grad_mask = (t < T)[:, None] & (k_dim < K)[None, :], (t < T)[:, None] & (v_dim < V)[None, :]
    q = tl.load(
        q_ptr + b * stride_qb + t_64[:, None] * stride_qt + h * stride_qh + k_dim[None, :], mask=q_mask, other=0.0
    )
    grad_at = b * stride_gb + t_64[:, None] * stride_gt + h * stride_gh + v_dim[None, :]
    grad = tl.load(grad_ptr + grad_at, mask=grad_mask, other=0.0)
    lse = tl.load(lse_ptr + (b * H + h) * T + t, mask=t < T, other=float("inf"))
    delta = tl.load(delta_ptr + (b * H + h) * T + t, mask=t < T, other=0.0)
    k_ptr += b * stride_kb + h // R * stride_kg
    v_ptr += b * stride_vb + h // R * stride_vg
    first, last = ranges_of(first_ptr, last_ptr, b, stride_range, t, T, S, HAS_RANGES)
    bounds = bounds_of(first, last, S, TN)
    acc = tl.zeros((TM, KP), tl.float32)
    for base in range(bounds[0], bounds[1], TN):
        s = base + tl.arange(0, TN)
        s_64 = s.to(tl.int64)
        k = tl.load(
            k_ptr + s_64[:, None] * stride_ks + k_dim[None, :], mask=(s < S)[:, None] & (k_dim < K)[None, :], other=0.0
        )
        v = tl.load(
            v_ptr + s_64[:, None] * stride_vs + v_dim[None, :], mask=(s < S)[:, None] & (v_dim < V)[None, :], other=0.0
        )
        scores = dot(q, tl.trans(k), tl.zeros((TM, TN), tl.float32))
        grad_p = dot(grad, tl.trans(v), tl.zeros((TM, TN), tl.float32))
        gradients = score_gradient(
            scores, lse[:, None], grad_p, delta[:, None], visible(first, last, s, S), scale, cap, HAS_CAP
        )
        acc = dot(gradients[1].to(k.dtype), k, acc)
    at = ((b * T + t_64[:, None]) * H + h) * K + k_dim[None, :]
    tl.store(grad_q_ptr + at, (acc * scale).to(grad_q_ptr.dtype.element_ty), mask=q_mask)


@triton.jit
def attention_key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, grad_k_ptr, grad_v_ptr, first_ptr, last_ptr, tiles_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kg, stride_vb, stride_vs, stride_vg,
    stride_gb, stride_gt, stride_gh, stride_range, stride_tiles, T, S, H, R, scale, cap,
    HAS_RANGES: tl.constexpr, HAS_CAP: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """dK and dV of TN keys of one key/value head. `tiles_ptr`: first and last + 1 tile of queries, by tile of keys."""
    tile = tl.program_id(0)
    G = H // R
    b, g = (tl.program_id(1) // G).to(tl.int64), (tl.program_id(1) % G).to(tl.int64)
    s = tile * TN + tl.arange(0, TN)
    s_64 = s.to(tl.int64)
    k_dim, v_dim = tl.arange(0, KP), tl.arange(0, VP)
    k_mask, v_mask = (s < S)[:, None] & (k_dim < K)[None, :], (s < S)[:, None] & (v_dim < V)[None, :]
    k = tl.load(
        k_ptr + b * stride_kb + s_64[:, None] * stride_ks + g * stride_kg + k_dim[None, :], mask=k_mask, other=0.0
    )
    v = tl.load(
        v_ptr + b * stride_vb + s_64[:, None] * stride_vs + g * stride_vg + v_dim[None, :], mask=v_mask, other=0.0
    )
    if HAS_RANGES:
        begin = tl.load(tiles_ptr + b * stride_tiles + 2 * tile)
        end = tl.load(tiles_ptr + b * stride_tiles + 2 * tile + 1)
    else:
        begin = tl.maximum(tile * TN - (S - T), 0) // TM
        end = tl.cdiv(T, TM)
    grad_k = tl.zeros((TN, KP), tl.float32)
    grad_v = tl.zeros((TN, VP), tl.float32)
    for step in range(0, R * tl.maximum(end - begin, 0)):
        h = g * R + step // (end - begin)
        t = (begin + step % (end - begin)) * TM + tl.arange(0, TM)
        t_64 = t.to(tl.int64)
        first, last = ranges_of(first_ptr, last_ptr, b, stride_range, t, T, S, HAS_RANGES)
        q_at = b * stride_qb + t_64[:, None] * stride_qt + h * stride_qh + k_dim[None, :]
        q = tl.load(q_ptr + q_at, mask=(t < T)[:, None] & (k_dim < K)[None, :], other=0.0)
        grad_at = b * stride_gb + t_64[:, None] * stride_gt + h * stride_gh + v_dim[None, :]
        grad = tl.load(grad_ptr + grad_at, mask=(t < T)[:, None] & (v_dim < V)[None, :], other=0.0)
        lse = tl.load(lse_ptr + (b * H + h) * T + t, mask=t < T, other=float("inf"))
        delta = tl.load(delta_ptr + (b * H + h) * T + t, mask=t < T, other=0.0)
        scores = dot(k, tl.trans(q), tl.zeros((TN, TM), tl.float32))
        grad_p = dot(v, tl.trans(grad), tl.zeros((TN, TM), tl.float32))
        is_visible = (s[:, None] >= first[None, :]) & (s[:, None] <= last[None, :]) & (t < T)[None, :]
        p, ds = score_gradient(scores, lse[None, :], grad_p, delta[None, :], is_visible, scale, cap, HAS_CAP)
        grad_v = dot(p.to(grad.dtype), grad, grad_v)
        grad_k = dot(ds.to(q.dtype), q, grad_k)
    k_at = ((b * S + s_64[:, None]) * G + g) * K + k_dim[None, :]
    v_at = ((b * S + s_64[:, None]) * G + g) * V + v_dim[None, :]
    tl.store(grad_k_ptr + k_at, (grad_k * scale).to(grad_k_ptr.dtype.element_ty), mask=k_mask)
    tl.store(grad_v_ptr + v_at, grad_v.to(grad_v_ptr.dtype.element_ty), mask=v_mask)
