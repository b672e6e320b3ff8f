"""Values that a row does not state, where the usual ones would not fit the memory of its device: the run did.

    width of hybrid sharding   all data-parallel ranks instead of those of a node
    sharding not stated        of parameters, where a trainer without rows of its own only has data-parallel ranks
    micro-batch not stated     1 instead of the whole batch of a replica
    recomputation not stated   full instead of none

Dense models only: mixtures of experts recompute single modules, and which ones memory does not tell. Rows that offload
activations are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from meshwright.accuracy.conditions import RunConditions
from meshwright.accuracy.layout import IN_NODES, OFFLOADED, USUAL_SHARDING, WHOLE_BATCH
from meshwright.accuracy.recomputation import NO_RECOMPUTATION
from meshwright.accuracy.tables import memory_of, tables_of
from meshwright.specs.plan import Plan, Recompute, Sharding

CANNOT_BE = 1.4
"""Reserved bytes over the device's memory from which the usual value cannot have been: 1.23 was the largest factor that
has been predicted for GPU runs whose code is known to recompute nothing."""

Row = tuple[RunConditions | None, tuple[str, ...]]
"""Conditions of a row, None where it has none, and the notes on their assumptions."""


def with_what_fits(rows: Sequence[Row]) -> list[Row]:
    """`rows` with the plans that fit, where the usual ones do not, and a note on each."""
    changed = _changed(
        rows,
        IN_NODES,
        lambda plan: replace(plan, data_shard=plan.data_shard * plan.data_replicate, data_replicate=1),
        limit=1.0,
        note="parameters sharded over all data-parallel ranks: those of a node do not hold them",
    )
    changed = _changed(
        changed,
        USUAL_SHARDING,
        lambda plan: replace(plan, sharding=Sharding.PARAMETERS),
        limit=1.0,
        note="sharding parameters: with whole copies it does not fit",
        where=_may_shard_more,
    )
    changed = _changed(
        changed,
        WHOLE_BATCH,
        lambda plan: replace(plan, micro_batch=1),
        limit=1.0,
        note="micro-batch 1: a replica's whole batch does not fit",
    )
    return _changed(
        changed,
        NO_RECOMPUTATION,
        lambda plan: replace(plan, recompute=Recompute.FULL),
        limit=CANNOT_BE,
        note="full recomputation: without any it does not fit",
    )


def _may_shard_more(conditions: RunConditions) -> bool:
    """True if the trainer is one that is known by its examples only, and every rank is a data-parallel one."""
    plan = conditions.plan
    is_whole = plan.tensor * plan.pipeline == 1 and plan.sharding is not Sharding.PARAMETERS
    return is_whole and conditions.stack.framework == "other"


def _changed(
    rows: Sequence[Row],
    assumed: str,
    change: Callable[[Plan], Plan],
    *,
    limit: float,
    note: str,
    where: Callable[[RunConditions], bool] = lambda _: True,
) -> list[Row]:
    """Rows with a note that begins with `assumed`, `where`, and which need more than `limit` times the memory, changed.

    `change` and `note` take the place of their plan and of that note.
    """
    asked = [
        (i, c, notes)
        for i, (c, notes) in enumerate(rows)
        if c is not None
        and any(n.startswith(assumed) for n in notes)
        and OFFLOADED not in notes
        and c.model.experts is None
        and where(c)
    ]
    result = list(rows)
    if not asked:
        return result
    conditions = [c for _, c, _ in asked]
    tables = tables_of(conditions)
    share = np.asarray(memory_of(conditions, tables).reserved_bytes) / np.asarray(tables.facts.memory_bytes)
    for (i, c, notes), of_memory in zip(asked, share, strict=True):
        if of_memory > limit:
            result[i] = (replace(c, plan=change(c.plan)), tuple(note if n.startswith(assumed) else n for n in notes))
    return result
