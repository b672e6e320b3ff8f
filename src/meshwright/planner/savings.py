"""Choices of kernels that save memory and cost time: activations stored in 8 bits, no cache of 8-bit weights.

They are no axes of the table of choices, which they would make seven times as long. A plan that fits does not need
them, and with them it takes longer: casts come on top. So they are tried for plans that do not fit, and of the sets of
savings with which a plan fits those stay that contain no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Array, FloatArray
from meshwright.cost.memory import MemoryTable
from meshwright.cost.tables import STORED_BYTES, PlanTable, cache_column, stored_column
from meshwright.planner.space import Space, stacked
from meshwright.specs.memory_budget import MemoryBudget
from meshwright.specs.plan import ALL_TOKENS, Plan
from meshwright.specs.run import PLANNED_FORMAT


def note_on_savings(plan: Plan) -> str | None:
    """A sentence on the numbers and casts that `plan` changes to fit; None where it changes none."""
    notes = []
    if plan.stored_activations:
        notes.append(
            f"8bit: activations of {' and '.join(plan.stored_activations)} are kept as {PLANNED_FORMAT} for the "
            "backward pass, which rounds gradients (--fix stored_activations=none: plans without)"
        )
    if plan.weight_cache == "off":
        notes.append("cache=off: 8-bit weights are cast at each use (--fix weight_cache=on: plans with a cache)")
    return "; ".join(notes) or None


def note_on_loss(plan: Plan) -> str | None:
    """A sentence on the chunk of the loss that `plan` states; None where it is the engine's own."""
    if plan.loss_chunk is None:
        return None
    tokens = "all" if plan.loss_chunk == ALL_TOKENS else f"{plan.loss_chunk:,}"
    return (
        f"loss={plan.loss_chunk}: logits of {tokens} tokens of a micro-batch are in memory at once, so the sum of the "
        "head's weight gradient moves less often (--fix loss_chunk=auto: the engine's own chunk)"
    )


ROUNDING_WORTH = 1.01
"""A plan that rounds what it keeps must be better by this factor than one that does not.

A gain below one percent is within what the cost model tells plans apart by, and rounded gradients are certain.
"""


def ranking_value(value: FloatArray, stored_mask: Array) -> FloatArray:
    """Objective values by which plans are ranked: those that store activations in 8 bits count as one percent worse."""
    return value * np.where(np.asarray(stored_mask) > 0, ROUNDING_WORTH, 1.0)


def rank_of(plan: Plan, value: float) -> float:
    """The same of one plan."""
    return value * (ROUNDING_WORTH if plan.stored_activations else 1.0)


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One set of savings as columns of a plan table. `members`: what it does beyond the space's first choices."""

    stored_mask: int
    weight_cache: int
    members: frozenset[str]

    def applied(self, plan: PlanTable) -> PlanTable:
        """The same plans with these savings."""
        one = np.ones_like(plan.tensor)
        return replace(plan, stored_mask=one * self.stored_mask, weight_cache=one * self.weight_cache)


def savings(space: Space) -> tuple[Saving, ...]:
    """All sets of savings of a space, smaller ones first; the last one has all."""
    found = [
        Saving(
            stored_mask=stored_column(stored),
            weight_cache=cache_column(cache),
            members=frozenset((stored or ()) if i else ()) | ({"weight cache"} if j else set()),
        )
        for i, stored in enumerate(space.stored_activations)
        for j, cache in enumerate(space.weight_cache)
        if i or j
    ]
    return tuple(sorted(found, key=lambda s: len(s.members)))


def may_fit(
    memory: MemoryTable, budget: MemoryBudget, *, among: Sequence[Saving], element_bytes: float
) -> NDArray[np.bool_]:
    """False where no savings make a plan fit, whatever is stored: one pass in place of the whole memory model.

    `element_bytes`: of an activation as it is computed.
    """
    if not among:
        return np.zeros(np.shape(memory.allocated_bytes), dtype=bool)
    least = memory.allocated_bytes - (1 - STORED_BYTES / element_bytes) * memory.activations_bytes
    if any(saving.weight_cache >= 0 for saving in among):
        least = least - memory.weights_bytes
    return np.asarray(budget.fits(least))


def with_savings(plan: PlanTable, *, among: Sequence[Saving]) -> PlanTable:
    """Every plan with every set of savings: the plans with the first set, then with the next."""
    return stacked([saving.applied(plan) for saving in among])


def least_sets(fits: NDArray[np.bool_], *, among: Sequence[Saving]) -> NDArray[np.bool_]:
    """True for the rows of `with_savings` that fit while no smaller set of savings fits."""
    by_set = fits.reshape(len(among), -1)
    smaller = [[i for i, other in enumerate(among) if other.members < saving.members] for saving in among]
    return np.concatenate([by_set[i] & ~by_set[less].any(axis=0) for i, less in enumerate(smaller)])
