"""Layers of a model on the ranks of a pipeline.

p ranks with v chunks each make S = p v virtual stages. When S divides the number of layers all are equal. When it
does not, middle chunks take ceil(L / S) layers and the first and last, which also hold the embedding and the head,
take the rest, the last one an odd layer: Megatron-Core's "account for embedding and loss in the pipeline
split", as in the published configurations of Llama 3.1 405B (126 layers) and BLOOM (70 layers). A plan may
name another split, stage by stage.

nanotron splits by cost instead: the head counts as V h parameters, and a layer that crosses
the boundary of a rank stays before it, so early ranks hold more layers than late ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Array, Mask
from meshwright.cost.pipeline.schedules import Placement, column_of
from meshwright.cost.tables import ModelTable, PlanTable


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """Layers that one micro-batch passes through on three pipeline ranks; `moe` and `dense` of a rank add up.

    `middle` is the rank before the last one: it has the fewest dense layers between the ends. All three are
    the same rank for p = 1, and `middle` is none for p = 2. `start` is the first stage, which may be a part
    of its rank.
    """

    first_dense: Array
    first_moe: Array
    middle_dense: Array
    middle_moe: Array
    last_dense: Array
    last_moe: Array
    start_dense: Array
    start_moe: Array

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
    ranks = _usual(model, plan)
    if np.any(by_cost):
        costed = _by_cost(model, plan)
        ranks = _chosen(np.asarray(by_cost) > 0, (*costed, costed[0]), ranks)
    if np.any(np.asarray(plan.first_layers) >= 0):
        ranks = _chosen(np.asarray(plan.first_layers) >= 0, _named(plan), ranks)
    *ranks, start = (np.where(single, model.num_layers, x) for x in ranks)
    first, middle, last = ranks
    if not np.any(model.num_moe_layers):
        return StageLayers(
            first_dense=first, first_moe=0 * first,
            middle_dense=middle, middle_moe=0 * middle,
            last_dense=last, last_moe=0 * last,
            start_dense=start, start_moe=0 * start,
        )  # fmt: skip
    dense = _dense_layers(model, plan, middle, start)
    dense = [np.minimum(d, x) for d, x in zip(dense, ranks, strict=True)]
    return StageLayers(
        first_dense=dense[0],
        first_moe=first - dense[0],
        middle_dense=dense[1],
        middle_moe=middle - dense[1],
        last_dense=dense[2],
        last_moe=last - dense[2],
        start_dense=np.minimum(start, model.num_dense_layers),
        start_moe=np.maximum(start - model.num_dense_layers, 0),
    )


Ranks = tuple[Array, ...]
"""A number for the first rank, for the one before the last, and for the last; and maybe for the first stage."""


def _named(plan: PlanTable) -> Ranks:
    """Ranks of a plan that names its layers. A mirrored rank works on either of its two stages as often."""
    mirrored, loop = _placed(plan, Placement.MIRRORED), _placed(plan, Placement.LOOP)
    times = np.where(mirrored, 2, 1)
    first, middle, last = (x / times for x in (plan.first_layers, plan.middle_layers, plan.last_layers))
    chunk = middle / plan.virtual_pipeline
    looped = np.clip(first - (plan.virtual_pipeline - 1) * chunk, 0, None)
    # On a V or a mirror the first stage may be the lighter one of its rank or not: a full one is assumed.
    return first, middle, last, np.where(loop, looped, np.minimum(times * first, chunk))


def _chosen(mask: Mask, one: Ranks, other: Ranks) -> Ranks:
    return tuple(np.where(mask, a, b) for a, b in zip(one, other, strict=True))


def _dense_layers(model: ModelTable, plan: PlanTable, middle: Array, start_layers: Array) -> Ranks:
    """Dense layers of each rank: those before the first mixture of experts, stage after stage."""
    p = plan.pipeline
    chunk = np.maximum(middle / plan.virtual_pipeline, 1e-9)
    leading = np.where(model.num_moe_layers > 0, model.num_dense_layers, model.num_layers)
    beyond = np.maximum(leading - start_layers, 0)
    full = np.floor(beyond / chunk + 1e-9)

    def on(stage: Array) -> Array:
        return np.clip(beyond - (stage - 1) * chunk, 0, chunk)

    def looped(rank: Array) -> Array:
        """Whole chunks at every p-th stage, and the one that is dense in part."""
        after = np.floor((full - rank) / p)  # floor of a quotient: NumPy's // and % of floats take ten times as long
        whole = np.where(rank > 0, np.where(full >= rank, after + 1, 0), after)
        turn = full + 1 - p * np.floor((full + 1) / p)
        return whole * chunk + (turn == rank) * (beyond - full * chunk)

    start = np.minimum(leading, start_layers)
    before_last = np.maximum(p - 2, 1)
    loop = (start + looped(0), looped(before_last), looped(p - 1))
    opposite = (on(2 * p - 1), on(p + 1), on(p))
    vee = (start + opposite[0], on(before_last) + opposite[1], on(p - 1) + opposite[2])
    ends = (start + on(p - 1)) / 2
    mirrored = (ends, (on(before_last) + on(np.asarray(1))) / 2, ends)
    dense = _chosen(_placed(plan, Placement.V), vee, loop)
    dense = _chosen(_placed(plan, Placement.MIRRORED), mirrored, dense)
    return tuple(np.where(p == 1, np.minimum(leading, model.num_layers), d) for d in dense)


def _placed(plan: PlanTable, placement: Placement) -> NDArray[np.bool_]:
    """True where the plan's schedule places stages so; a pipeline of one rank is a loop."""
    placed = column_of(lambda record: record.placement is placement, plan.schedule)
    return np.where(plan.pipeline > 1, placed, placement is Placement.LOOP)


def end_shares(plan: PlanTable) -> tuple[Ranks, Ranks]:
    """(embedding, head): the share of micro-batches that pass through each on the first, a middle and the last rank.

    A V has both ends on its first rank, mirrored copies of the model have one of each kind on either end.
    """
    single, vee, mirrored = plan.pipeline == 1, _placed(plan, Placement.V), _placed(plan, Placement.MIRRORED)
    both = single | vee
    head_on_first = np.where(both, 1.0, np.where(mirrored, 0.5, 0.0))
    head_on_last = np.where(vee, 0.0, np.where(mirrored, 0.5, 1.0))
    embedding_on_first = np.where(mirrored, 0.5, 1.0)
    embedding_on_last = np.where(single, 1.0, np.where(mirrored, 0.5, 0.0))
    on_middle = single * 1.0
    return (embedding_on_first, on_middle, embedding_on_last), (head_on_first, on_middle, head_on_last)


def layers_per_stage(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of every stage, whole numbers, as they are costed: equal counts, and the remainder on the two ends.

    If too little remains, the split is as even as can be, and the first stages have one more; the planner
    offers no such split.

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


def balanced_layers(weights: Sequence[float], num_stages: int, *, end: float) -> tuple[int, ...]:
    """Layers of every stage, whole numbers of 1 or more, so that the heaviest stage weighs least.

    `weights` are the layers' in order, `end` is the further weight of the last stage: head, loss, multi-token
    prediction. Among equal splits, stages are even and the first ones lighter: they keep most activations.

    >>> balanced_layers([1.0] * 32, 4, end=2.4)
    (8, 9, 9, 6)
    """
    least = _least_heaviest(weights, num_stages, end)
    sums = [0.0, *accumulate(weights)]
    counts: list[int] = []
    left = len(weights)
    for stage in range(num_stages, 1, -1):
        room = least - (end if stage == num_stages else 0.0)
        share = -(-left // stage)
        fewest = bisect_left(sums, sums[left] - room * (1 + 1e-7))  # the layers from this one on fit
        counts.append(max(1, min(share, left - fewest)))
        left -= counts[-1]
    counts.append(left)
    return tuple(reversed(counts))


def _least_heaviest(weights: Sequence[float], num_stages: int, end: float) -> float:
    """Weight of the heaviest stage of the best split: the ends of a binary search meet to rounding."""
    sums = [0.0, *accumulate(weights)]
    low, high = max(max(weights), end + weights[-1], (sums[-1] + end) / num_stages), sums[-1] + end
    for _ in range(24):
        middle = (low + high) / 2
        if _fits(sums, num_stages, end, middle):
            high = middle
        else:
            low = middle
    return high


def _fits(sums: Sequence[float], num_stages: int, end: float, room: float) -> bool:
    """True if stages filled from the last one on hold all layers and leave every earlier one at least a layer."""
    left = len(sums) - 1
    for stage in range(num_stages, 0, -1):
        space = room - (end if stage == num_stages else 0.0)
        first = bisect_left(sums, sums[left] - space * (1 + 1e-7))
        left = max(first, stage - 1)
    return left == 0


def _usual(model: ModelTable, plan: PlanTable) -> Ranks:
    """Ranks of the usual split (`layers_per_stage`) for p > 1, stage by stage."""
    L, p, v = model.num_layers, plan.pipeline, plan.virtual_pipeline
    stages = p * v
    chunk = np.ceil(L / stages)
    left = L - (stages - 2) * chunk
    lacking = left < 0
    start = np.where(lacking, chunk, left // 2)
    end = np.where(lacking, L // stages, left - left // 2)
    between = np.where(lacking, (L - start - end) / np.maximum(stages - 2, 1), chunk)
    middle = np.where(lacking & (v == 1), chunk, v * between)
    usual = (start + (v - 1) * between, middle, end + (v - 1) * between, start)
    if np.all(_placed(plan, Placement.LOOP)):
        return usual
    vee = (start + end, 2 * between, 2 * between, start)
    mirrored = ((start + end) / 2, middle, (start + end) / 2, start)
    usual = _chosen(_placed(plan, Placement.V), vee, usual)
    return _chosen(_placed(plan, Placement.MIRRORED), mirrored, usual)


def _by_cost(model: ModelTable, plan: PlanTable) -> tuple[Array, Array, Array]:
    """(first, middle, last) of p > 1 ranks when a rank takes layers until their cost passes its share."""
    h, p = model.hidden, plan.pipeline
    layer = 4 * model.num_heads * model.qk_dim * h + model.ffn_matrices * h * model.ffn
    share = (model.num_layers + model.vocab * h / layer) / p
    first = np.minimum(np.floor(share) + 1, model.num_layers)
    before_last = np.minimum(np.floor(share * (p - 1)) + 1, model.num_layers)
    return first, (before_last - first) / np.maximum(p - 2, 1), model.num_layers - before_last
