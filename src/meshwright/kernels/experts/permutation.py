"""Tokens to rows sorted by expert, and rows back to tokens: the routes of `permute` and `unpermute`.

    permute      rows[p] = x[order[p] // C]                        d x[n] = Σ_c d rows[place[n, c]]
    unpermute    out[n] = Σ_c w[n, c] rows[place[n, c]]            d rows[p] = w[order[p]] d out[order[p] // C]
                                                                   d w[n, c] = d out[n] · rows[place[n, c]]

`order` sorts the N C pairs of a token and a choice by expert, and `place` is its inverse. An order of -1 is a
row of zeros, which belongs to no pair (`fp8.aligned_rows`). Sums run over the choices in their order: the
same bits each time. The reference writes the rows in the order of tokens, multiplies and adds them, three
passes over M rows; the kernels read each row once.

N tokens, C choices of a token, M = N C pairs, P rows: M and the rows of zeros, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from meshwright.kernels.dispatch import choose
from meshwright.kernels.routes import Route
from meshwright.kernels.shapes import require_shapes
from meshwright.kernels.triton_route import serves_triton


def permute(x_ND: Tensor, order_P: Tensor, *, top_k: int) -> Tensor:
    """Rows of the pairs in `order_P`, [P, D]."""
    require_shapes("permute", x_ND=x_ND, order_P=order_P)
    return ROUTES["permute"][choose("permute", x_ND, order_P)].function(x_ND, order_P, top_k=top_k)


def unpermute(rows_PD: Tensor, order_P: Tensor, weights_NC: Tensor) -> Tensor:
    """Weighted sums of the rows of each token, [N, D]."""
    require_shapes("unpermute", rows_PD=rows_PD, order_P=order_P, weights_NC=weights_NC)
    route = choose("unpermute", rows_PD, order_P, weights_NC)
    return ROUTES["unpermute"][route].function(rows_PD, order_P, weights_NC)


def unsort(rows_PD: Tensor, order_P: Tensor, *, num_pairs: int) -> Tensor:
    """Rows in the order of their pairs, [M, D]."""
    return rows_PD[inverse(order_P, num_pairs=num_pairs)]


def inverse(order_P: Tensor, *, num_pairs: int) -> Tensor:
    """The row of each pair, [M].

    >>> inverse(torch.tensor([2, 0, -1, 1]), num_pairs=3).tolist()
    [1, 3, 0]
    """
    place = order_P.new_empty(num_pairs + 1)  # rows of zeros write behind the last pair
    place[order_P] = torch.arange(len(order_P), device=order_P.device, dtype=order_P.dtype)
    return place[:-1]


def _permute_reference(x_ND: Tensor, order_P: Tensor, *, top_k: int) -> Tensor:
    return _Permute.apply(x_ND, order_P, top_k)


def _unpermute_reference(rows_PD: Tensor, order_P: Tensor, weights_NC: Tensor) -> Tensor:
    chosen_NCD = _Unsort.apply(rows_PD, order_P, weights_NC.numel()).unflatten(0, weights_NC.shape)
    return (chosen_NCD * weights_NC.to(rows_PD.dtype).unsqueeze(-1)).sum(dim=1)


class _Permute(Function):
    """Copies every token to its rows. The gradient sums them in a fixed order: no atomics, same bits each time."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_P: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order_P)
        ctx.shape = (len(x_ND), top_k)
        return _sorted(x_ND, order_P, top_k=top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order_P,), (num_tokens, top_k) = ctx.saved_tensors, ctx.shape
        grad_MD = unsort(grads[0], order_P, num_pairs=num_tokens * top_k)
        return grad_MD.unflatten(0, ctx.shape).sum(dim=1), None, None


class _Unsort(Function):
    """Puts rows sorted by expert back in the order of tokens."""

    @staticmethod
    def forward(ctx: Any, rows_PD: Tensor, order_P: Tensor, num_pairs: int) -> Tensor:
        ctx.save_for_backward(order_P)
        return unsort(rows_PD, order_P, num_pairs=num_pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sorted(grads[0], *ctx.saved_tensors, top_k=1), None, None


def _sorted(x_ND: Tensor, order_P: Tensor, *, top_k: int) -> Tensor:
    """The token of each pair in `order_P`; zeros where there is none."""
    if len(order_P) > len(x_ND) * top_k:
        x_ND = functional.pad(x_ND, (0, 0, 0, 1))  # the last row is that of -1
    return x_ND[order_P // top_k]


def _permute_triton(x_ND: Tensor, order_P: Tensor, *, top_k: int) -> Tensor:
    from meshwright.kernels.experts.permutation_triton import permute_rows

    return permute_rows(x_ND, order_P, top_k)


def _unpermute_triton(rows_PD: Tensor, order_P: Tensor, weights_NC: Tensor) -> Tensor:
    from meshwright.kernels.experts.permutation_triton import unpermute_rows

    return unpermute_rows(rows_PD, order_P, weights_NC)


ROUTES = {
    "permute": {"reference": Route(_permute_reference), "triton": Route(_permute_triton, serves=serves_triton)},
    "unpermute": {"reference": Route(_unpermute_reference), "triton": Route(_unpermute_triton, serves=serves_triton)},
}
