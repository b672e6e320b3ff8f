"""Multi-token prediction: modules after the last layer that each predict one token further ahead.

DeepSeek-V3 (2024), section 2.2, equations 21 to 25. Module k = 1 ... K at position i of a sequence:

    h'_i = M_k [RMSNorm(Emb(t_(i+k))); RMSNorm(h_i^(k-1))]     M_k is D x 2D; h^0 is the output of the last layer
    h_i^k = Block_k(h'_i)
    p_i^k = softmax(Head(RMSNorm(h_i^k)))                      of the token t_(i+k+1)
    L = L_main + weight / K x sum_k L_k                        L_k is divided by the labels of L_main

Embedding and head are the model's. The matrices of published weights (`eh_proj`) take the embedding first.
A position counts where the tokens up to i+k are of its document and the label of i+k counts.

Training follows the gradient of L, but reports L_main only, which other runs have too. The mean of each L_k
over its own labels is for the log (`collect_prediction_losses`). Without gradients the modules do not run:
the model predicts as one without them.

B sequences, T tokens, D hidden, K modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.kernels.linear import Linear
from meshwright.specs.model import Model
from meshwright.training.models.norm import make_norm
from meshwright.training.models.token_layout import TokenLayout


class PredictionModule(nn.Module):
    """One module. `block` is a layer of the model's last kind.

    `loss_2` counts its summed loss and the labels since `collect_prediction_losses`.
    """

    loss_2: Tensor

    def __init__(self, model: Model, *, block: nn.Module) -> None:
        super().__init__()
        self.embedding_norm = make_norm(model, width=model.hidden)
        self.hidden_norm = make_norm(model, width=model.hidden)
        self.projection = Linear(2 * model.hidden, model.hidden, bias=False)
        self.block = block
        self.norm = make_norm(model, width=model.hidden)
        self.register_buffer("loss_2", torch.zeros(2), persistent=False)

    def forward(self, embedded_BTD: Tensor, h_BTD: Tensor, layout: TokenLayout) -> Tensor:
        """Output of the block, [B, T, D], from the embeddings of later tokens and the hidden states before."""
        both_BTE = torch.cat([self.embedding_norm(embedded_BTD), self.hidden_norm(h_BTD)], dim=-1)
        return self.block(self.projection(both_BTE), layout)


def prediction_loss(
    modules: nn.ModuleDict,
    h_BTD: Tensor,
    *,
    tokens_BT: Tensor,
    layout: TokenLayout,
    documents_BT: Tensor | None,
    labels_BT: Tensor,
    weights_BT: Tensor | None,
    embed: Callable[[Tensor], Tensor],
    head: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """The mean over modules of the summed losses of all tokens, fp32 scalar. `h_BTD` is the last layer's output."""
    losses = []
    for k, module in enumerate(modules.values(), start=1):
        assert isinstance(module, PredictionModule)
        h_BTD = module(embed(shifted(tokens_BT, k, fill=0)), h_BTD, layout)
        ahead_BT = shifted(labels_BT, k, fill=IGNORED_LABEL)
        if documents_BT is not None:
            same_BT = shifted(documents_BT, k, fill=-1) == documents_BT
            ahead_BT = ahead_BT.where(same_BT, IGNORED_LABEL)
        weights_ahead_BT = None if weights_BT is None else shifted(weights_BT, k, fill=0)
        loss = head(module.norm(h_BTD), ahead_BT, weights_ahead_BT)
        module.loss_2 += torch.stack([loss.detach().float(), (ahead_BT != IGNORED_LABEL).sum()])
        losses.append(loss)
    return torch.stack(losses).mean()


def collect_prediction_losses(modules: Iterable[nn.Module], *, num_modules: int) -> Tensor:
    """Summed loss and labels of each prediction module since the last call [K, 2], 0 where it is not; resets them."""
    sums_K2 = torch.zeros(num_modules, 2)
    for module in modules:
        for k, found in enumerate(m for m in module.modules() if isinstance(m, PredictionModule)):
            sums_K2[k] = found.loss_2
            found.loss_2.zero_()
    return sums_K2


def shifted(x_BT: Tensor, by: int, *, fill: int) -> Tensor:
    """Values of the position `by` further on; `fill` at the end.

    >>> shifted(torch.tensor([[1, 2, 3]]), 1, fill=0).tolist()
    [[2, 3, 0]]
    """
    by = min(by, x_BT.shape[1])
    return torch.cat([x_BT[:, by:], x_BT.new_full((len(x_BT), by), fill)], dim=1)


def with_gradient_of(shown: Tensor, other: Tensor) -> Tensor:
    """Return `shown` unchanged, with the backward pass of `shown + other`."""
    return _WithGradientOf.apply(shown, other)


class _WithGradientOf(torch.autograd.Function):
    """Passes its first argument through; both have its gradient."""

    @staticmethod
    def forward(ctx: Any, shown: Tensor, other: Tensor) -> Tensor:
        return shown.clone()  # a view would confuse FSDP, whose hooks are on the output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]
