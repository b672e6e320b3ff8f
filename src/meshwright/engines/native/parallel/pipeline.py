"""Pipeline parallelism: a rank holds some stages of the model and passes micro-batches on.

Layers are dealt to `pipeline x virtual_pipeline` stages in the order of the model; with virtual stages rank r holds
stages r, r + P, r + 2P, ... (Narayanan et al. 2021, section 2.2). The order of passes is PyTorch's.

Every stage receives positions, documents and labels of its micro-batches beside the activations: each rank
reads the same batch, so they need not be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from meshwright.engines.native.parallel.mesh import PIPELINE, Place
from meshwright.specs.plan import Plan, Schedule


def layers_of_stages(plan: Plan, *, num_layers: int) -> list[range]:
    """The layers of every stage, in the order of the model. As even as can be: the first stages get one more.

    >>> layers_of_stages(Plan(pipeline=2, virtual_pipeline=2), num_layers=6)
    [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]
    """
    stages = plan.pipeline * plan.virtual_pipeline
    counts = plan.layers_per_stage or [
        num_layers // stages + (i < num_layers % stages) for i in range(stages)
    ]
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def stages_of_rank(plan: Plan, pipeline_rank: int) -> range:
    """Indices of the stages that a rank holds."""
    return range(pipeline_rank, plan.pipeline * plan.virtual_pipeline, plan.pipeline)


class Pipeline:
    """The stages of this rank and the schedule that drives them."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        place: Place,
        num_micro_batches: int,
        sequence_length: int,
        hidden: int,
        compute: torch.dtype,
    ) -> None:
        plan = place.plan
        group = place.axes(PIPELINE).get_group()
        num_tokens = sequence_length // plan.context
        tokens = torch.empty(plan.micro_batch, num_tokens, dtype=torch.int64, device="meta")
        num_tokens //= plan.tensor if plan.sequence_parallel else 1
        between = torch.empty(
            plan.micro_batch, num_tokens, hidden, dtype=compute, device="meta", requires_grad=True
        )
        loss = torch.empty((), device="meta", requires_grad=True)
        last = plan.pipeline * plan.virtual_pipeline - 1
        # Shapes are given, or each stage would run once more to learn them and count its experts' load twice.
        stages = [
            PipelineStage(
                module,
                index,
                last + 1,
                place.device,
                input_args=tokens if index == 0 else between,
                output_args=loss if index == last else between,
                group=group,
            )
            for index, module in zip(stages_of_rank(plan, place.pipeline_rank), modules, strict=True)
        ]
        self.place = place
        self.scale = 1.0
        self.schedule = self._schedule(plan.schedule, stages, num_micro_batches)

    def forward_backward(self, batch: dict[str, Tensor], *, scale: float) -> Tensor:
        """Add the gradients of all micro-batches; the loss, 0 on ranks that do not hold the last stage."""
        return self._run(self.schedule.step, batch, scale)

    @torch.no_grad()
    def loss(self, batch: dict[str, Tensor], *, scale: float) -> Tensor:
        """The loss without gradients; 0 on ranks that do not hold the last stage."""
        return self._run(self.schedule.eval, batch, scale)

    def _run(self, function: Callable[..., object], batch: dict[str, Tensor], scale: float) -> Tensor:
        self.scale = scale
        given = dict(batch)
        tokens_BT = given.pop("tokens_BT")
        inputs = (tokens_BT,) if self.place.pipeline_rank == 0 else ()
        losses: list[Tensor] = []
        is_last = self.place.is_last_stage
        function(
            *inputs,
            target=batch["labels_BT"] if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
            **given,
        )
        return torch.stack(losses).sum().detach() if is_last else torch.zeros((), device=tokens_BT.device)

    def _schedule(self, kind: Schedule, stages: list[PipelineStage], num_micro_batches: int) -> Any:
        options = {
            "loss_fn": self._scaled,
            "scale_grads": False,
        }  # the scale knows the tokens of the whole step
        if kind is Schedule.GPIPE:
            return ScheduleGPipe(stages[0], num_micro_batches, **options)
        if kind is Schedule.ONE_F_ONE_B:
            return Schedule1F1B(stages[0], num_micro_batches, **options)
        return ScheduleInterleaved1F1B(list(stages), num_micro_batches, **options)

    def _scaled(self, loss: Tensor, target: Tensor) -> Tensor:
        """The last stage returns its loss itself: the head's weight is only whole inside its forward pass."""
        return loss.sum() * self.scale
