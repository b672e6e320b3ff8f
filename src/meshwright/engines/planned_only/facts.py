"""Facts of `engine: any`: every choice of a plan that the cost model knows."""

from __future__ import annotations

from meshwright.planner.engines import EngineFacts
from meshwright.specs.plan import AxisOrder, Recompute, Schedule, Sharding

FACTS = EngineFacts(
    title="any engine",
    stack="megatron-bridge",
    stack_by_vendor=(("AMD", "primus-megatron"),),
    schedules=tuple(Schedule),
    shardings=tuple(Sharding),
    recomputes=tuple(Recompute),
    selective=None,
    partial_full=True,
    dense_activation=True,
    uneven_layers=True,
    any_vocabulary=True,
    repeats_kv_heads=True,
    any_replicas=True,
    whole_sequences=True,
    short_interleaving=True,
    narrow_states=True,
    updates_16_bits=True,
    offloads_optimizer=True,
    axis_orders=tuple(AxisOrder),
    source="no program: what the cost model has a formula for",
)
