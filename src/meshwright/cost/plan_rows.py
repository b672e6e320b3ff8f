"""Plans of rows of a `PlanTable`: the inverse of `tables.plan_row`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.cost.pipeline.schedules import rank_layers, shape_of
from meshwright.cost.tables import RECOMPUTES, PlanTable, WeightCache
from meshwright.specs.plan import (
    ALL_TOKENS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    STORED_MODULES,
    AxisOrder,
    Offload,
    Plan,
    Sharding,
)


def plan_from_row(row: PlanTable, *, splits: Sequence[tuple[int, ...]] = ()) -> Plan:
    """The inverse of `plan_row` for a table of one row.

    `splits`: layers of each stage that uneven rows may have. Raises ValueError for an uneven row with none of them.
    """
    plan = _usual_plan(row)
    if int(row.first_layers) < 0:
        return plan
    shape = shape_of(plan)
    own = tuple(int(x) for x in (row.first_layers, row.middle_layers, row.last_layers, row.fewest_layers))
    for split in splits:
        if len(split) == shape.num_stages and (*rank_layers(shape, split), min(split)) == own:
            return replace(plan, layers_per_stage=split)
    raise ValueError(f"no split has {own} layers on the first, the fullest middle, the last rank and the least stage")


def _usual_plan(row: PlanTable) -> Plan:
    mask = int(row.recompute_mask)
    return Plan(
        tensor=int(row.tensor),
        sequence_parallel=bool(row.sequence_parallel),
        context=int(row.context),
        pipeline=int(row.pipeline),
        virtual_pipeline=int(row.virtual_pipeline),
        expert=int(row.expert),
        expert_tensor=int(row.expert_tensor),
        data_shard=int(row.data_shard),
        data_replicate=int(row.data_replicate),
        sharding=Sharding(int(row.sharding)),
        micro_batch=int(row.micro_batch),
        schedule=SCHEDULES[int(row.schedule)],
        recompute=RECOMPUTES[int(row.recompute)],
        recompute_modules=_bits(RECOMPUTE_MODULES, mask) or (),
        recompute_layers=None if int(row.recompute_layers) < 0 else int(row.recompute_layers),
        offload=Offload.OPTIMIZER if row.offload_optimizer else Offload.NONE,
        axis_order=AxisOrder.DATA_OUTERMOST if row.data_outermost else AxisOrder.PIPELINE_OUTERMOST,
        stored_activations=_bits(STORED_MODULES, int(row.stored_mask)),
        weight_cache=None if int(row.weight_cache) < 0 else WeightCache(int(row.weight_cache)).name.lower(),
        loss_chunk=_chunk_of(int(row.loss_chunk)),
    )


def _bits(names: Sequence[str], mask: int) -> tuple[str, ...] | None:
    """Return the `names` whose bit is set; None for a mask of -1."""
    return None if mask < 0 else tuple(name for i, name in enumerate(names) if mask >> i & 1)


def _chunk_of(column: int) -> int | str | None:
    if column < 0:
        return None
    return column or ALL_TOKENS
