"""Whole steps of small models by the engine's own code, for `training` points: passes, clipping and update.

docs/reference/bench-records.md has the plan of each kernel.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright import runfile
from meshwright.records.points import Point
from meshwright.specs.plan import Plan, Sharding
from meshwright.specs.run import Run

SHARDINGS = {"ddp": Sharding.NONE, "zero1": Sharding.OPTIMIZER, "fsdp": Sharding.PARAMETERS}
"""Sharding of kernels whose processes have parts of the data."""


def plan_of(point: Point) -> Plan:
    """Plan of a point."""
    n, micro_batch = point.num_processes, point.sequences
    if point.kernel in SHARDINGS:
        return Plan(data_shard=n, sharding=SHARDINGS[point.kernel], micro_batch=micro_batch)
    if point.kernel == "tensor":
        return Plan(tensor=n, micro_batch=micro_batch)
    return Plan(pipeline=n if point.kernel == "pipeline" else 1, micro_batch=micro_batch)


@lru_cache(maxsize=1024)
def run_of(point: Point) -> Run:
    """Run whose step a point measures. Fits ask for the same few again and again, and reading takes milliseconds."""
    return runfile.loads(run_file_of(point))


def run_file_of(point: Point) -> str:
    """Text of the run file of `run_of`."""
    return f"""
model:
  name: {point.layers} layers of {point.m}
  family: LlamaForCausalLM
  hidden: {point.m}
  num_layers: {point.layers}
  vocab: {point.vocab}
  ffn_hidden: {point.n}
  attention: {{num_heads: {point.heads}, num_kv_heads: {point.kv_heads}, head_dim: {point.head_dim}}}
data: {{source: synthetic, sequence_length: {point.seq_len}}}
batch: {{global_sequences: {point.sequences * point.micro_batches}, micro: {point.sequences}}}
precision: {point.format}
cluster: here
train: {{steps: 1}}
"""
