"""Router of a mixture of experts, from its logits: scores, groups, top-k, weights; the routes of `router`.

    s = softmax(l) or sigmoid(l)             scores
    v = s + bias                             ranks the experts; the bias corrects the load, and has no gradient
    groups                                   a group is worth its best v, for sigmoid scores the sum of its best two;
                                             only the best groups of a token have experts to choose
    experts = top-k of v                     largest first; the lower number first among equal values; NaN is +infinity
    w = scale s[experts] / Σ s[experts]      or not normalised
    z = log Σ exp(l)                         for a z-loss

    family                   scores     normalised   groups, bias, scale
    Mixtral, GPT-OSS         softmax    yes          (GPT-OSS takes the softmax of the chosen logits: the same weights)
    Qwen3                    softmax    yes, or no
    DeepSeek-V2              softmax    no           groups, scale
    DeepSeek-V3              sigmoid    yes          groups, bias, scale

`torch.topk` does not say which of equal values it takes, and on a CPU it takes neither the first nor the last. So the
reference orders equal ones by their number, and all routes choose alike. Weights, scores and z have gradients; the
balance loss is made of the scores (`training.models.experts`).

N tokens, E experts, C choices (top_k), G groups of X experts. Sources: Mixtral (Jiang et al. 2024, section 2.1),
DeepSeek-V3 (2024, section 2.1.2), Zoph et al. 2022 (z-loss).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.dispatch import choose
from meshwright.kernels.routes import Route
from meshwright.kernels.shapes import require_shapes
from meshwright.kernels.triton_route import serves_triton

SMALLEST_SUM = 1e-20
"""Added to the sum of a token's scores before they are divided by it."""


@dataclass(frozen=True, kw_only=True)
class RouterForm:
    """One of the forms above. `num_groups` 0: no groups."""

    top_k: int
    is_sigmoid: bool = False
    num_groups: int = 0
    groups_per_token: int = 0
    normalizes: bool = True
    scale: float = 1.0


class RoutedTokens(NamedTuple):
    """Experts of every token with their weights, and the inputs of the router's losses."""

    weights_NC: Tensor
    experts_NC: Tensor
    scores_NE: Tensor
    logsumexp_N: Tensor


def route_tokens(logits_NE: Tensor, bias_E: Tensor | None, *, form: RouterForm) -> RoutedTokens:
    """Choose the experts of every token."""
    require_shapes("router", logits_NE=logits_NE, bias_E=bias_E)
    route = choose("router", logits_NE)
    return ROUTES["router"][route].function(logits_NE, bias_E, form=form)


def reference(logits_NE: Tensor, bias_E: Tensor | None, *, form: RouterForm) -> RoutedTokens:
    """The specification."""
    scores_NE = logits_NE.sigmoid() if form.is_sigmoid else logits_NE.softmax(dim=-1)
    with torch.no_grad():
        shifted_NE = scores_NE if bias_E is None else scores_NE + bias_E
        experts_NC = _first_of_largest(_limited_to_groups(shifted_NE, form), form.top_k)
    weights_NC = scores_NE.gather(1, experts_NC)
    if form.normalizes:
        weights_NC = weights_NC / (weights_NC.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return RoutedTokens(weights_NC * form.scale, experts_NC, scores_NE, logits_NE.logsumexp(dim=-1))


def _first_of_largest(values_NE: Tensor, count: int) -> Tensor:
    """Return indices of the largest values, the largest first, equal values by index."""
    values_NE = values_NE.where(values_NE == values_NE, torch.inf)  # NaN, whose sign the processor chooses
    if values_NE.dtype != torch.float32:
        return values_NE.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    # Whole numbers in the order of the values, and of equal ones by index: topk of them is a third of a stable sort.
    bits = (values_NE + 0.0).view(torch.int32)  # no -0
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 16
    index = torch.arange(values_NE.shape[1], device=values_NE.device)
    return (ordered - index).topk(count, dim=-1).indices


def _limited_to_groups(values_NE: Tensor, form: RouterForm) -> Tensor:
    """All but the best groups of each token masked."""
    if not form.num_groups:
        return values_NE
    grouped_NGX = values_NE.unflatten(-1, (form.num_groups, -1))
    worth_NG = grouped_NGX.topk(2 if form.is_sigmoid else 1, dim=-1).values.sum(dim=-1)
    best = _first_of_largest(worth_NG, form.groups_per_token)
    kept_NG = torch.zeros_like(worth_NG, dtype=torch.bool).scatter_(1, best, True)
    return grouped_NGX.masked_fill(~kept_NG.unsqueeze(-1), float("-inf")).flatten(-2)


def _triton(logits_NE: Tensor, bias_E: Tensor | None, *, form: RouterForm) -> RoutedTokens:
    from meshwright.kernels.experts.router_triton import route

    f = form
    found = route(logits_NE, bias_E, f.is_sigmoid, f.top_k, f.num_groups, f.groups_per_token, f.normalizes, f.scale)
    return RoutedTokens(*found)


ROUTES = {"router": {"reference": Route(reference), "triton": Route(_triton, serves=serves_triton)}}
