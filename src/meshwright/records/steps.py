"""Whole steps of small models by the engine's own code, for `training` points: passes, clipping and update.

isolated    one process
concurrent  processes that each train a model of their own, at the same time: contention without communication
ddp         every process holds all weights and states; one all-reduce of all gradients
zero1       optimizer states sharded; gradients are reduce-scattered and weights gathered once a step
fsdp        weights sharded too; each layer is gathered twice and reduced once in each micro-batch
tensor      each layer's matrices sharded, with sequence parallelism
pipeline    a stage in each process, 1F1B
"""

from __future__ import annotations

from functools import lru_cache

from meshwright import runfile
from meshwright.records.points import Point
from meshwright.specs.plan import Plan, Sharding
from meshwright.specs.run import Run

RECIPES = {"fp32": "fp32", "bf16": "bf16"}
"""Precision recipe of each number format."""


def plan_of(point: Point) -> Plan:
    """Plan of a point."""
    n, micro_batch = point.num_processes, point.sequences
    match point.kernel:
        case "ddp":
            return Plan(data_shard=n, sharding=Sharding.NONE, micro_batch=micro_batch)
        case "zero1":
            return Plan(data_shard=n, sharding=Sharding.OPTIMIZER, micro_batch=micro_batch)
        case "fsdp":
            return Plan(data_shard=n, sharding=Sharding.PARAMETERS, micro_batch=micro_batch)
        case "tensor":
            return Plan(tensor=n, micro_batch=micro_batch)
        case "pipeline":
            return Plan(pipeline=n, micro_batch=micro_batch)
        case _:
            return Plan(micro_batch=micro_batch)


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
precision: {RECIPES[point.format]}
cluster: here
train: {{steps: 1}}
"""
