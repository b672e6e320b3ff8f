"""Tokens to rows sorted by expert, and rows back to tokens: the routes of `permute` and `unpermute`.

    permute      rows[m] = x[order[m] // C]                        d x[n] = Σ_c d rows[place[n, c]]
    unpermute    out[n] = Σ_c w[n, c] rows[place[n, c]]            d rows[m] = w[order[m]] d out[order[m] // C]
                                                                   d w[n, c] = d out[n] · rows[place[n, c]]

`order` sorts the N C pairs of a token and a choice by expert, and `place` is its inverse. Sums run over the choices
in their order: the same bits each time. The reference writes the rows in the order of tokens, multiplies and adds them,
three passes over M rows; the kernels read each row once.

N tokens, C choices of a token, M = N C rows, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.kernels.dispatch import choose
from meshwright.kernels.routes import Route
from meshwright.kernels.triton_route import serves_triton


def permute(x_ND: Tensor, order_M: Tensor, *, top_k: int) -> Tensor:
    """Rows of the pairs in `order_M`, [M, D]."""
    return ROUTES["permute"][choose("permute", x_ND, order_M)].function(x_ND, order_M, top_k=top_k)


def unpermute(rows_MD: Tensor, order_M: Tensor, weights_NC: Tensor) -> Tensor:
    """Weighted sums of the rows of each token, [N, D]."""
    route = choose("unpermute", rows_MD, order_M, weights_NC)
    return ROUTES["unpermute"][route].function(rows_MD, order_M, weights_NC)


def inverse(order_M: Tensor) -> Tensor:
    """The inverse permutation."""
    place_M = torch.empty_like(order_M)
    place_M[order_M] = torch.arange(len(order_M), device=order_M.device, dtype=order_M.dtype)
    return place_M


def _permute_reference(x_ND: Tensor, order_M: Tensor, *, top_k: int) -> Tensor:
    return _Permute.apply(x_ND, order_M, top_k)


def _unpermute_reference(rows_MD: Tensor, order_M: Tensor, weights_NC: Tensor) -> Tensor:
    chosen_NCD = _Unsort.apply(rows_MD, order_M).unflatten(0, weights_NC.shape)
    return (chosen_NCD * weights_NC.to(rows_MD.dtype).unsqueeze(-1)).sum(dim=1)


class _Permute(Function):
    """Copies every token to its rows. The gradient sums them in a fixed order: no atomics, same bits each time."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order_M)
        ctx.top_k = top_k
        return x_ND[order_M // top_k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order_M,) = ctx.saved_tensors
        return unsort(grads[0], order_M).unflatten(0, (-1, ctx.top_k)).sum(dim=1), None, None


class _Unsort(Function):
    """Puts rows sorted by expert back in the order of tokens."""

    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, order_M: Tensor) -> Tensor:
        ctx.save_for_backward(order_M)
        return unsort(rows_MD, order_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (order_M,) = ctx.saved_tensors
        return grads[0][order_M], None


def unsort(rows_MD: Tensor, order_M: Tensor) -> Tensor:
    """Invert the permutation `order_M` of rows."""
    out_MD = torch.empty_like(rows_MD)
    out_MD[order_M] = rows_MD
    return out_MD


def _permute_triton(x_ND: Tensor, order_M: Tensor, *, top_k: int) -> Tensor:
    from meshwright.kernels.experts.permutation_triton import permute_rows

    return permute_rows(x_ND, order_M, top_k)


def _unpermute_triton(rows_MD: Tensor, order_M: Tensor, weights_NC: Tensor) -> Tensor:
    from meshwright.kernels.experts.permutation_triton import unpermute_rows

    return unpermute_rows(rows_MD, order_M, weights_NC)


ROUTES = {
    "permute": {
        "reference": Route(name="reference", kind="reference", function=_permute_reference),
        "triton": Route(name="triton", kind="triton", function=_permute_triton, serves=serves_triton),
    },
    "unpermute": {
        "reference": Route(name="reference", kind="reference", function=_unpermute_reference),
        "triton": Route(name="triton", kind="triton", function=_unpermute_triton, serves=serves_triton),
    },
}
