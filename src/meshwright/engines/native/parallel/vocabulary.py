"""Vocabulary parallelism: the head with the vocabulary sharded over the tensor axis, and its loss.

The loss and its gradients are those of `kernels.linear_cross_entropy`, whose ranks reduce the largest logit and the sum
of exponentials. The gradient of the hidden states is partial on each rank, and reduced with the gather's backward.

B sequences, T tokens, D hidden, V vocabulary of this rank.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshwright.kernels.cross_entropy import capped
from meshwright.kernels.linear import linear
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
            local_BTV = capped(linear(whole_BTD, weight_VD), head.cap)
            return DTensor.from_local(local_BTV, mesh, [Shard(2)], run_check=False).full_tensor()
        return head.loss(whole_BTD, weight_VD, labels_BT, weights_BT, group=mesh.get_group())

    head.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
