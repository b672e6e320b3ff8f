"""Auxiliary losses of routers: one balances the load of experts, one keeps logits small.

    L = E Σ_e f_e P_e      f_e share of the sequence's rows, P_e its mean score; 1 when balanced
    Z = mean over tokens of z²      z = log Σ_e exp(l_e), l the logits: the z-loss (Zoph et al. 2022, equation 5)

The form of L is Switch's (Fedus et al. 2021, equation 4). The statistics are DeepSeek-V3's (2024, equations
17 to 20): they count one sequence (a row of the batch, without its padding), not a micro-batch. So L does not
depend on which sequences a process happens to hold, and any plan gives the gradients of one process. If a
sequence is sharded over ranks, the counts of all its parts are summed first. Z is a sum over tokens, and each
rank has its own tokens.

Gradients of both are added at the router, not at the end of the model: so they are not passed through pipeline stages,
and reported losses do not include them.

B sequences, T tokens of a sequence (of this rank), E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def balance_loss(scores_BTE: Tensor, counts_BE: Tensor, is_token_BT: Tensor | None = None) -> Tensor:
    """T E Σ f P of one layer, added over sequences: a sum over tokens, as the loss of the tokens is.

    `counts_BE` are the rows of whole sequences without padding, `is_token_BT` is False at padding. Sigmoid scores are
    normalised first (equation 19).
    """
    share_BE = counts_BE / counts_BE.sum(dim=-1, keepdim=True).clamp(min=1)
    score_BTE = scores_BTE / scores_BTE.sum(dim=-1, keepdim=True)
    if is_token_BT is not None:
        score_BTE = score_BTE * is_token_BT.unsqueeze(-1)
    score_BE = score_BTE.sum(dim=1)
    return scores_BTE.shape[-1] * (share_BE * score_BE).sum()


def router_z_loss(logsumexp_BT: Tensor, is_token_BT: Tensor | None = None) -> Tensor:
    """Σ z² of one layer: a sum over tokens. `is_token_BT` is False at padding."""
    squares_BT = logsumexp_BT.square()
    return (squares_BT if is_token_BT is None else squares_BT * is_token_BT).sum()


class AttachedLoss(torch.autograd.Function):
    """Passes its first argument through; its backward gives the second, a loss, the gradient 1."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=ctx.dtype, device=grads[0].device)
