"""Vocabulary parallelism: the head and its loss with the vocabulary sharded over the tensor axis.

    logits_local = h W_local^T           each rank has V / tensor rows of W
    lse   = log Σ_ranks Σ_v exp          largest logit and sum of exponentials are reduced, not logits
    loss  = Σ_n w_n [ lse_n - logit of y_n ]           z-loss: in the gradient only, as in `models.loss`
    d h   = Σ_ranks d logits_local W_local      partial on each rank; reduced with the gather's backward

Chunked over tokens like the loss of one process (`models.loss`), and equal to it up to the order of sums.
Source: Shoeybi et al. 2019 (Megatron-LM), section 3.

B sequences, T tokens, N = B T, C tokens of a chunk, D hidden, V vocabulary of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshwright.training.labels import IGNORED_LABEL
from meshwright.training.models.linear import matmul_nt
from meshwright.training.models.loss import cap_slope, capped
from meshwright.training.models.transformer import Head


def shard_vocabulary(head: Head, *, mesh: DeviceMesh, residual: Shard | Replicate) -> None:
    """Shard `head` by rows of its weight, in place; `residual` is the placement of its input."""
    weight = distribute_tensor(head.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    head.weight = nn.Parameter(weight, requires_grad=head.weight.requires_grad)

    def forward(h_BTD: Tensor, labels_BT: Tensor | None = None, weights_BT: Tensor | None = None) -> Tensor:
        whole = DTensor.from_local(h_BTD, mesh, [residual], run_check=False).redistribute(mesh, [Replicate()])
        whole_BTD = whole.to_local(grad_placements=[Partial()])
        assert isinstance(head.weight, DTensor)
        weight_VD = head.weight.to_local()
        if labels_BT is None:
            local_BTV = capped(whole_BTD @ weight_VD.T, head.cap)
            return DTensor.from_local(local_BTV, mesh, [Shard(2)], run_check=False).full_tensor()
        return vocab_parallel_cross_entropy(
            whole_BTD.flatten(0, 1),
            weight_VD,
            labels_BT.flatten(),
            weights_N=None if weights_BT is None else weights_BT.flatten(),
            group=mesh.get_group(),
            z_loss=head.options.z_loss,
            cap=head.cap,
            chunk_logits=head.options.chunk_logits,
        )

    head.forward = forward  # pyright: ignore[reportAttributeAccessIssue]


def vocab_parallel_cross_entropy(
    h_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    weights_N: Tensor | None = None,
    group: dist.ProcessGroup,
    z_loss: float,
    cap: float = 0.0,
    chunk_logits: int,
) -> Tensor:
    """The weighted loss summed over tokens, the same on every rank of `group`.

    The gradient of `h_ND` is this rank's part of it.
    """
    num_rows = max(1, min(len(h_ND), chunk_logits // weight_VD.shape[0]))
    return _VocabParallelCrossEntropy.apply(
        h_ND, weight_VD, labels_N, weights_N, group, z_loss, cap, num_rows
    )


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        weights_N: Tensor | None,
        group: dist.ProcessGroup,
        z_loss: float,
        cap: float,
        num_rows: int,
    ) -> Tensor:
        wants_weight = ctx.needs_input_grad[1]
        first_row = dist.get_rank(group) * weight_VD.shape[0]
        weights_N = (labels_N != IGNORED_LABEL).float() * (1.0 if weights_N is None else weights_N)
        grad_h_ND = torch.empty_like(h_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        total = torch.zeros((), dtype=torch.float32, device=h_ND.device)
        for start in range(0, len(h_ND), num_rows):
            rows = slice(start, start + num_rows)
            logits_CV = capped(matmul_nt(h_ND[rows], weight_VD).float(), cap)
            slope_CV = cap_slope(logits_CV, cap) if cap else None
            loss, grad_CV = _chunk(
                logits_CV, labels_N[rows], weights_N[rows], first_row=first_row, group=group, z_loss=z_loss
            )
            total += loss
            grad_CV = (grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)).to(h_ND.dtype)
            grad_h_ND[rows] = matmul_nt(grad_CV, weight_VD.T)
            if grad_weight_VD is not None:
                grad_weight_VD += matmul_nt(grad_CV.T, h_ND[rows].T)
        grad_weight_VD = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        ctx.save_for_backward(grad_h_ND, grad_weight_VD)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_h_ND, grad_weight_VD = ctx.saved_tensors
        scale = grads[0]
        return (
            grad_h_ND * scale.to(grad_h_ND.dtype),
            None if grad_weight_VD is None else grad_weight_VD * scale.to(grad_weight_VD.dtype),
            *[None] * 6,
        )


def _chunk(
    logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor,
    *,
    first_row: int,
    group: dist.ProcessGroup,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Loss sum of a chunk and its gradient with respect to this rank's logits, which overwrites them."""
    largest_C1 = logits_CV.amax(dim=1, keepdim=True)
    dist.all_reduce(largest_C1, op=dist.ReduceOp.MAX, group=group)
    local_C1 = labels_C.unsqueeze(1) - first_row
    is_here_C1 = (local_C1 >= 0) & (local_C1 < logits_CV.shape[1])  # IGNORED_LABEL is nowhere
    local_C1 = local_C1.clamp(0, logits_CV.shape[1] - 1)
    # One all-reduce for both sums: exponentials, and the label's logit, which one rank has.
    sums_2C1 = torch.stack(
        [
            (logits_CV - largest_C1).exp().sum(dim=1, keepdim=True),
            logits_CV.gather(1, local_C1).masked_fill(~is_here_C1, 0.0),
        ]
    )
    dist.all_reduce(sums_2C1, group=group)
    lse_C1 = largest_C1 + sums_2C1[0].log()
    loss_C1 = lse_C1 - sums_2C1[1]
    loss = (weights_C * loss_C1.squeeze(1)).sum()

    grad_CV = logits_CV.sub_(lse_C1).exp_()
    if z_loss:
        grad_CV *= 1 + 2 * z_loss * lse_C1
    grad_CV.scatter_add_(1, local_C1, -is_here_C1.to(grad_CV.dtype))
    return loss, grad_CV.mul_(weights_C.unsqueeze(1))
