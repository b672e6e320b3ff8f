"""Memory of every pipeline rank of one plan."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from meshwright.cost.memory import MemoryTable, memory_parts
from meshwright.cost.memory.peak import rank_memory, usual_ranks
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
    constants, row = request.memory_constants, plan_row(plan)
    record, in_flight = SCHEDULE_RECORDS[plan.schedule], None
    if plan.pipeline > 1 and (record.placement is Placement.MIRRORED or constants.splits_by_cost):
        layers, in_flight = usual_ranks(request.model_table, row, constants)
    else:
        layers = layers_of_ranks(request, plan)
    ranks = np.arange(plan.pipeline)
    memory = rank_memory(
        model=request.model_table,
        batch=request.batch_table,
        plan=row,
        precision=request.precision_table,
        constants=constants,
        layers=layers,
        rank=ranks,
        in_flight=in_flight,
    )
    columns = {f.name: np.broadcast_to(getattr(memory, f.name), ranks.shape) for f in fields(MemoryTable)}
    table = MemoryTable(**columns)
    num_layers = np.asarray(layers.total) * (record.stages_held if plan.pipeline > 1 else 1)
    return [_of_rank(table.take(ranks[[rank]]), rank, float(num_layers[rank])) for rank in range(plan.pipeline)]


def _of_rank(memory: MemoryTable, rank: int, num_layers: float) -> RankMemory:
    return RankMemory(
        rank=rank,
        num_layers=num_layers,
        parts_bytes=memory_parts(memory),
        reserved_bytes=float(np.ravel(memory.reserved_bytes)[0]),
    )
