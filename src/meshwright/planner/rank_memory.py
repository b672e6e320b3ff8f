"""Memory of every pipeline rank of one plan."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from meshwright.arrays import scalar
from meshwright.cost.memory import MemoryTable, memory_parts
from meshwright.cost.memory.peak import MomentsTable, rank_memory, usual_ranks
from meshwright.cost.pipeline.schedules import SCHEDULE_RECORDS, Placement
from meshwright.cost.tables import plan_row
from meshwright.planner.generations import layers_of_ranks
from meshwright.planner.request import PlanRequest
from meshwright.specs.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of a device of one pipeline rank by part; their sum is what it must have."""

    rank: int
    num_layers: float  # in all its stages; those of a mirrored rank in both directions
    parts_bytes: dict[str, float]
    reserved_bytes: float


def memory_of_ranks(request: PlanRequest, plan: Plan) -> list[RankMemory]:
    """Return the memory of every pipeline rank, the first one first.

    Mirrored ranks, and those of stacks that split layers by cost, hold a mean number of layers between the ends.
    """
    facts = _facts(request, plan)
    ranks, layers = np.arange(plan.pipeline), facts["layers"]
    memory, _ = rank_memory(rank=ranks, **facts)
    columns = {f.name: np.broadcast_to(getattr(memory, f.name), ranks.shape) for f in fields(MemoryTable)}
    table = MemoryTable(**columns)
    num_stages = SCHEDULE_RECORDS[plan.schedule].stages_held if plan.pipeline > 1 else 1
    num_layers = np.asarray(layers.total) * num_stages
    return [_of_rank(table.take(ranks[[rank]]), rank, float(num_layers[rank])) for rank in range(plan.pipeline)]


def moments_of_rank(request: PlanRequest, plan: Plan, rank: int) -> MomentsTable:
    """Return the memory of one pipeline rank that comes and goes during a step: numbers, not columns."""
    _, found = rank_memory(rank=np.arange(plan.pipeline), **_facts(request, plan))
    columns = {f.name: np.broadcast_to(getattr(found, f.name), plan.pipeline) for f in fields(MomentsTable)}
    return MomentsTable(**{name: float(column[rank]) for name, column in columns.items()})


def _facts(request: PlanRequest, plan: Plan) -> dict[str, Any]:
    """Arguments of `rank_memory` for all ranks of a plan."""
    constants, row, in_flight = request.memory_constants, plan_row(plan), None
    is_mirrored = SCHEDULE_RECORDS[plan.schedule].placement is Placement.MIRRORED
    if plan.pipeline > 1 and (is_mirrored or constants.splits_by_cost):
        layers, in_flight = usual_ranks(request.model_table, row, constants)
    else:
        layers = layers_of_ranks(request, plan)
    return {
        "model": request.model_table,
        "batch": request.batch_table,
        "plan": row,
        "precision": request.precision_table,
        "constants": constants,
        "layers": layers,
        "in_flight": in_flight,
    }


def _of_rank(memory: MemoryTable, rank: int, num_layers: float) -> RankMemory:
    return RankMemory(
        rank=rank, num_layers=num_layers, parts_bytes=memory_parts(memory), reserved_bytes=scalar(memory.reserved_bytes)
    )
