"""Forward and backward passes by Megatron's schedules, with batches in Meshwright's order.

A micro-batch has tokens, labels (negative where untrained), positions, and a mask between documents. Losses are sums
over labels; Megatron divides gradients by the number of labels in the global batch.

S tokens of a sequence, B sequences, V vocabulary of this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from meshwright.engines.megatron.in_megatron_process.layers import Fp32Router
from meshwright.engines.megatron.in_megatron_process.model import ModelAndOptimizer
from meshwright.kernels.attention.key_ranges import key_ranges
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training.data import Batch


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """The forward and backward passes of a step, or only its loss."""

    run: Run
    plan: Plan
    parts: ModelAndOptimizer
    device: torch.device

    def loss(self, batch: Batch, *, forward_only: bool = False) -> float:
        """Return the mean loss of the global batch; accumulate gradients. `batch` is this process's part of it."""
        if self.run.train.balance_loss or self.run.train.router_z_loss:
            self._set_label_ratio(batch)
        micros = list(batch.micro_batches(self.plan.micro_batch))
        chunks: list[Any] = [*self.parts.chunks]
        iterators = [iter(micros) for _ in chunks]
        found = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micros),
            seq_length=self.run.sequence_length,
            micro_batch_size=self.plan.micro_batch,
            forward_only=forward_only,
        )
        return self._mean([step["loss_and_labels"] for step in found])

    def _set_label_ratio(self, batch: Batch) -> None:
        """Set the ratio of trained labels to tokens in the routers."""
        labels = torch.tensor(batch.num_trained_tokens, device=self.device)
        dist.all_reduce(labels, group=parallel_state.get_data_parallel_group())
        for stage in self.parts.unwrapped:
            for module in stage.modules():
                if isinstance(module, Fp32Router):
                    module.labels_per_token = labels.item() / self.run.tokens_per_step

    def _mean(self, found: list[Tensor]) -> float:
        """Return the mean of all processes' losses, which only the last stages know."""
        zero = torch.zeros(2, dtype=torch.float64, device=self.device)
        total = torch.stack([zero, *(one.double() for one in found)]).sum(dim=0)
        dist.all_reduce(total)  # all tensor ranks count the same labels, other stages none
        loss, labels = total.tolist()
        return loss / max(1.0, labels)

    def _forward(self, batches: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        batch = next(batches).to(self.device)
        out = model(batch.tokens_BT, batch.positions_BT, mask_of(batch))
        return out, partial(self._losses, batch.labels_BT)

    def _losses(self, labels_BS: Tensor, logits_BSV: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the summed loss, the number of trained labels, and both for the log."""
        counts_BS = labels_BS >= 0
        logits_BSV = self._without_padding(logits_BSV.float())
        losses_SB = vocab_parallel_cross_entropy(
            logits_BSV.transpose(0, 1).contiguous(), labels_BS.clamp(min=0).T.contiguous()
        )
        loss, num_labels = (losses_SB.T * counts_BS).sum(), counts_BS.sum().to(torch.int)
        kept = torch.stack([loss.detach().double(), num_labels.double()])
        return loss, num_labels, {"loss_and_labels": kept}

    def _without_padding(self, logits_BSV: Tensor) -> Tensor:
        """Mask the logits of rows that pad the vocabulary to a multiple of the tensor ranks."""
        width = logits_BSV.shape[-1]
        first = parallel_state.get_tensor_model_parallel_rank() * width
        padded = torch.arange(first, first + width, device=logits_BSV.device) >= self.run.model.vocab
        if width * self.plan.tensor == self.run.model.vocab:
            return logits_BSV
        return logits_BSV.masked_fill(padded, torch.finfo(logits_BSV.dtype).min)


def mask_of(batch: Batch) -> Tensor | None:
    """Return Megatron's mask [B, 1, S, S], true for masked scores; None: causal, without document boundaries."""
    documents = batch.documents_BT
    if bool((documents == documents[:, :1]).all()):
        return None
    return ~key_ranges(documents).mask_B1TS
