"""The forward and backward passes of one optimizer step, and the loss without them.

A batch is what one process reads for one step: tokens_BT, labels_BT (`IGNORED_LABEL` where none counts), positions_BT,
and documents_BT where attention stops at document boundaries. Losses are sums over labels; `scale`, one over the labels
that count in the whole global batch, makes the sum over processes and micro-batches the mean loss. With pairs of
answers a loss is one of a pair, and a batch has reference_BX, unless the reference is the model without its adapters.
With completions a batch has advantages_B2, and old_BT where several steps train on them.

B sequences, T tokens of a sequence.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.engines.native.parallel.fsdp import set_gradient_sync
from meshwright.specs.plan import Plan
from meshwright.training.models import adapters_of, as_reference

BatchTensors = dict[str, Tensor]
"""Tensors of a batch, by name."""


class Stepper(Protocol):
    """The passes of a step: `Accumulation` here, `Pipeline` in `parallel.pipeline`."""

    def forward_backward(self, batch: BatchTensors, *, scale: float) -> Tensor:
        """Add the gradients of `batch` to the parameters and return this process's part of the mean loss."""
        ...

    def loss(self, batch: BatchTensors, *, scale: float) -> Tensor:
        """Return this process's part of the mean loss."""
        ...

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V] of the whole model."""
        ...


class Accumulation:
    """Gradient accumulation over micro-batches, for a model (or its shards) without pipeline stages."""

    def __init__(self, module: nn.Module, *, plan: Plan, is_reference: bool = False) -> None:
        self.module, self.plan = module, plan
        self.is_reference = is_reference  # the model without its adapters is the reference

    def forward_backward(self, batch: BatchTensors, *, scale: float) -> Tensor:
        """Add the gradients of all micro-batches; the loss, detached."""
        micro_batches = split_micro_batches(batch, size=self.plan.micro_batch)
        total = torch.zeros((), device=batch["tokens_BT"].device)
        for i, micro_batch in enumerate(micro_batches):
            is_last = i == len(micro_batches) - 1
            set_gradient_sync(self.module, is_last=is_last, sharding=self.plan.sharding)
            loss = self._forward(micro_batch) * scale
            loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def loss(self, batch: BatchTensors, *, scale: float) -> Tensor:
        """The loss of all micro-batches."""
        losses = [self._forward(m) for m in split_micro_batches(batch, size=self.plan.micro_batch)]
        return torch.stack(losses).sum() * scale

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        return self.module(tokens_BT)

    def scores(self, batch: BatchTensors, *, is_reference: bool = True) -> Tensor:
        """Log-probabilities [B, 2] of the answers of pairs, or [B, T] of the tokens of completions, in micro-batches.

        `is_reference`: under the weights without adapters.
        """
        parts = split_micro_batches(batch, size=self.plan.micro_batch)
        return torch.cat([self._scores(part, is_reference=is_reference) for part in parts])

    def _scores(self, micro_batch: BatchTensors, *, is_reference: bool = True) -> Tensor:
        arguments = dict(micro_batch)
        with as_reference(self.module, adapters=adapters_of(self.module) if is_reference else ()):
            return self.module(arguments.pop("tokens_BT"), **arguments, is_scored=True)

    def _forward(self, micro_batch: BatchTensors) -> Tensor:
        arguments = dict(micro_batch)
        if self.is_reference:
            arguments["reference_BX"] = self._scores(micro_batch)
        return self.module(arguments.pop("tokens_BT"), **arguments)


def split_micro_batches(batch: BatchTensors, *, size: int) -> list[BatchTensors]:
    """Split `batch` into micro-batches of `size` sequences."""
    splits = {name: tensor.split(size) for name, tensor in batch.items()}
    return [dict(zip(splits, parts, strict=True)) for parts in zip(*splits.values(), strict=True)]
