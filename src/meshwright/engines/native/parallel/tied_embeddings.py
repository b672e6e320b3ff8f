"""Tied embeddings over a pipeline: the head on the last stage follows the embedding on the first.

    after the backward passes    gradient of the embedding += gradient of the head      one send, last stage to first
    after the optimizer's step   weight of the head = weight of the embedding           one send, first stage to last

So there is one weight to train, to clip and to save, as in one process; the head has no optimizer states. Every data
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


class TiedHead:
    """Embedding and head of a model with tied embeddings, as far as they are on this rank."""

    def __init__(
        self, modules: Sequence[Transformer], *, masters: Sequence[Master], coordinates: MeshCoordinates
    ) -> None:
        embeddings = [m.embedding.weight for m in modules if m.embedding is not None]
        heads = [m.head.weight for m in modules if m.head is not None]
        self.embedding: Tensor | None = embeddings[0] if embeddings else None
        self.head: Tensor | None = heads[0] if heads else None
        self.trained = {id(m.parameter): m for m in masters}
        self.group = coordinates.axes(PIPELINE).get_group()
        self.last = last_pipeline_rank(coordinates.plan)

    def add_gradient(self) -> None:
        """Add the head's gradient to the embedding's and forget it."""
        head, embedding = self._gradient(self.head), self._gradient(self.embedding)
        if head is not None:
            if self.embedding is None:
                dist.send(head, group=self.group, group_dst=0)
            elif embedding is not None:
                embedding.add_(head)
            self.trained[id(self.head)].forget_gradient()
        elif embedding is not None:
            gradient = torch.empty_like(embedding)
            dist.recv(gradient, group=self.group, group_src=self.last)
            embedding.add_(gradient)

    @torch.no_grad()
    def copy_weight(self) -> None:
        """Make the head's weight the embedding's."""
        if self.embedding is not None and self.head is not None:
            local_part(self.head).copy_(local_part(self.embedding))
        elif self.embedding is not None:
            dist.send(local_part(self.embedding).detach(), group=self.group, group_dst=self.last)
        elif self.head is not None:
            dist.recv(local_part(self.head).detach(), group=self.group, group_src=0)

    def _gradient(self, weight: Tensor | None) -> Tensor | None:
        """This rank's part of the accumulated gradient."""
        master = self.trained.get(id(weight))
        gradient = None if master is None else master.gradient
        return None if gradient is None else local_part(gradient)


def tie(
    modules: Sequence[Transformer], *, masters: Sequence[Master], coordinates: MeshCoordinates
) -> TiedHead | None:
    """The `TiedHead` of these stages; None without a pipeline or without tied embeddings."""
    if coordinates.plan.pipeline == 1 or not modules[0].model.tied_embeddings:
        return None
    return TiedHead(modules, masters=masters, coordinates=coordinates)
