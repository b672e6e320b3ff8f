"""Context parallelism: every sequence is sharded over ranks, and all layers but attention see only their own tokens.

    chunks    a sequence is cut into 2 C equal ones; rank c has chunks c and 2 C - 1 - c, so that all ranks have the
              same number of (query, key) pairs under a causal mask
    forward   K and V of all ranks are gathered; chunk j attends to keys 0 .. (j + 1) L of the whole sequence
    backward  each rank has gradients of all keys and values from its own queries: a reduce-scatter sums them

Source: Llama 3 (Grattafiori et al. 2024), section 3.3.2.

C context ranks and B sequences of S tokens. A rank holds T = S / C tokens of each, a chunk L = T / 2.
H query heads, G key/value heads. A query or key is K wide, a value V, and X = K + V.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.training.models import Transformer
from meshwright.training.models.attention import CoreAttention
from meshwright.training.models.token_layout import Chunks, LayerLayout


def chunks_of(coordinates: MeshCoordinates) -> Chunks:
    """The chunks of every sequence that the process at `coordinates` holds."""
    return Chunks(rank=coordinates.context_rank, width=coordinates.plan.context)


def shard_sequences(model: Transformer, *, chunks: Chunks, mesh: DeviceMesh) -> None:
    """Make `model` (or a stage of one) compute on `chunks` of every sequence, in place; `mesh` is the context axis."""
    model.chunks = chunks
    for layer in model.layers.values():
        attention = layer.get_submodule("attention")
        core = attention.get_submodule("core")
        assert isinstance(core, CoreAttention)
        attention.core = ContextAttention(core, chunks=chunks, mesh=mesh)


class ContextAttention(CoreAttention):
    """Queries of this rank's two chunks, keys and values of whole sequences."""

    def __init__(self, core: CoreAttention, *, chunks: Chunks, mesh: DeviceMesh) -> None:
        super().__init__(scale=core.scale, cap=core.cap, window=core.window)
        self.chunks, self.mesh, self.dropout = chunks, mesh, core.dropout

    def forward(
        self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, layout: LayerLayout, sinks_H: Tensor | None = None
    ) -> Tensor:
        """[B, T, H, V]."""
        kv_BSGX = _gathered(torch.cat([k_BTGK, v_BTGV], dim=-1), mesh=self.mesh)
        k_BSGK, v_BSGV = kv_BSGX.split([k_BTGK.shape[-1], v_BTGV.shape[-1]], dim=-1)
        length = q_BTHK.shape[1] // 2
        outs = []
        for i, chunk in enumerate((self.chunks.rank, 2 * self.chunks.width - 1 - self.chunks.rank)):
            queries = slice(i * length, (i + 1) * length)
            first = max(0, chunk * length - self.window + 1) if self.window else 0
            keys = slice(first, (chunk + 1) * length)
            ranges = None if layout.ranges is None else layout.ranges.of(queries, keys)
            k_part, v_part = k_BSGK[:, keys], v_BSGV[:, keys]
            outs.append(self.attend(q_BTHK[:, queries], k_part, v_part, ranges=ranges, sinks_H=sinks_H))
        return torch.cat(outs, dim=1)


def _gathered(x_BTGX: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """Gather every rank's two chunks into whole sequences [B, S, G, X]. Their gradients are summed over ranks."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mine = DTensor.from_local(x_BTGX.unsqueeze(0), mesh, [Shard(0)], run_check=False)
    parts_CBTGX = mine.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    early, late = parts_CBTGX.transpose(0, 1).unflatten(2, (2, -1)).unbind(2)
    return torch.cat([early, late.flip(1)], dim=1).flatten(1, 2)  # the first rank has the last chunk
