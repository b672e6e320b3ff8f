"""How the layers of a model lie on the ranks of a pipeline.

p ranks with v chunks each make S = p v virtual stages. When S divides the number of layers all are equal. When it
does not, middle chunks take ceil(L / S) layers and the first and last, which also hold the embedding and the head,
share what is left: Megatron-Core's "account for embedding and loss in the pipeline split", and what the published
configurations of Llama 3.1 405B (126 layers) and BLOOM (70 layers) do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.tables import Array, ModelTable, PlanTable


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """Layers on three kinds of pipeline rank; `moe` and `dense` of a rank add up to its layers.

    With p = 1 the first rank is also the last; `middle` is then the same rank.
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


def split_layers(model: ModelTable, plan: PlanTable) -> StageLayers:
    """Layers per rank. Dense layers of a mixture-of-experts model come first, as in DeepSeek-V3."""
    L, p, v = model.num_layers, plan.pipeline, plan.virtual_pipeline
    stages = p * v
    chunk = np.ceil(L / stages)
    left = L - (stages - 2) * chunk
    even = (L % stages == 0) | (stages <= 2)
    end = np.where(even, L / stages, np.maximum(left / 2, 1))
    middle_chunk = np.where(even, L / stages, (L - 2 * end) / np.maximum(stages - 2, 1))
    single = p == 1
    first = np.where(single, L, (v - 1) * middle_chunk + end)
    middle = np.where(single, L, v * middle_chunk)
    is_moe = model.num_moe_layers > 0
    leading = np.where(is_moe, model.num_dense_layers, 0)
    first_dense = np.where(is_moe, np.minimum(leading, first), first)
    rest = leading - first_dense
    middle_dense = np.where(is_moe, np.where(single, first_dense, np.minimum(rest, middle)), middle)
    last_dense = np.where(is_moe, np.where(single, first_dense, 0), first)
    return StageLayers(
        first_dense=first_dense,
        first_moe=first - first_dense,
        middle_dense=middle_dense,
        middle_moe=middle - middle_dense,
        last_dense=last_dense,
        last_moe=first - last_dense,
    )
