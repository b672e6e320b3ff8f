"""Router of a mixture of experts as Triton kernels: one pass forward, one backward (formulas in `router`).

A program takes ROWS tokens with all their experts, and finds each choice as the first of the largest values that are
left: C maxima over registers. Arithmetic is fp32.

N tokens, E experts (EP: the next power of two), C choices (CP), G groups (GP).
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# Triton compiles these functions from their source; as Python they have no types.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.operators import operator
from meshwright.kernels.sources import KernelSource, Sizes, Tile, Traffic
from meshwright.kernels.triton_route import contiguous_rows, launch

TILE = Tile(constants={"ROWS": 4}, num_warps=4)


@triton.jit
def first_of_largest(values, is_free, numbers, LAST: tl.constexpr):
    """The largest of the free values of each row, NaN as infinity, and the first number that has it; else `LAST`."""
    values = tl.where(values == values, values, float("inf"))
    best = tl.max(tl.where(is_free, values, float("-inf")), 1)
    found = tl.min(tl.where((values == best[:, None]) & is_free, numbers, LAST), 1)
    return best, found


@triton.jit
def scores_of(logits, SIGMOID: tl.constexpr):
    """Scores, probabilities and the logarithm of the sum of exponentials."""
    largest = tl.max(logits, 1)
    shifted = tl.exp(logits - largest[:, None])
    total = tl.sum(shifted, 1)
    probability = tl.math.div_rn(shifted, tl.broadcast_to(total[:, None], shifted.shape))
    scores = tl.sigmoid(logits) if SIGMOID else probability
    return scores, probability, largest + tl.log(total)


@triton.jit
def groups_kept(values, expert, is_expert, E, SIGMOID: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
                KEPT: tl.constexpr, EP: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """True for experts of the KEPT best groups of each token."""
    group = expert // (E // G)
    groups = tl.arange(0, GP)[None, :]
    worth = tl.full((ROWS, GP), float("-inf"), tl.float32)
    for g in tl.static_range(G):
        inside = (group == g) & is_expert
        best, first = first_of_largest(values, inside, expert, EP - 1)
        if SIGMOID:
            second, _ = first_of_largest(values, inside & (expert != first[:, None]), expert, EP - 1)
            best += second
        worth = tl.where(groups == g, best[:, None], worth)
    is_free = groups < G
    kept = tl.zeros((ROWS, EP), tl.int1)
    for _ in tl.static_range(KEPT):
        _, chosen = first_of_largest(worth, is_free, groups, GP - 1)
        is_free = is_free & (groups != chosen[:, None])
        kept = kept | (group == chosen[:, None])
    return kept & is_expert


@triton.jit
def router_forward_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, scores_ptr, logsumexp_ptr, N, E, stride, scale,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, NORMALIZE: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, KEPT: tl.constexpr, EP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Weights, experts, scores and logarithms of sums of ROWS tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EP)[None, :]
    is_row, is_expert = row < N, expert < E
    inside = is_row[:, None] & is_expert
    logits = tl.load(logits_ptr + row[:, None] * stride + expert, mask=inside, other=float("-inf"))
    logits = tl.where(is_row[:, None], logits, 0.0)  # no row of NaN where there is no token
    scores, _, logsumexp = scores_of(logits, SIGMOID)
    tl.store(scores_ptr + row[:, None] * E + expert, scores, mask=inside)
    tl.store(logsumexp_ptr + row, logsumexp, mask=is_row)
    values = scores
    if HAS_BIAS:
        values += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    values = tl.where(is_expert, values, float("-inf"))
    if G > 0:
        kept = groups_kept(values, expert, is_expert, E, SIGMOID, G, GP, KEPT, EP, ROWS)
        values = tl.where(kept, values, float("-inf"))
    is_free = tl.broadcast_to(is_expert, (ROWS, EP))
    choice = tl.arange(0, CP)[None, :]
    weights = tl.zeros((ROWS, CP), tl.float32)
    chosen = tl.zeros((ROWS, CP), tl.int32)
    for c in tl.static_range(C):
        _, found = first_of_largest(values, is_free, expert, EP - 1)
        found = tl.minimum(found, E - 1)
        is_found = expert == found[:, None]
        is_free = is_free & ~is_found
        weight = tl.sum(tl.where(is_found, scores, 0.0), 1)
        weights = tl.where(choice == c, weight[:, None], weights)
        chosen = tl.where(choice == c, found[:, None], chosen)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, 1)[:, None] + 1e-20)
    at, is_choice = row[:, None] * C + choice, is_row[:, None] & (choice < C)
    tl.store(weights_ptr + at, weights * scale, mask=is_choice)
    tl.store(experts_ptr + at, chosen.to(tl.int64), mask=is_choice)


@triton.jit
def router_backward_kernel(
    logits_ptr, experts_ptr, grad_weights_ptr, grad_scores_ptr, grad_logsumexp_ptr, grad_ptr, N, E, stride, scale,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, WITH_SCORES: tl.constexpr, WITH_LOGSUMEXP: tl.constexpr,
    C: tl.constexpr, EP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of the logits of ROWS tokens; scores are computed again."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EP)[None, :]
    is_row, is_expert = row < N, expert < E
    inside = is_row[:, None] & is_expert
    logits = tl.load(logits_ptr + row[:, None] * stride + expert, mask=inside, other=float("-inf"))
    logits = tl.where(is_row[:, None], logits, 0.0)
    scores, probability, _ = scores_of(logits, SIGMOID)
    total = tl.zeros((ROWS,), tl.float32)
    product = tl.zeros((ROWS,), tl.float32)
    if NORMALIZE:
        for c in tl.static_range(C):
            found = tl.load(experts_ptr + row * C + c, mask=is_row, other=0).to(tl.int32)
            grad = tl.load(grad_weights_ptr + row * C + c, mask=is_row, other=0.0)
            score = tl.sum(tl.where(expert == found[:, None], scores, 0.0), 1)
            total += score
            product += grad * score
        total += 1e-20
    grad_scores = tl.zeros((ROWS, EP), tl.float32)
    if WITH_SCORES:
        grad_scores += tl.load(grad_scores_ptr + row[:, None] * E + expert, mask=inside, other=0.0)
    for c in tl.static_range(C):
        found = tl.load(experts_ptr + row * C + c, mask=is_row, other=0).to(tl.int32)
        grad = tl.load(grad_weights_ptr + row * C + c, mask=is_row, other=0.0)
        if NORMALIZE:
            grad = grad / total - product / total / total
        grad_scores += tl.where(expert == found[:, None], (grad * scale)[:, None], 0.0)
    if SIGMOID:
        grad_logits = grad_scores * scores * (1.0 - scores)
    else:
        grad_logits = scores * (grad_scores - tl.sum(grad_scores * scores, 1)[:, None])
    if WITH_LOGSUMEXP:
        grad_logits += tl.load(grad_logsumexp_ptr + row, mask=is_row, other=0.0)[:, None] * probability
    tl.store(grad_ptr + row[:, None] * E + expert, grad_logits, mask=inside)


def _plain(x: Tensor) -> Tensor:
    """fp32, with contiguous columns."""
    return contiguous_rows(x.float())


def _grid(num_rows: int) -> tuple[int]:
    return (triton.cdiv(num_rows, TILE.constants["ROWS"]),)


def _empty(logits_NE: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num, experts = logits_NE.shape
    wide = {"dtype": torch.float32, "device": logits_NE.device}
    return (
        torch.empty(num, top_k, **wide),
        torch.empty(num, top_k, dtype=torch.int64, device=logits_NE.device),
        torch.empty(num, experts, **wide),
        torch.empty(num, **wide),
    )


@operator("router_backward", fake=lambda *given: given[3].new_empty(given[3].shape))
def route_backward(
    grad_weights_NC: Tensor,
    grad_scores_NE: Tensor | None,
    grad_logsumexp_N: Tensor | None,
    logits_NE: Tensor,
    experts_NC: Tensor,
    is_sigmoid: bool,
    normalizes: bool,
    scale: float,
) -> Tensor:
    """Gradient of the logits [N, E]."""
    logits, (num, experts), top_k = _plain(logits_NE), logits_NE.shape, experts_NC.shape[1]
    grad_NE = torch.empty(num, experts, dtype=torch.float32, device=logits.device)
    of_scores, of_sums = (logits if g is None else g.float().contiguous() for g in (grad_scores_NE, grad_logsumexp_N))
    launch(
        router_backward_kernel, _grid(num),
        logits, experts_NC, grad_weights_NC.float().contiguous(), of_scores, of_sums, grad_NE, num, experts,
        logits.stride(0), float(scale), on=logits, SIGMOID=is_sigmoid, NORMALIZE=normalizes,
        WITH_SCORES=grad_scores_NE is not None, WITH_LOGSUMEXP=grad_logsumexp_N is not None, C=top_k,
        EP=triton.next_power_of_2(experts), **TILE.constants,
        num_warps=TILE.num_warps,
    )  # fmt: skip
    return grad_NE.to(logits_NE.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits_NE, _, ctx.is_sigmoid, _, _, _, ctx.normalizes, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits_NE, output[1])


def _gradients(
    ctx: Any, weights: Tensor | None, _: Tensor | None, scores: Tensor | None, logsumexp: Tensor | None
) -> tuple[Tensor | None, ...]:
    logits_NE, experts_NC = ctx.saved_tensors
    if weights is None:
        weights = logits_NE.new_zeros(experts_NC.shape, dtype=torch.float32)
    found = route_backward(weights, scores, logsumexp, logits_NE, experts_NC, ctx.is_sigmoid, ctx.normalizes, ctx.scale)
    return found, *(None,) * 7


@operator(
    "router",
    fake=lambda logits_NE, bias_E, is_sigmoid, top_k, *others: _empty(logits_NE, top_k),
    saves=_save,
    gradients=_gradients,
)
def route(
    logits_NE: Tensor,
    bias_E: Tensor | None,
    is_sigmoid: bool,
    top_k: int,
    num_groups: int,
    groups_per_token: int,
    normalizes: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights and experts [N, C], scores [N, E] and logarithms of sums of exponentials [N]."""
    found = _empty(logits_NE, top_k)
    logits, (num, experts) = _plain(logits_NE), logits_NE.shape
    launch(
        router_forward_kernel, _grid(num),
        logits, logits if bias_E is None else bias_E.float().contiguous(), *found, num, experts, logits.stride(0),
        float(scale), on=logits, SIGMOID=is_sigmoid, HAS_BIAS=bias_E is not None, NORMALIZE=normalizes, C=top_k,
        CP=triton.next_power_of_2(top_k), G=num_groups, GP=triton.next_power_of_2(max(num_groups, 1)),
        KEPT=groups_per_token, EP=triton.next_power_of_2(experts), **TILE.constants, num_warps=TILE.num_warps,
    )  # fmt: skip
    return found


def _traffic(sizes: Sizes, tile: Tile) -> Traffic:
    """Logits read and scores written, or both gradients and the logits; weights and experts of the choices."""
    n, e, c = sizes["tokens"], sizes["experts"], sizes["choices"]
    moved = sizes["passes"] * 4 * n * e + (4 + 8) * n * c + 4 * n
    return Traffic(moved_bytes=moved, least_bytes=moved)


_CHOICES = {"NORMALIZE": True, "C": 8, "CP": 8}
_DEEPSEEK = _CHOICES | {"SIGMOID": True, "HAS_BIAS": True, "G": 8, "GP": 8, "KEPT": 4, "EP": 256}
_QWEN = _CHOICES | {"SIGMOID": False, "HAS_BIAS": False, "G": 0, "GP": 1, "KEPT": 0, "EP": 128}
_INTEGERS = {"N": "i32", "E": "i32:16", "stride": "i32:16", "scale": "fp32"}


def _sources(name: str, *, tokens: int, experts: int, form: dict[str, Any]) -> tuple[KernelSource, KernelSource]:
    sizes = {"tokens": tokens, "experts": experts, "choices": form["C"]}
    backward = {k: v for k, v in form.items() if k not in ("HAS_BIAS", "CP", "G", "GP", "KEPT")}
    return (
        KernelSource(
            name=f"router_{name}_forward", op="router", function=router_forward_kernel,
            signature={"logits_ptr": "*fp32", "bias_ptr": "*fp32", "weights_ptr": "*fp32", "experts_ptr": "*i64",
                       "scores_ptr": "*fp32", "logsumexp_ptr": "*fp32", **_INTEGERS},
            constants=form, tiles=(TILE,), traffic=_traffic, sizes=sizes | {"passes": 2},
        ),
        KernelSource(
            name=f"router_{name}_backward", op="router", function=router_backward_kernel,
            signature={"logits_ptr": "*fp32", "experts_ptr": "*i64", "grad_weights_ptr": "*fp32",
                       "grad_scores_ptr": "*fp32", "grad_logsumexp_ptr": "*fp32", "grad_ptr": "*fp32", **_INTEGERS},
            constants=backward | {"WITH_SCORES": True, "WITH_LOGSUMEXP": False}, tiles=(TILE,), traffic=_traffic,
            sizes=sizes | {"passes": 3},
        ),
    )  # fmt: skip


SOURCES = (
    *_sources("deepseek_v3", tokens=8192, experts=256, form=_DEEPSEEK),
    *_sources("qwen3", tokens=8192, experts=128, form=_QWEN),
)
