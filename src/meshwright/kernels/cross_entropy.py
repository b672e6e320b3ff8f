"""Cross-entropy of rows of logits, in place: the gradient overwrites them.

    lse_n = log Σ_v exp(x_nv)        loss_n = w_n (lse_n - x_{n, y_n})
    d x_nv = w_n [(1 + 2 z lse_n) softmax_nv - onehot_nv]

x are the logits, or c tanh(logits / c) where a cap c limits them; its derivative is 1 - (x / c)². The z-loss
w z lse² (PaLM, Chowdhery et al. 2022, section 5) is in the gradient and not in the value: runs show and
compare the cross-entropy only. A row whose label is `IGNORED_LABEL` has weight zero.

The gradient is a by-product of the loss, so one function makes both. The backward pass multiplies each row by its
incoming gradient, and leaves a row whose incoming gradient is one untouched.

`RowFunctions` are for one process, and in two steps for a vocabulary that is sharded over ranks, between which
statistics are reduced.

N rows, V vocabulary (of this rank).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.kernels.labels import IGNORED_LABEL

Reduction = Literal["sum", "mean", "none"]
"""Sum of the rows' losses, their mean over labels that count, or the losses [N]."""

CACHED_LOGITS = 2**18
"""Logits that one core works on at once: 1 MiB in fp32, about a second-level cache."""


@dataclass(frozen=True, kw_only=True)
class RowFunctions:
    """Functions of the rows of logits [N, V]; all but `statistics` overwrite them.

    fused       losses [N] times weights; the gradient too where it is wanted
    statistics  [3, N]: largest (capped) logit, sum of exponentials over it, the label's logit, 0 if it is not here
    gradient    from the lse [N] of the whole vocabulary
    scale       each row times its scale [N], of any stride; a row whose scale is one is not touched
    """

    fused: Callable[..., Tensor]
    statistics: Callable[..., Tensor]
    gradient: Callable[..., None]
    scale: Callable[[Tensor, Tensor], None]


def row_weights(
    labels_N: Tensor, weights_N: Tensor | None, *, reduction: Reduction, vocab: int
) -> tuple[Tensor, Tensor]:
    """Return labels as int64 and weights in fp32, without waiting for the device.

    An ignored label has weight zero. A mean divides the weights by the number of labels that count, or by 1.
    A label outside the vocabulary becomes 0, and its weight and loss NaN.
    """
    if labels_N.is_floating_point():
        raise InputError("labels are whole numbers", got=labels_N.dtype)
    labels_N, is_ignored_N = labels_N.long(), labels_N == IGNORED_LABEL
    is_outside_N = ((labels_N < 0) | (labels_N >= vocab)) & ~is_ignored_N
    counted_N = (~is_ignored_N).float().masked_fill(is_outside_N, torch.nan)
    if reduction == "mean":
        counted_N = counted_N / counted_N.sum().clamp(min=1)
    if weights_N is not None:
        counted_N = (counted_N * weights_N).masked_fill(is_ignored_N, 0.0)
    return labels_N.masked_fill(is_outside_N, 0), counted_N


def capped(logits: Tensor, cap: float) -> Tensor:
    """c tanh(logits / c), or `logits` where `cap` is 0."""
    return (logits / cap).tanh() * cap if cap else logits


def cap_slope(capped_logits: Tensor, cap: float) -> Tensor:
    """The derivative of `capped`, from its result."""
    return 1 - (capped_logits / cap).square()


def reference(logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, *, z_loss: float, cap: float) -> Tensor:
    """The specification: losses [N]; not in place."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    logits_NV = capped(logits_NV.to(wide), cap)
    lse_N = logits_NV.logsumexp(dim=1)
    of_label_N = logits_NV.gather(1, labels_N.clamp(min=0).unsqueeze(1)).squeeze(1)
    squares_N = z_loss * lse_N.square()
    return (lse_N - of_label_N + squares_N - squares_N.detach()) * weights_N


# --- a few rows at a time, so that a logit is read from memory once and not in each of seven passes ---


def _fused(
    logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, *, z_loss: float, cap: float, with_grad: bool
) -> Tensor:
    """See `RowFunctions`."""
    parts = zip(*(t.split(_rows_at_once(logits_NV)) for t in (logits_NV, labels_N, weights_N)), strict=True)
    return torch.cat([_fused_rows(*part, z_loss=z_loss, cap=cap, with_grad=with_grad) for part in parts])


def _fused_rows(
    given_CV: Tensor, labels_C: Tensor, weights_C: Tensor, *, z_loss: float, cap: float, with_grad: bool
) -> Tensor:
    logits_CV = capped(given_CV.float(), cap)
    slope_CV = cap_slope(logits_CV, cap) if cap and with_grad else None
    weights_C1 = weights_C.unsqueeze(1)
    label_C1 = labels_C.clamp(min=0).unsqueeze(1)  # an ignored label is negative, and its weight is 0
    of_label_C1 = logits_CV.gather(1, label_C1)
    largest_C1 = logits_CV.amax(dim=1, keepdim=True)
    if not with_grad and logits_CV.data_ptr() == given_CV.data_ptr():
        exp_CV = (logits_CV - largest_C1).exp_()
    else:
        exp_CV = logits_CV.sub_(largest_C1).exp_()
    sum_C1 = exp_CV.sum(dim=1, keepdim=True)
    lse_C1 = largest_C1 + sum_C1.log()
    if with_grad:
        grad_CV = exp_CV.mul_(weights_C1 * (1 + 2 * z_loss * lse_C1) / sum_C1)
        grad_CV.scatter_add_(1, label_C1, -weights_C1)
        given_CV.copy_(grad_CV if slope_CV is None else grad_CV.mul_(slope_CV))
    return ((lse_C1 - of_label_C1) * weights_C1).squeeze(1)


def _statistics(logits_NV: Tensor, labels_N: Tensor, *, cap: float, first: int) -> Tensor:
    """See `RowFunctions`. Labels count from `first` here."""
    size = _rows_at_once(logits_NV)
    found = []
    for given_CV, labels_C in zip(logits_NV.split(size), labels_N.split(size), strict=True):
        logits_CV = capped(given_CV.float(), cap)
        local_C1, is_here_C1 = _local(labels_C, num=logits_CV.shape[1], first=first)
        of_label_C1 = logits_CV.gather(1, local_C1).masked_fill(~is_here_C1, 0.0)
        largest_C1 = logits_CV.amax(dim=1, keepdim=True)
        sum_C1 = (logits_CV - largest_C1).exp_().sum(dim=1, keepdim=True)
        found.append(torch.cat([largest_C1, sum_C1, of_label_C1], dim=1).T)
    return torch.cat(found, dim=1)


def _gradient(
    logits_NV: Tensor, labels_N: Tensor, lse_N: Tensor, weights_N: Tensor, *, z_loss: float, cap: float, first: int
) -> None:
    """See `RowFunctions`."""
    size = _rows_at_once(logits_NV)
    parts = zip(*(t.split(size) for t in (logits_NV, labels_N, lse_N, weights_N)), strict=True)
    for given_CV, labels_C, lse_C, weights_C in parts:
        logits_CV = capped(given_CV.float(), cap)
        slope_CV = cap_slope(logits_CV, cap) if cap else None
        local_C1, is_here_C1 = _local(labels_C, num=logits_CV.shape[1], first=first)
        lse_C1, weights_C1 = lse_C.unsqueeze(1), weights_C.unsqueeze(1)
        grad_CV = logits_CV.sub_(lse_C1).exp_().mul_(weights_C1 * (1 + 2 * z_loss * lse_C1))
        grad_CV.scatter_add_(1, local_C1, torch.where(is_here_C1, -weights_C1, 0.0))
        given_CV.copy_(grad_CV if slope_CV is None else grad_CV.mul_(slope_CV))


def _rows_at_once(logits_NV: Tensor) -> int:
    if logits_NV.device.type != "cpu":
        return max(1, len(logits_NV))
    return max(1, CACHED_LOGITS * torch.get_num_threads() // max(1, logits_NV.shape[1]))


def _local(labels_C: Tensor, *, num: int, first: int) -> tuple[Tensor, Tensor]:
    """Index of each label here [C, 1], and whether it is here; an ignored label is nowhere."""
    local_C1 = labels_C.unsqueeze(1) - first
    is_here_C1 = (local_C1 >= 0) & (local_C1 < num) & (labels_C.unsqueeze(1) >= 0)
    return local_C1.clamp(0, num - 1), is_here_C1


def _scale(x_NV: Tensor, scale_N: Tensor) -> None:
    """See `RowFunctions`."""
    if not bool((scale_N == 1).all()):
        x_NV.mul_(scale_N.unsqueeze(1).to(x_NV.dtype))


TORCH_ROWS = RowFunctions(fused=_fused, statistics=_statistics, gradient=_gradient, scale=_scale)


def triton_rows() -> RowFunctions:
    """Return `RowFunctions` in Triton."""
    from meshwright.kernels import cross_entropy_triton as made

    return RowFunctions(fused=made.fused, statistics=made.statistics, gradient=made.gradient, scale=made.scale_rows)


def is_graph_kept() -> bool:
    """Return True in a backward pass after which another one may follow. Pipelines split one in two, for instance."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
