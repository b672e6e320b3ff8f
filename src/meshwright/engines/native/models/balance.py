"""The auxiliary loss that keeps experts equally busy.

    L = E Σ_e f_e P_e       f_e share of rows, P_e mean score; 1 when balanced (Switch, equation 4)

The auxiliary loss joins the gradient where the scores are made, not at the end of the model: so it needs no
plumbing through pipeline stages. `Transformer.forward(labels=...)` returns a sum over tokens, and the attached
loss is a sum over tokens too: a trainer that divides that loss by a number of tokens tells the layers with
`load.set_loss_scale(model, 1 / num_tokens)`.

E experts, N tokens, C choices of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def balance_loss(scores_NE: Tensor, counts_E: Tensor) -> Tensor:
    """E Σ f P of one layer, a scalar. Sigmoid scores are normalised first, as DeepSeek-V3 (equation 18) does."""
    share_E = counts_E / counts_E.sum()
    mean_E = (scores_NE / scores_NE.sum(dim=-1, keepdim=True)).mean(dim=0)
    return scores_NE.shape[1] * (share_E * mean_E).sum()


def attach_balance_loss(weights_NC: Tensor, scores_NE: Tensor, counts_E: Tensor, *, scale: float) -> Tensor:
    """`weights_NC` unchanged; its backward also adds the gradient of N * scale * balance_loss to the scores."""
    loss = balance_loss(scores_NE, counts_E) * (scale * scores_NE.shape[0])
    return _AttachLoss.apply(weights_NC, loss)


class _AttachLoss(torch.autograd.Function):
    """Passes its first argument through; its backward gives the second, a loss, the gradient 1."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=ctx.dtype, device=grads[0].device)
