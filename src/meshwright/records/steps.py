"""Whole steps of small models by the engine's own code, as a `training` point says: passes, clipping and update.

isolated    one process
concurrent  processes that each train a model of their own, at the same time: contention without communication
ddp         processes that hold everything; one all-reduce of all gradients
zero1       states divided over processes; gradients are scattered, weights gathered, once a step
fsdp        weights divided too; each layer is gathered twice and reduced once in each micro-batch
tensor      each layer's matrices divided, with sequence parallelism
pipeline    as many stages as processes, 1F1B
"""

from __future__ import annotations

from meshwright import runfile
from meshwright.records.points import Point
from meshwright.specs.plan import Plan, Sharding
from meshwright.specs.run import Run

RECIPES = {"fp32": "fp32", "bf16": "bf16"}
"""The precision that multiplies in a format."""


def plan_of(point: Point) -> Plan:
    """The plan that a point is trained under."""
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


def run_of(point: Point) -> Run:
    """The run whose step a point is."""
    return runfile.loads(run_file_of(point))


def run_file_of(point: Point) -> str:
    """The same as the text of a run file."""
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
