"""Copies of the embedding over a pipeline: a matrix on the last stage follows the embedding on the first.

    after the backward passes    gradient of the embedding += gradient of the copy      one send, last stage to first
    after the optimizer's step   weight of the copy = weight of the embedding           one send, first stage to last

Copies are the head of a model with tied embeddings, and the embedding of multi-token prediction modules. So there is
one weight to train, to clip and to save, as in one process; a copy has no optimizer states. Every data
rank sends its own shard to the same shard of the other stage. In a V both stages are on one rank and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.engines.native.parallel.mesh import PIPELINE, MeshCoordinates, last_pipeline_rank
from meshwright.training.masters import Master, local_part
from meshwright.training.models import Transformer


class EmbeddingCopy:
    """Embedding and one of its copies, as far as they are on this rank."""

    def __init__(
        self,
        modules: Sequence[Transformer],
        *,
        copy: Tensor | None,
        masters: Sequence[Master],
        coordinates: MeshCoordinates,
    ) -> None:
        embeddings = [m.embedding.weight for m in modules if m.embedding is not None]
        self.embedding: Tensor | None = embeddings[0] if embeddings else None
        self.copy = copy
        self.trained = {id(m.parameter): m for m in masters}
        self.group = coordinates.axes(PIPELINE).get_group()
        self.last = last_pipeline_rank(coordinates.plan)

    def add_gradient(self) -> None:
        """Add the copy's gradient to the embedding's and forget it."""
        copy, embedding = self._gradient(self.copy), self._gradient(self.embedding)
        if copy is not None:
            if self.embedding is None:
                dist.send(copy, group=self.group, group_dst=0)
            elif embedding is not None:
                embedding.add_(copy)
            self.trained[id(self.copy)].forget_gradient()
        elif embedding is not None:
            gradient = torch.empty_like(embedding)
            dist.recv(gradient, group=self.group, group_src=self.last)
            embedding.add_(gradient)

    @torch.no_grad()
    def copy_weight(self) -> None:
        """Make the copy's weight the embedding's."""
        if self.embedding is not None and self.copy is not None:
            local_part(self.copy).copy_(local_part(self.embedding))
        elif self.embedding is not None:
            dist.send(local_part(self.embedding).detach(), group=self.group, group_dst=self.last)
        elif self.copy is not None:
            dist.recv(local_part(self.copy).detach(), group=self.group, group_src=0)

    def _gradient(self, weight: Tensor | None) -> Tensor | None:
        """This rank's part of the accumulated gradient."""
        master = self.trained.get(id(weight))
        gradient = None if master is None else master.gradient
        return None if gradient is None else local_part(gradient)


def embedding_copies(
    modules: Sequence[Transformer], *, masters: Sequence[Master], coordinates: MeshCoordinates
) -> list[EmbeddingCopy]:
    """The copies of the embedding in a pipeline: none without one, and the same number on every rank."""
    model = modules[0].model
    if coordinates.plan.pipeline == 1:
        return []
    last = next((module for module in modules if module.head is not None), None)
    copies: list[Tensor | None] = []
    if model.tied_embeddings:
        copies.append(None if last is None or last.head is None else last.head.weight)
    if model.num_mtp_layers:
        own = None if last is None else last.prediction_embedding
        copies.append(None if own is None else own.weight)
    return [EmbeddingCopy(modules, copy=copy, masters=masters, coordinates=coordinates) for copy in copies]
