"""Tokens of the busiest expert rank over the mean of all ranks.

    balanced   1
    uneven     min(imbalance, expert, num_experts / top_k)
    capacity   its factor, on every rank
    padded     min(imbalance, num_experts / top_k) where all experts of a rank compute as many rows as its busiest

No rank receives more than all tokens, which is `expert` times the mean, and no token chooses an expert twice, so that
an expert receives at most `num_experts / top_k` times the mean. A rank with all experts is therefore always balanced.
"""

from __future__ import annotations

import numpy as np

from meshwright.arrays import Array
from meshwright.catalog.stacks import PADS_TO_CAPACITY
from meshwright.cost.tables import ModelTable, PlanTable


def busiest_rank_ratio(model: ModelTable, plan: PlanTable, *, stated: Array, is_padded: Array) -> Array:
    """Return the ratio. `stated`: the imbalance, or the capacity as `is_padded` (`StackFacts.pads_experts`) has it."""
    of_experts = np.maximum(model.num_experts / np.maximum(model.top_k, 1), 1.0)
    most = np.where(is_padded > 0, of_experts, np.minimum(plan.expert, of_experts))
    return np.where(is_padded == PADS_TO_CAPACITY, stated, np.minimum(stated, most))
