"""Pipeline parallelism: a rank holds some stages of the model and sends activations of micro-batches to the next.

Layers are assigned to `pipeline x virtual_pipeline` stages in the order of the model. The planner's table of the
schedule says which stages a rank holds, and in which order it runs their passes (`pipeline_runtime`).

Every rank reads the same batch, so positions, documents and labels of micro-batches are not sent between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.cost.pipeline.schedules import shape_of
from meshwright.cost.stages import layers_per_stage
from meshwright.engines.native.parallel.mesh import PIPELINE, MeshCoordinates
from meshwright.engines.native.parallel.pipeline_runtime import PipelineRuntime
from meshwright.engines.native.parallel.tied_embeddings import EmbeddingCopy
from meshwright.specs.plan import Plan
from meshwright.training.models import Transformer


def layers_of_stages(plan: Plan, *, num_layers: int) -> list[range]:
    """The layers of every stage, in the order of the model: as many as the plan says, else as the cost model assumes.

    >>> layers_of_stages(Plan(pipeline=2, virtual_pipeline=2), num_layers=6)
    [range(0, 1), range(1, 3), range(3, 5), range(5, 6)]
    """
    counts = plan.layers_per_stage or layers_per_stage(num_layers, plan.pipeline * plan.virtual_pipeline)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def stages_of_rank(plan: Plan, pipeline_rank: int) -> tuple[int, ...]:
    """Indices of the stages that a rank holds: r, r + P, r + 2P, ..., or down and up again in a V."""
    return shape_of(plan).stages_of(pipeline_rank)


class Pipeline:
    """The stages of this rank and the schedule that drives them."""

    def __init__(
        self,
        modules: Sequence[Transformer],
        *,
        coordinates: MeshCoordinates,
        num_micro_batches: int,
        sequence_length: int,
        compute: torch.dtype,
        copies: Sequence[EmbeddingCopy] = (),
    ) -> None:
        from torch.distributed.pipelining import PipelineStage  # imports the compiler: 0.6 s, 95 MiB

        plan = coordinates.plan
        self.group = group = coordinates.axes(PIPELINE).get_group()
        num_tokens = sequence_length // plan.context
        tokens = torch.empty(plan.micro_batch, num_tokens, dtype=torch.int64, device="meta")
        num_tokens //= plan.tensor if plan.sequence_parallel else 1
        between = torch.empty(
            plan.micro_batch, num_tokens, modules[0].model.hidden, dtype=compute, device="meta", requires_grad=True
        )
        loss = torch.empty((), device="meta", requires_grad=True)
        last = plan.pipeline * plan.virtual_pipeline - 1
        # With given shapes no stage runs an extra time to infer them, which would count its experts' load twice.
        stages = [
            PipelineStage(
                module,
                index,
                last + 1,
                coordinates.device,
                input_args=tokens if index == 0 else between,
                output_args=loss if index == last else between,
                group=group,
            )
            for index, module in zip(stages_of_rank(plan, coordinates.pipeline_rank), modules, strict=True)
        ]
        self.coordinates, self.model, self.compute = coordinates, modules[0].model, compute
        self.copies = copies
        self.modules = dict(zip(stages_of_rank(plan, coordinates.pipeline_rank), modules, strict=True))
        self.scale = 1.0
        self.passes = PipelineRuntime(shape_of(plan, num_micro_batches=num_micro_batches), stages, loss=self._scaled)

    def forward_backward(self, batch: dict[str, Tensor], *, scale: float) -> Tensor:
        """Add the gradients of all micro-batches; the loss, 0 on ranks that do not hold the last stage."""
        loss = self._run(self.passes.forward_backward, batch, scale)
        for copy in self.copies:
            copy.add_gradient()
        return loss

    @torch.no_grad()
    def loss(self, batch: dict[str, Tensor], *, scale: float) -> Tensor:
        """The loss without gradients; 0 on ranks that do not hold the last stage."""
        return self._run(self.passes.forward_only, batch, scale)

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V] of the whole model for any B and T, on every rank. Stages run one after the other."""
        plan, x = self.coordinates.plan, tokens_BT
        ranks = {index: rank for rank in range(plan.pipeline) for index in stages_of_rank(plan, rank)}
        batch, num_tokens = tokens_BT.shape
        between = (batch, num_tokens // (plan.tensor if plan.sequence_parallel else 1), self.model.hidden)
        for index in range(len(ranks)):
            shape = (batch, num_tokens, self.model.vocab) if index == len(ranks) - 1 else between
            if index in self.modules:
                module = self.modules[index]
                positions_T = module.chunks.order(num_tokens, device=x.device)  # of more than x has, perhaps
                x = module(x, positions_T.expand(batch, -1)).contiguous()
            else:
                x = torch.empty(shape, dtype=self.compute, device=tokens_BT.device)
            dist.broadcast(x, group=self.group, group_src=ranks[index])
        return x

    def _run(self, function: Callable[..., object], batch: dict[str, Tensor], scale: float) -> Tensor:
        self.scale = scale
        given = dict(batch)
        tokens_BT = given.pop("tokens_BT")
        if self.model.num_mtp_layers:
            given["stream_BT"] = tokens_BT
        inputs = (tokens_BT,) if self.coordinates.is_first_stage else ()
        losses: list[Tensor] = []
        is_last = self.coordinates.is_last_stage
        function(*inputs, target=batch["labels_BT"] if is_last else None, losses=losses if is_last else None, **given)
        return torch.stack(losses).sum().detach() if is_last else torch.zeros((), device=tokens_BT.device)

    def _scaled(self, loss: Tensor, target: Tensor) -> Tensor:
        """Scale the output of the last stage, which is the loss: the head's weight is gathered only in its forward."""
        return loss.sum() * self.scale
