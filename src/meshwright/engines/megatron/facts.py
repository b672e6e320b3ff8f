"""Facts about Megatron-Core 0.16 for the planner."""

from __future__ import annotations

from meshwright.planner.engines import EngineFacts
from meshwright.specs.plan import Recompute, Schedule, Sharding

FACTS = EngineFacts(
    title="megatron 0.16",
    stack="megatron-bridge",
    schedules=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
    shardings=(Sharding.NONE, Sharding.OPTIMIZER, Sharding.PARAMETERS),
    recomputes=tuple(Recompute),
    selective=None,
    partial_full=True,
    uneven_layers=True,
    any_vocabulary=True,  # padded
    repeats_kv_heads=True,
    any_replicas=True,
    configurations=(".args", ".sh", ".yaml"),
    source="megatron-core 0.16.1: transformer/transformer_config.py, pipeline_parallel/schedules.py",
)
