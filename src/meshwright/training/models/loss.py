"""Next-token cross-entropy from hidden states, without ever holding the logits of all tokens.

    logits = h W^T       loss = Σ_n w_n [ lse_n - logits_{n, y_n} ]       lse = log Σ_v exp(logits)

Capped logits are c tanh(h W^T / c), whose derivative is 1 - (logits / c)².

The gradient is a by-product of the loss: d logits = w [(1 + 2 z lse) softmax - onehot]. So both are made chunk by
chunk in the forward pass, which keeps d h [N, D] and d W [V, D] instead of logits [N, V], and computes nothing
twice. The z-loss w z lse² (PaLM, Chowdhery et al. 2022, section 5) is in the gradient and not in the value: what is
shown and compared is always the cross-entropy.

N tokens, C tokens of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.training.labels import IGNORED_LABEL
from meshwright.training.models.linear import matmul_nt

CHUNK_LOGITS = 2**26
"""Logits in memory at once, as numbers: 128 MiB in bf16, on a GPU with 256 MiB of fp32 beside them."""

CACHED_LOGITS = 2**18
"""Logits that one core works on at once: 1 MiB in fp32, about a second-level cache."""


def linear_cross_entropy(
    h_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    weights_N: Tensor | None = None,
    z_loss: float = 0.0,
    cap: float = 0.0,
    chunk_logits: int = CHUNK_LOGITS,
) -> Tensor:
    """Sum of the losses of tokens whose label is not `IGNORED_LABEL`, each times its weight (1 unless given), fp32.

    A sum, because the number of tokens of a step is known only over all micro-batches and ranks. Divide it, or
    give weights that do. `z_loss` is the coefficient of the term that only the gradient has, `cap` the limit c of the
    logits (0: none).
    """
    num_rows = max(1, min(len(h_ND), chunk_logits // weight_VD.shape[0]))
    return _LinearCrossEntropy.apply(h_ND, weight_VD, labels_N, weights_N, z_loss, cap, num_rows)


def capped(logits: Tensor, cap: float) -> Tensor:
    """c tanh(logits / c), or `logits` where `cap` is 0."""
    return (logits / cap).tanh() * cap if cap else logits


def cap_slope(capped_logits: Tensor, cap: float) -> Tensor:
    """The derivative of `capped`, from its result."""
    return 1 - (capped_logits / cap).square()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        weights_N: Tensor | None,
        z_loss: float,
        cap: float,
        num_rows: int,
    ) -> Tensor:
        wants_h, wants_weight = ctx.needs_input_grad[:2]
        weights_N = (labels_N != IGNORED_LABEL).float() * (1.0 if weights_N is None else weights_N)
        with_grad = wants_h or wants_weight
        grad_h_ND = torch.empty_like(h_ND) if wants_h else None
        grad_weight_VD = None
        total = torch.zeros((), dtype=torch.float32, device=h_ND.device)
        for start in range(0, len(h_ND), num_rows):
            rows = slice(start, start + num_rows)
            grad_CV = matmul_nt(h_ND[rows], weight_VD)  # logits, until `_losses` overwrites them
            total += _losses(
                grad_CV, labels_N[rows], weights_N[rows], z_loss=z_loss, cap=cap, with_grad=with_grad
            )
            if grad_h_ND is not None:
                grad_h_ND[rows] = matmul_nt(grad_CV, weight_VD.T)
            if not wants_weight:
                continue
            part_VD = matmul_nt(grad_CV.T, h_ND[rows].T)
            if grad_weight_VD is not None:
                grad_weight_VD += part_VD
            else:  # fp32: many chunks of bf16 would round their sum away
                grad_weight_VD = part_VD if num_rows >= len(h_ND) else part_VD.float()
        grad_weight_VD = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        ctx.save_for_backward(grad_h_ND, grad_weight_VD)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_h_ND, grad_weight_VD = ctx.saved_tensors
        scale = grads[0]
        return (
            None if grad_h_ND is None else grad_h_ND * scale.to(grad_h_ND.dtype),
            None if grad_weight_VD is None else grad_weight_VD * scale.to(grad_weight_VD.dtype),
            *[None] * 5,
        )


def _losses(
    logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor, *, z_loss: float, cap: float, with_grad: bool
) -> Tensor:
    """Loss sum of a chunk, fp32; its gradient with respect to the logits overwrites them.

    A CPU takes a few rows at a time, so that a logit is read from memory once and not in each of seven passes.
    """
    size = len(logits_CV)
    if logits_CV.device.type == "cpu":
        size = max(1, CACHED_LOGITS * torch.get_num_threads() // logits_CV.shape[1])
    parts = zip(logits_CV.split(size), labels_C.split(size), weights_C.split(size), strict=True)
    return torch.stack([_rows(*part, z_loss=z_loss, cap=cap, with_grad=with_grad) for part in parts]).sum()


def _rows(
    given_CV: Tensor, labels_C: Tensor, weights_C: Tensor, *, z_loss: float, cap: float, with_grad: bool
) -> Tensor:
    """As `_losses`, all rows at once."""
    logits_CV = capped(given_CV.float(), cap)
    slope_CV = cap_slope(logits_CV, cap) if cap and with_grad else None
    weights_C1 = weights_C.unsqueeze(1)
    label_C1 = labels_C.clamp(min=0).unsqueeze(1)  # an ignored label is negative, and its weight is 0
    of_label_C1 = logits_CV.gather(1, label_C1)
    largest_C1 = logits_CV.amax(dim=1, keepdim=True)
    exp_CV = logits_CV.sub_(largest_C1).exp_()
    sum_C1 = exp_CV.sum(dim=1, keepdim=True)
    lse_C1 = largest_C1 + sum_C1.log()
    if with_grad:
        grad_CV = exp_CV.mul_(weights_C1 * (1 + 2 * z_loss * lse_C1) / sum_C1)
        grad_CV.scatter_add_(1, label_C1, -weights_C1)
        given_CV.copy_(grad_CV if slope_CV is None else grad_CV.mul_(slope_CV))
    return ((lse_C1 - of_label_C1) * weights_C1).sum()
