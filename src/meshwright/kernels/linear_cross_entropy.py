"""Cross-entropy of a linear layer's outputs, without ever holding the logits of all tokens.

    logits = h Wᵀ       losses and their gradient as in `cross_entropy`
    d h = d logits W    d W = d logitsᵀ h

Logits are made for a chunk of tokens, and their gradient overwrites them. All tokens are one chunk where that takes
less memory than the sum of d W over chunks. A sum or mean of losses needs no second
forward pass: d h [N, D] and d W [V, D] are made chunk by chunk with the losses and kept instead of logits [N, V], and
the backward pass multiplies them by the gradient that arrives unless that is one. Losses of single tokens get their
gradients in the backward pass, which makes the logits of each chunk again.

A vocabulary that is sharded over ranks (Shoeybi et al. 2019, Megatron-LM, section 3): each rank has V rows of W. The
largest logit and the sum of exponentials are reduced, not logits. d h is this rank's part.

N tokens, C tokens of a chunk, D hidden, V vocabulary (of this rank).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.kernels import liger
from meshwright.kernels.cross_entropy import (
    TORCH_ROWS,
    Reduction,
    RowFunctions,
    is_graph_kept,
    row_weights,
    triton_rows,
)
from meshwright.kernels.cross_entropy import reference as of_logits
from meshwright.kernels.dispatch import choose, note_facts
from meshwright.kernels.linear import matmul_nt
from meshwright.kernels.operators import only_once, operator
from meshwright.kernels.routes import KernelCall, Refusal, Route
from meshwright.kernels.shapes import require_shapes
from meshwright.kernels.traffic import AUTOMATIC, CHUNK_LOGITS, automatic_chunk, chunk_rows
from meshwright.kernels.triton_route import serves_triton

PART_VALUES = 2**22
"""Values of d W that are made at once and added to the sum of earlier chunks: 16 MiB in fp32."""


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Reduction, coefficient of the z-loss, limit of logits (0: none), logits in memory at once (0:
    automatic), ranks of a sharded vocabulary, and functions of a chunk's rows (None: PyTorch's)."""

    reduction: Reduction = "sum"
    z_loss: float = 0.0
    cap: float = 0.0
    chunk_logits: int = AUTOMATIC
    group: dist.ProcessGroup | None = None
    rows: RowFunctions | None = None


def linear_cross_entropy(
    h_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    weights_N: Tensor | None = None,
    reduction: Reduction = "sum",
    z_loss: float = 0.0,
    cap: float = 0.0,
    chunk_logits: int = AUTOMATIC,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Losses of tokens whose label is not `IGNORED_LABEL`, each times its weight (1 unless given), fp32.

    The default `reduction` is a sum: the number of tokens of a step is known only over all micro-batches and
    ranks. `z_loss` is the coefficient of the term that only the gradient has, `cap` the limit of the logits
    (0: none). `chunk_logits` is the number of logits in memory at once, `traffic.automatic_chunk` by default.
    The vocabulary is sharded over the ranks of `group`, and the loss is the same on all of them.
    """
    require_shapes("linear_cross_entropy", h_ND=h_ND, weight_VD=weight_VD, labels_N=labels_N, weights_N=weights_N)
    flags = {reduction}
    flags |= {"z_loss"} if z_loss else set()
    flags |= {"cap"} if cap else set()
    flags |= {"weights"} if weights_N is not None else set()
    flags |= {"sharded"} if group is not None else set()
    flags |= {"mixed"} if h_ND.dtype != weight_VD.dtype else set()
    route = choose("linear_cross_entropy", h_ND, weight_VD, flags=frozenset(flags))
    settings = LossSettings(reduction=reduction, z_loss=z_loss, cap=cap, chunk_logits=chunk_logits, group=group)
    vocab = weight_VD.shape[0] * (1 if group is None else group.size())
    labels_N, weights_N = row_weights(labels_N, weights_N, reduction=reduction, vocab=vocab)
    return ROUTES["linear_cross_entropy"][route].function(h_ND, weight_VD, labels_N, weights_N, settings)


def reference(h_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, weights_N: Tensor, settings: LossSettings) -> Tensor:
    """The specification: all logits at once."""
    logits_NV = h_ND @ weight_VD.T
    if settings.group is not None:
        parts = [torch.empty_like(logits_NV) for _ in range(dist.get_world_size(settings.group))]
        dist.all_gather(parts, logits_NV.detach().contiguous(), group=settings.group)
        parts[dist.get_rank(settings.group)] = logits_NV  # the others are constants: gradients are this rank's part
        logits_NV = torch.cat(parts, dim=1)
    losses_N = of_logits(logits_NV, labels_N, weights_N, z_loss=settings.z_loss, cap=settings.cap)
    return losses_N if settings.reduction == "none" else losses_N.sum()


# --- chunks of tokens ---


def _in_chunks(h_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, weights_N: Tensor, settings: LossSettings) -> Tensor:
    if not torch.is_grad_enabled():  # autograd would say that a weight needs its gradient all the same
        nothing = (False, False)
        losses_N = losses_and_gradients(h_ND, weight_VD, labels_N, weights_N, settings, wants=nothing)[0]
        return losses_N if settings.reduction == "none" else losses_N.sum()
    function = _LossesOfTokens if settings.reduction == "none" else _SummedLoss
    return function.apply(h_ND, weight_VD, labels_N, weights_N, settings)


class _SummedLoss(torch.autograd.Function):
    """The sum of losses. Gradients are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, h_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, weights_N: Tensor, settings: LossSettings
    ) -> Tensor:
        ctx.scale, wants = (settings.rows or TORCH_ROWS).scale, tuple(ctx.needs_input_grad[:2])
        losses_N, *ctx.gradients = losses_and_gradients(h_ND, weight_VD, labels_N, weights_N, settings, wants=wants)
        return losses_N.sum()

    @staticmethod
    @only_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        if is_graph_kept():
            gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        else:
            ctx.gradients = None
        for gradient in gradients:
            if gradient is not None and len(gradient):
                ctx.scale(gradient, grads[0].expand(len(gradient)))
        return *gradients, *[None] * 3


class _LossesOfTokens(torch.autograd.Function):
    """Losses [N]. The backward pass makes logits again, and weights each row by the gradient that arrives for it."""

    @staticmethod
    def forward(
        ctx: Any, h_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, weights_N: Tensor, settings: LossSettings
    ) -> Tensor:
        ctx.save_for_backward(h_ND, weight_VD, labels_N, weights_N)
        ctx.settings, nothing = settings, (False, False)
        return losses_and_gradients(h_ND, weight_VD, labels_N, weights_N, settings, wants=nothing)[0]

    @staticmethod
    @only_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h_ND, weight_VD, labels_N, weights_N = ctx.saved_tensors
        _, *gradients = losses_and_gradients(
            h_ND, weight_VD, labels_N, weights_N * grads[0], ctx.settings, wants=tuple(ctx.needs_input_grad[:2])
        )
        return *gradients, *[None] * 3


def losses_and_gradients(
    h_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    weights_N: Tensor,
    settings: LossSettings,
    *,
    wants: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses [N] times weights, and the gradients of their sum with respect to h and W where `wants` says so."""
    grad_h_ND = torch.empty_like(h_ND, memory_format=torch.contiguous_format) if wants[0] else None
    grad_weight_VD = torch.zeros_like(weight_VD) if wants[1] and not len(h_ND) else None
    losses = []
    chunks = list(_chunks(len(h_ND), size=_chunk_rows(h_ND, weight_VD, settings, sums=wants[1])))
    if any(wants) and chunks:
        note_facts("linear_cross_entropy", chunk_tokens=chunks[0].stop, num_chunks=len(chunks))
    for part in chunks:
        grad_CV = matmul_nt(h_ND[part], weight_VD)  # logits, until their gradient overwrites them
        losses.append(_of_chunk(grad_CV, labels_N[part], weights_N[part], settings, with_grad=any(wants)))
        if grad_h_ND is not None:
            grad_h_ND[part] = matmul_nt(grad_CV, weight_VD.T)
        if wants[1] and part.stop - part.start == len(h_ND):
            grad_weight_VD = matmul_nt(grad_CV.T, h_ND[part].T)
        elif wants[1]:
            sum_VD = grad_weight_VD
            h_CD = h_ND[part]
            if sum_VD is None:
                sum_VD = torch.zeros(grad_CV.shape[1], h_CD.shape[1], dtype=torch.float32, device=h_CD.device)
            size = max(1, PART_VALUES // max(1, h_CD.shape[1]))
            for start in range(0, len(sum_VD), size):
                sum_VD[start : start + size].add_(matmul_nt(grad_CV[:, start : start + size].T, h_CD.T))
            grad_weight_VD = sum_VD
        del grad_CV  # before the next chunk exists
    losses_N = torch.cat(losses) if losses else weights_N.new_zeros(0)
    return losses_N, grad_h_ND, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)


def _chunk_rows(h_ND: Tensor, weight_VD: Tensor, settings: LossSettings, *, sums: bool) -> int:
    """Tokens of a chunk: as asked, else by memory. PyTorch's rows have copies in fp32; without d W there is no sum."""
    (vocab, hidden), num_tokens, chunk = weight_VD.shape, len(h_ND), CHUNK_LOGITS
    if settings.chunk_logits != AUTOMATIC:
        return max(1, settings.chunk_logits // max(1, vocab))
    if settings.rows is not None and sums:
        size = h_ND.element_size()
        chunk = int(automatic_chunk(num_tokens, vocab=vocab, hidden=hidden, element_bytes=size))
    return int(chunk_rows(num_tokens, vocab=vocab, chunk_logits=chunk))


def _chunks(num_tokens: int, *, size: int) -> Iterator[slice]:
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


def _of_chunk(
    logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor, settings: LossSettings, *, with_grad: bool
) -> Tensor:
    """Losses of a chunk; the gradient overwrites its logits."""
    z_loss, cap, group = settings.z_loss, settings.cap, settings.group
    rows = settings.rows or TORCH_ROWS
    if group is None:
        return rows.fused(logits_CV, labels_C, weights_C, z_loss=z_loss, cap=cap, with_grad=with_grad)
    first = dist.get_rank(group) * logits_CV.shape[1]
    largest_C, sum_C, of_label_C = rows.statistics(logits_CV, labels_C, cap=cap, first=first)
    own_C = largest_C.clone()
    dist.all_reduce(largest_C, op=dist.ReduceOp.MAX, group=group)
    # One all-reduce for both sums: exponentials, and the label's logit, which one rank has.
    sums_2C = torch.stack([sum_C * (own_C - largest_C).exp(), of_label_C])
    dist.all_reduce(sums_2C, group=group)
    lse_C = largest_C + sums_2C[0].log()
    if with_grad:
        rows.gradient(logits_CV, labels_C, lse_C, weights_C, z_loss=z_loss, cap=cap, first=first)
    return (lse_C - sums_2C[1]) * weights_C


# --- routes ---


def _by_triton(h_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, weights_N: Tensor, settings: LossSettings) -> Tensor:
    if not torch.compiler.is_compiling():
        return _in_chunks(h_ND, weight_VD, labels_N, weights_N, replace(settings, rows=triton_rows()))
    wants = torch.is_grad_enabled()
    loss, _, _ = linear_cross_entropy_op(
        h_ND, weight_VD, labels_N, weights_N, settings.z_loss, settings.cap, settings.chunk_logits,
        wants and h_ND.requires_grad, wants and weight_VD.requires_grad,
    )  # fmt: skip
    return loss


def _empty(h_ND: Tensor, weight_VD: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    wants_h, wants_weight = others[-2:]
    return (
        h_ND.new_empty((), dtype=torch.float32),
        h_ND.new_empty(h_ND.shape if wants_h else 0),
        weight_VD.new_empty(weight_VD.shape if wants_weight else 0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.wants = inputs[-2:]


def _scaled(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    kept = zip(ctx.saved_tensors, ctx.wants, strict=True)
    gradients = [made * grads[0].to(made.dtype) if is_wanted else None for made, is_wanted in kept]
    return *gradients, *[None] * 7


@operator("linear_cross_entropy", fake=_empty, saves=_save, gradients=_scaled)
def linear_cross_entropy_op(
    h_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, weights_N: Tensor, z_loss: float, cap: float,
    chunk_logits: int, wants_h: bool, wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The summed loss and its gradients, for a traced graph; a gradient that is not wanted is empty."""
    losses_N, grad_h_ND, grad_weight_VD = losses_and_gradients(
        h_ND, weight_VD, labels_N, weights_N,
        LossSettings(z_loss=z_loss, cap=cap, chunk_logits=chunk_logits, rows=triton_rows()),
        wants=(wants_h, wants_weight),
    )  # fmt: skip
    return (
        losses_N.sum(),
        h_ND.new_empty(0) if grad_h_ND is None else grad_h_ND,
        weight_VD.new_empty(0) if grad_weight_VD is None else grad_weight_VD.contiguous(),
    )


def _plain(call: KernelCall) -> Refusal | None:
    if not call.shapes:
        return Refusal(reason="its chunks are not for traced graphs")
    if "mixed" in call.flags:
        return Refusal(reason="hidden states and weight have different formats")
    return Refusal(reason="a tensor is no plain tensor") if "subclass" in call.flags else None


def _triton_serves(call: KernelCall) -> Refusal | None:
    if not call.shapes and call.flags & {"none", "sharded"}:
        return Refusal(reason="traced graphs have the sum over tokens of one rank's vocabulary")
    if "mixed" in call.flags:
        return Refusal(reason="hidden states and weight have different formats")
    return serves_triton(call)


ROUTES = {
    "linear_cross_entropy": {
        "reference": Route(reference),
        "cached": Route(_in_chunks, serves=_plain),
        "triton": Route(_by_triton, serves=_triton_serves),
        "liger": Route(liger.linear_cross_entropy, serves=liger.serves_linear_cross_entropy),
    }
}
