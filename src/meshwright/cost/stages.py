"""Layers of a model on the ranks of a pipeline.

p ranks with v chunks each make S = p v virtual stages. When S divides the number of layers all are equal. When it
does not, middle chunks take ceil(L / S) layers and the first and last, which also hold the embedding and the head,
take the rest: Megatron-Core's "account for embedding and loss in the pipeline split", and what the published
configurations of Llama 3.1 405B (126 layers) and BLOOM (70 layers) do.

nanotron splits by cost instead: the head counts as V h parameters, and a layer that crosses
the boundary of a rank stays before it, so early ranks hold more layers than late ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.tables import ModelTable, PlanTable


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """Layers on three kinds of pipeline rank; `moe` and `dense` of a rank add up to its layers.

    With p = 1 the first rank is also the last; `middle` is then the same rank. With p = 2 there is no middle.
    """

    first_dense: Array
    first_moe: Array
    middle_dense: Array
    middle_moe: Array
    last_dense: Array
    last_moe: Array

    @property
    def first(self) -> Array:
        return self.first_dense + self.first_moe

    @property
    def middle(self) -> Array:
        return self.middle_dense + self.middle_moe

    @property
    def last(self) -> Array:
        return self.last_dense + self.last_moe


def split_layers(model: ModelTable, plan: PlanTable, *, by_cost: Array = 0) -> StageLayers:
    """Layers per rank. Dense layers of a mixture-of-experts model come first, as in DeepSeek-V3.

    by_cost: 1 where the pipeline is split as nanotron does. Middle ranks then hold a mean number of layers.
    """
    single = plan.pipeline == 1
    first, middle, last = _even(model, plan)
    if np.any(by_cost):
        costed = _by_cost(model, plan)
        chosen = np.asarray(by_cost) > 0
        first, middle, last = (
            np.where(chosen, c, e) for c, e in zip(costed, (first, middle, last), strict=True)
        )
    first, middle, last = (np.where(single, model.num_layers, x) for x in (first, middle, last))
    if not np.any(model.num_moe_layers):
        return StageLayers(
            first_dense=first, first_moe=0 * first,
            middle_dense=middle, middle_moe=0 * middle,
            last_dense=last, last_moe=0 * last,
        )  # fmt: skip
    is_moe = model.num_moe_layers > 0
    leading = np.where(is_moe, model.num_dense_layers, model.num_layers)
    first_dense = np.minimum(leading, first)
    middle_dense = np.where(single, first_dense, np.minimum(leading - first_dense, middle))
    last_dense = np.where(single, first_dense, np.where(is_moe, 0, last))
    return StageLayers(
        first_dense=first_dense,
        first_moe=first - first_dense,
        middle_dense=middle_dense,
        middle_moe=middle - middle_dense,
        last_dense=last_dense,
        last_moe=last - last_dense,
    )


def layers_per_stage(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of every stage, whole numbers, as they are costed: equal ones, what is left on the two ends.

    Where too little is left, as even as can be, the first stages with one more; the planner offers no such split.

    >>> layers_per_stage(126, 16)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    >>> layers_per_stage(9, 7)
    (2, 2, 1, 1, 1, 1, 1)
    """
    middle = -(-num_layers // num_stages)
    ends = num_layers - (num_stages - 2) * middle
    if num_stages == 1:
        return (num_layers,)
    if ends < 0:
        share, left = divmod(num_layers, num_stages)
        return tuple(share + (i < left) for i in range(num_stages))
    return (ends // 2, *[middle] * (num_stages - 2), ends - ends // 2)


def _even(model: ModelTable, plan: PlanTable) -> tuple[Array, Array, Array]:
    """(first, middle, last) of p > 1 ranks, chunk by chunk."""
    L, v = model.num_layers, plan.virtual_pipeline
    stages = plan.pipeline * v
    chunk = np.ceil(L / stages)
    left = L - (stages - 2) * chunk
    even = (L % stages == 0) | (stages <= 2)
    end = np.where(even, L / stages, np.where(left < 0, 1, left / 2))
    middle_chunk = np.where(even, L / stages, (L - 2 * end) / np.maximum(stages - 2, 1))
    first = (v - 1) * middle_chunk + end
    return first, v * middle_chunk, first


def _by_cost(model: ModelTable, plan: PlanTable) -> tuple[Array, Array, Array]:
    """(first, middle, last) of p > 1 ranks when a rank takes layers until their cost passes its share."""
    h, p = model.hidden, plan.pipeline
    layer = 4 * model.num_heads * model.qk_dim * h + model.ffn_matrices * h * model.ffn
    share = (model.num_layers + model.vocab * h / layer) / p
    first = np.minimum(np.floor(share) + 1, model.num_layers)
    before_last = np.minimum(np.floor(share * (p - 1)) + 1, model.num_layers)
    return first, (before_last - first) / np.maximum(p - 2, 1), model.num_layers - before_last
