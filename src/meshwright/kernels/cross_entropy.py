"""Cross-entropy of logits that exist, in place: the gradient overwrites them.

    lse_n = log Σ_v exp(x_nv)        loss_n = w_n (lse_n - x_{n, y_n})
    d x_nv = w_n [(1 + 2 z lse_n) softmax_nv - onehot_nv]

x are the logits, or c tanh(logits / c) where a cap c limits them; its derivative is 1 - (x / c)². The z-loss
w z lse² (PaLM, Chowdhery et al. 2022, section 5) is in the gradient and not in the value: runs show and
compare the cross-entropy only. A row whose label is `IGNORED_LABEL` has weight zero.

The gradient is a by-product of the loss, so the forward pass makes both. The backward pass multiplies each
row by its incoming gradient, and leaves a row whose incoming gradient is one untouched.

`RowFunctions` are the parts that `linear_cross_entropy` shares: for one process, and in two steps for a vocabulary that
is sharded over ranks, between which statistics are reduced.

N rows, V vocabulary (of this rank).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.kernels.dispatch import choose
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.kernels.libraries import liger
from meshwright.kernels.operators import only_once, operator
from meshwright.kernels.routes import KernelCall, Refusal, Route
from meshwright.kernels.shapes import require_shapes
from meshwright.kernels.triton_route import serves_triton

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


def cross_entropy(
    logits_NV: Tensor,
    labels_N: Tensor,
    *,
    weights_N: Tensor | None = None,
    reduction: Reduction = "sum",
    z_loss: float = 0.0,
    cap: float = 0.0,
) -> Tensor:
    """Loss in fp32, each row times its weight (1 unless given).

    The gradient overwrites `logits_NV` where one is wanted, so they must be no leaf and are not to be read afterwards.
    """
    require_shapes("cross_entropy", logits_NV=logits_NV, labels_N=labels_N, weights_N=weights_N)
    route = choose("cross_entropy", logits_NV, flags=frozenset({"backward"} if logits_NV.requires_grad else ()))
    labels_N, weights_N = row_weights(labels_N, weights_N, reduction=reduction, vocab=logits_NV.shape[1])
    losses_N = ROUTES["cross_entropy"][route].function(logits_NV, labels_N, weights_N, z_loss=z_loss, cap=cap)
    return losses_N if reduction == "none" else losses_N.sum()


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


def serves_plain(call: KernelCall) -> Refusal | None:
    """Refuse tensors that are no plain ones, and traced graphs: the gradient overwrites memory unseen by autograd."""
    if not call.shapes:
        return Refusal(reason="works in place, which a traced graph does not allow")
    return Refusal(reason="a tensor is no plain tensor") if "subclass" in call.flags else None


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


# --- in place ---


class _Overwriting(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, z_loss: float, cap: float, rows: RowFunctions
    ) -> Tensor:
        with_grad = ctx.needs_input_grad[0]
        ctx.grad_NV, ctx.rows = logits_NV.detach() if with_grad else None, rows
        return rows.fused(logits_NV.detach(), labels_N, weights_N, z_loss=z_loss, cap=cap, with_grad=with_grad)

    @staticmethod
    @only_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_NV = ctx.grad_NV
        if is_graph_kept():
            grad_NV = grad_NV.clone()
        else:
            ctx.grad_NV = None
        ctx.rows.scale(grad_NV, grads[0])
        return grad_NV, *[None] * 5


def is_graph_kept() -> bool:
    """Return True in a backward pass after which another one may follow. Pipelines split one in two, for instance."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


def _in_place(
    logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, *, z_loss: float, cap: float, rows: RowFunctions
) -> Tensor:
    """Losses [N]. A leaf, and columns that are not contiguous, are copied first."""
    if (logits_NV.is_leaf and logits_NV.requires_grad) or logits_NV.stride(-1) != 1:
        logits_NV = logits_NV.clone(memory_format=torch.contiguous_format)
    return _Overwriting.apply(logits_NV, labels_N, weights_N, z_loss, cap, rows)


def _by_torch(logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, *, z_loss: float, cap: float) -> Tensor:
    return _in_place(logits_NV, labels_N, weights_N, z_loss=z_loss, cap=cap, rows=TORCH_ROWS)


def _by_triton(logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, *, z_loss: float, cap: float) -> Tensor:
    if torch.compiler.is_compiling():
        losses_N, _ = cross_entropy_op(logits_NV, labels_N, weights_N, z_loss, cap)
        return losses_N
    return _in_place(logits_NV, labels_N, weights_N, z_loss=z_loss, cap=cap, rows=triton_rows())


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _scaled(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    (grad_NV,) = ctx.saved_tensors
    return grad_NV * grads[0].unsqueeze(1).to(grad_NV.dtype), *[None] * 4


@operator(
    "cross_entropy",
    fake=lambda logits_NV, *others: (
        logits_NV.new_empty(logits_NV.shape[0], dtype=torch.float32), logits_NV.new_empty(logits_NV.shape),
    ),
    saves=_save,
    gradients=_scaled,
)  # fmt: skip
def cross_entropy_op(
    logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, z_loss: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Losses [N] and the gradient of their sum, for a traced graph, which reuses memory by itself."""
    grad_NV = logits_NV.clone(memory_format=torch.contiguous_format)
    losses_N = triton_rows().fused(grad_NV, labels_N, weights_N, z_loss=z_loss, cap=cap, with_grad=True)
    return losses_N, grad_NV


ROUTES = {
    "cross_entropy": {
        "reference": Route(reference),
        "cached": Route(_by_torch, serves=serves_plain),
        "triton": Route(_by_triton, serves=serves_triton),
        "liger": Route(liger.cross_entropy, serves=liger.serves),
    }
}
