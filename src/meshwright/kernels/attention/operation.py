"""Attention: the specification, and the routes of operation `attention`.

    S = scale Q K^T, capped: c tanh(S / c)       P = softmax over the keys that a query sees and its head's sink
    O = P V                                      the sink has no value; a query that sees no key has the output 0
    P is dropped out                             in training: by the routes reference, sdpa and flash

    route       kernel                                                 serves
    blockwise   GEMMs of a CPU, one block of queries at a time         a CPU without AMX, up to 2048 keys;
                (`blockwise`)                                          capped scores on all devices
    sdpa        the one that PyTorch chooses                           all but caps; documents and windows by a
                                                                       mask, sinks by one key and dimension more
    flash       FlashAttention or, on AMD, its equal                   causal, 16 bits
    cudnn       cuDNN's fused attention                                causal, 16 bits, NVIDIA
    flex        PyTorch's FlexAttention, compiled                      all, on a GPU
    triton      ours (`triton_attention`)                              all, on a GPU

B sequences, T queries, S keys, H query heads, G key/value heads, K width of queries and keys, V of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.errors import InputError
from meshwright.kernels import processor
from meshwright.kernels.attention import blockwise
from meshwright.kernels.attention.key_ranges import KeyRanges
from meshwright.kernels.dispatch import choose
from meshwright.kernels.linear import widens
from meshwright.kernels.routes import ANY, KernelCall, Refusal, Route
from meshwright.kernels.shapes import require_format, require_shapes
from meshwright.kernels.triton_route import serves_triton

WIDEST = 256
SIXTEEN_BITS = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreOptions:
    """Scale of the scores, their cap (0: none), the keys that queries see (None: causal), logits of sinks, and the rate
    at which probabilities are dropped."""

    scale: float
    cap: float = 0.0
    ranges: KeyRanges | None = None
    sinks_H: Tensor | None = None
    dropout: float = 0.0


def attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    *,
    scale: float,
    cap: float = 0.0,
    ranges: KeyRanges | None = None,
    sinks_H: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the attended values, [B, T, H, V].

    Without `ranges` attention is causal: the last query sees all keys, the query before sees all but one.
    `ranges` only narrow this. `cap` limits scores; 0: no limit. `sinks_H` has a logit of each head, which
    joins the softmax of every query. Probabilities are dropped at the rate `dropout`.
    """
    require_shapes("attention", q_BTHK=q_BTHK, k_BSGK=k_BSGK, v_BSGV=v_BSGV, sinks_H=sinks_H)
    require_format("attention", q=q_BTHK, k=k_BSGK, v=v_BSGV)
    _require_heads(q_BTHK, k_BSGK, ranges)
    flags = {"cap": cap, "ranges": ranges is not None, "sinks": sinks_H is not None, "dropout": dropout}
    route = choose("attention", q_BTHK, k_BSGK, v_BSGV, flags=frozenset(name for name, on in flags.items() if on))
    options = ScoreOptions(scale=scale, cap=cap, ranges=ranges, sinks_H=sinks_H, dropout=dropout)
    return ROUTES["attention"][route].function(q_BTHK, k_BSGK, v_BSGV, options)


def _require_heads(q_BTHK: Tensor, k_BSGK: Tensor, ranges: KeyRanges | None) -> None:
    """Raise InputError unless all key/value heads serve equally many query heads and `ranges` fit queries and keys."""
    (batch, queries, heads, _), (_, keys, groups, _) = q_BTHK.shape, k_BSGK.shape
    if (heads % groups) if groups else heads:
        raise InputError("attention: query heads are no multiple of key/value heads", got=f"{heads} and {groups}")
    if ranges is None:
        return
    batches, length = ranges.first_BT.shape
    if batches not in (1, batch) or length != queries or ranges.num_keys != keys:
        got = f"{batches} x {length} queries of {ranges.num_keys} keys"
        raise InputError("attention: ranges of other tokens", got=got, allowed=f"{batch} x {queries} of {keys}")


def reference(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, options: ScoreOptions) -> Tensor:
    """The specification; scores and softmax in fp32 at least."""
    length, num_keys = q_BTHK.shape[1], k_BSGK.shape[1]
    repeats = q_BTHK.shape[2] // max(k_BSGK.shape[2], 1)
    wide = torch.promote_types(q_BTHK.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (q_BTHK, k_BSGK, v_BSGV))
    k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    scores_BHTS = torch.einsum("bthk,bshk->bhts", q, k) * options.scale
    if options.cap:
        scores_BHTS = options.cap * torch.tanh(scores_BHTS / options.cap)
    if options.ranges is None:
        mask = torch.ones(length, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - length)
    else:
        mask = options.ranges.mask_B1TS
    scores_BHTS = scores_BHTS.masked_fill(~mask, -torch.inf)
    if options.sinks_H is not None:
        sinks = options.sinks_H.to(wide)[None, :, None, None].expand(*scores_BHTS.shape[:3], 1)
        scores_BHTS = torch.cat([scores_BHTS, sinks], dim=-1)
    seen = scores_BHTS.amax(dim=-1, keepdim=True) > -torch.inf if scores_BHTS.shape[-1] else mask
    p_BHTS = scores_BHTS.masked_fill(~seen, 0.0).softmax(dim=-1) * seen
    p_BHTS = functional.dropout(p_BHTS[..., :num_keys], options.dropout)
    return torch.einsum("bhts,bshv->bthv", p_BHTS, v).to(q_BTHK.dtype)


# --- on a CPU ---


def _blockwise(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, options: ScoreOptions) -> Tensor:
    q, k, v, mask = _with_sinks_and_mask(q_BTHK, k_BSGK, v_BSGV, options)
    return blockwise.attend(q, k, v, mask_B1TS=mask, scale=options.scale, cap=options.cap).transpose(1, 2)


WITHOUT_DROPOUT = Refusal(reason="it drops no probabilities")


def _blockwise_serves(call: KernelCall) -> Refusal | None:
    if "dropout" in call.flags:
        return WITHOUT_DROPOUT
    if "cap" in call.flags:  # PyTorch's kernels have no caps: these GEMMs run on every device
        return Refusal(reason="a sink would be capped like a score") if "sinks" in call.flags else None
    if call.device != "cpu":
        return Refusal(reason="these blocks are for a CPU's caches")
    if processor.HERE.has_amx:
        return Refusal(reason="PyTorch's kernel uses the AMX units of this processor")
    if not call.has_shapes:
        return None
    (queries, keys) = (shape[1] for shape in call.shapes[:2])
    if queries == 1:
        return Refusal(reason="a single query is no block")
    if keys > blockwise.LONGEST:
        return Refusal(reason=f"it keeps the probabilities: {blockwise.LONGEST} keys at most")
    if not all(map(all, call.shapes)):
        return Refusal(reason="an empty tensor")
    return None


# --- PyTorch's kernels ---


def with_sinks(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, sinks_H: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sinks as a first key: its one dimension meets a dimension of the queries that holds the sink of their head.

    So every kernel has them, and a causal mask leaves the first key to all queries.
    """
    sinks_BTH1 = (sinks_H / scale).to(q_BTHK.dtype)[:, None].expand(*q_BTHK.shape[:3], 1)
    first_B1GK = functional.pad(torch.zeros_like(k_BSGK[:, :1]), (0, 1), value=1.0)
    k_BSGK = torch.cat([first_B1GK, functional.pad(k_BSGK, (0, 1))], dim=1)
    v_BSGV = functional.pad(v_BSGV, (0, 0, 0, 0, 1, 0))
    return torch.cat([q_BTHK, sinks_BTH1], dim=-1), k_BSGK, v_BSGV


def _with_sinks_and_mask(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, options: ScoreOptions
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Queries, keys and values with heads before tokens, and a mask unless causal, which lets all see a sink's key."""
    mask_B1TS = None if options.ranges is None else options.ranges.mask_B1TS
    if options.sinks_H is not None:
        q_BTHK, k_BSGK, v_BSGV = with_sinks(q_BTHK, k_BSGK, v_BSGV, options.sinks_H, scale=options.scale)
        mask_B1TS = None if mask_B1TS is None else functional.pad(mask_B1TS, (1, 0), value=True)
    return q_BTHK.transpose(1, 2), k_BSGK.transpose(1, 2), v_BSGV.transpose(1, 2), mask_B1TS


def _sdpa(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, options: ScoreOptions) -> Tensor:
    q, k, v, mask = _with_sinks_and_mask(q_BTHK, k_BSGK, v_BSGV, options)
    if widens(q):  # the kernel multiplies bf16 in loops: five times the time
        q, k, v = q.float(), k.float(), v.float()
    repeats = q.shape[1] // max(k.shape[1], 1)
    # On CUDA the kernel that takes a mask cannot read grouped heads: asked to, PyTorch writes out all scores.
    grouped = repeats > 1 and not (q.is_cuda and mask is not None)
    if repeats > 1 and not grouped:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    num_queries, num_keys = q.shape[2], k.shape[2]
    if mask is None and 1 < num_queries < num_keys:
        from torch.nn.attention.bias import causal_lower_right  # imports the compiler: 0.6 s, 95 MiB

        mask = causal_lower_right(num_queries, num_keys)
    is_causal = False
    if mask is None and num_queries > 1:  # a single query is the last one: it sees all keys
        is_causal = True  # no symbol of a traced graph
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=options.scale, enable_gqa=grouped, dropout_p=options.dropout
    )
    return out.to(q_BTHK.dtype).transpose(1, 2)


def _sdpa_serves(call: KernelCall) -> Refusal | None:
    if "cap" in call.flags:
        return Refusal(reason="PyTorch's kernels have no caps")
    return None


def _by_backend(name: str, *tensors_and_options: Any) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend[name]):
        return _sdpa(*tensors_and_options)


def _fused_serves(call: KernelCall) -> Refusal | None:
    """Refuse calls that FlashAttention and cuDNN do not compute through PyTorch."""
    if call.device != "cuda":
        return Refusal(reason="a kernel of GPUs")
    if others := call.flags & {"ranges", "sinks", "cap"}:
        return Refusal(reason=f"PyTorch has no such kernel with {', '.join(sorted(others))}")
    if not set(call.dtypes) <= SIXTEEN_BITS:
        return Refusal(reason="it computes in 16 bits")
    if call.has_shapes:
        (_, queries, _, width), (_, keys, _, _), (*_, value_width) = call.shapes
        if queries != keys:
            return Refusal(reason="PyTorch aligns its causal mask with the first key, not the last")
        if width != value_width or width > WIDEST or width % 8 or not all(map(all, call.shapes)):
            return Refusal(reason=f"it takes equal widths up to {WIDEST} that 8 divides")
    return None


def _cudnn_serves(call: KernelCall) -> Refusal | None:
    if "dropout" in call.flags:
        return WITHOUT_DROPOUT
    if call.architecture.startswith("gfx"):
        return Refusal(reason="cuDNN is for NVIDIA's devices")
    if "deterministic" in call.flags:
        return Refusal(reason="its backward pass is not deterministic")
    return _fused_serves(call)


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, options: ScoreOptions) -> Tensor:
    return flex(q_BTHK, k_BSGK, v_BSGV, options, attend=_compiled_flex())


def flex(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, options: ScoreOptions, *, attend: Callable[..., Any]
) -> Tensor:
    """FlexAttention, `attend` being its function, compiled or not. The sink scales the output: O σ(L - sink)."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    ranges, cap, sinks_H = options.ranges, options.cap, options.sinks_H
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGV))
    later = k.shape[2] - q.shape[2]

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if ranges is None:
            return key <= query + later
        b = b if len(ranges.first_BT) > 1 else torch.zeros_like(b)
        return (key >= ranges.first_BT[b, query]) & (key <= ranges.last_BT[b, query])

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    batch = None if ranges is None or len(ranges.first_BT) == 1 else len(q)
    mask = create_block_mask(sees, batch, None, q.shape[2], k.shape[2], device=q.device)
    settings = {"score_mod": capped if cap else None, "block_mask": mask, "scale": options.scale}
    settings |= {"enable_gqa": q.shape[1] != k.shape[1]}
    if sinks_H is None:
        return attend(q, k, v, **settings).transpose(1, 2)
    out, sums = attend(q, k, v, **settings, return_aux=AuxRequest(lse=True))
    share_BHT = torch.sigmoid(sums.lse - sinks_H[:, None])
    return (out * share_BHT.unsqueeze(-1)).to(q.dtype).transpose(1, 2)


def _flex_serves(call: KernelCall) -> Refusal | None:
    if "dropout" in call.flags:
        return WITHOUT_DROPOUT
    if call.device != "cuda":
        return Refusal(reason="compiled for GPUs")
    if ANY not in call.flags and not (call.shapes and all(map(all, call.shapes))):
        return Refusal(reason="shapes that are not known, or an empty tensor")
    return None


# --- ours ---


def _triton(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, options: ScoreOptions) -> Tensor:
    from meshwright.kernels.attention.triton_attention import attention_forward

    ranges = options.ranges
    first, last = (None, None) if ranges is None else (ranges.first_BT, ranges.last_BT)
    return attention_forward(q_BTHK, k_BSGK, v_BSGV, first, last, options.sinks_H, options.scale, options.cap)[0]


def _triton_serves(call: KernelCall) -> Refusal | None:
    if "dropout" in call.flags:
        return WITHOUT_DROPOUT
    if any(shape[-1] > WIDEST for shape in call.shapes):
        return Refusal(reason=f"heads wider than {WIDEST}")
    return serves_triton(call)


ROUTES = {
    "attention": {
        "reference": Route(reference),
        "blockwise": Route(_blockwise, serves=_blockwise_serves),
        "sdpa": Route(_sdpa, serves=_sdpa_serves),
        "flash": Route(partial(_by_backend, "FLASH_ATTENTION"), serves=_fused_serves),
        "cudnn": Route(partial(_by_backend, "CUDNN_ATTENTION"), serves=_cudnn_serves),
        "flex": Route(_flex, serves=_flex_serves),
        "triton": Route(_triton, serves=_triton_serves),
    }
}
