"""The forward and backward passes of one optimizer step, and the loss without them.

A batch is what one process reads for one step: tokens_BT, labels_BT (`IGNORED_LABEL` where none counts), positions_BT,
and documents_BT where one document may not look into another. Losses are sums over labels; `scale`, one over the labels
that count in the whole global batch, makes the sum over processes and micro-batches the mean loss.

B sequences, T tokens of a sequence.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.engines.native.parallel.fsdp import set_gradient_sync
from meshwright.specs.plan import Plan

Batch = dict[str, Tensor]


class Stepper(Protocol):
    """Runs the passes of a step: `Accumulation` here, `Pipeline` in `parallel.pipeline`."""

    def forward_backward(self, batch: Batch, *, scale: float) -> Tensor:
        """Add the gradients of `batch` to the parameters and return this process's part of the mean loss."""
        ...

    def loss(self, batch: Batch, *, scale: float) -> Tensor:
        """This process's part of the mean loss."""
        ...

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V] of the whole model."""
        ...


class Accumulation:
    """A whole model in this process (or its shards): micro-batches one after the other."""

    def __init__(self, module: nn.Module, *, plan: Plan) -> None:
        self.module = module
        self.plan = plan

    def forward_backward(self, batch: Batch, *, scale: float) -> Tensor:
        """Add the gradients of all micro-batches; the loss, detached."""
        micro_batches = split_micro_batches(batch, size=self.plan.micro_batch)
        total = torch.zeros((), device=batch["tokens_BT"].device)
        for i, micro in enumerate(micro_batches):
            set_gradient_sync(self.module, is_last=i == len(micro_batches) - 1, sharding=self.plan.sharding)
            loss = self._forward(micro) * scale
            loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def loss(self, batch: Batch, *, scale: float) -> Tensor:
        """The loss of all micro-batches."""
        losses = [self._forward(micro) for micro in split_micro_batches(batch, size=self.plan.micro_batch)]
        return torch.stack(losses).sum() * scale

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        return self.module(tokens_BT)

    def _forward(self, micro: Batch) -> Tensor:
        given = dict(micro)
        return self.module(given.pop("tokens_BT"), **given)


def split_micro_batches(batch: Batch, *, size: int) -> list[Batch]:
    """`batch` in portions of `size` sequences."""
    parts = {name: tensor.split(size) for name, tensor in batch.items()}
    return [dict(zip(parts, portion, strict=True)) for portion in zip(*parts.values(), strict=True)]
