"""What torchtitan 0.3.0 cannot do is refused with the key and the reason; torchtitan is not needed to say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import runfile
from meshwright.engines.base import find_engine
from meshwright.errors import InputError

BASE = """
model: {hidden: 64, num_layers: 4, vocab: 512, ffn_hidden: 128, attention: {num_heads: 4, num_kv_heads: 2}}
data: {sequence_length: 256}
batch: {global_sequences: 16}
cluster: here
train: {steps: 10}
"""
MIXTURE = """model={hidden: 64, num_layers: 4, vocab: 512,
attention: {num_heads: 4, num_kv_heads: 2, qk_norm: true}, experts: {num_experts: 4, top_k: 2, ffn_hidden: 32}}"""


def plan(words: str) -> str:
    """An override that pins a plan of one data rank, not sharded where `words` do not say."""
    return f"parallel={{data_shard: 1, {words if 'sharding' in words else words + ', sharding: none'}}}"


def refused(*overrides: str) -> list[str]:
    run = runfile.loads(BASE, overrides=overrides)
    return [str(problem) for problem in find_engine("torchtitan").check(run)]


def test_a_plain_run_is_accepted():
    assert refused() == []
    assert refused("parallel={data_shard: 2, tensor: 2, pipeline: 2, sharding: parameters}") == []
    assert refused(MIXTURE, "parallel={data_shard: 4, expert: 4, sharding: parameters}") == []
    assert refused(MIXTURE, "precision=fp32") == []
    assert refused(MIXTURE, plan("tensor: 2, sequence_parallel: false")) == []
    assert refused(MIXTURE, plan("tensor: 2"), "batch.micro=2") == []
    assert refused("task=lora") == []


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("precision: nvfp4", ["precision=nvfp4"]),
        ("precision: GPT-OSS's experts of torchtitan", ["model=gpt-oss-20b", "precision=fp32"]),
        ("optimizer.states", ["optimizer.states=int8"]),
        ("train.z_loss", ["train.z_loss=0.001"]),
        ("train.balance_loss", [MIXTURE, "train.balance_loss=0.01"]),
        ("train.balance_bias_rate", ["train.balance_bias_rate=0.1"]),
        ("train.faults.spike", ["train.faults.spike=stop"]),
        ("train.faults.not_finite", ["train.faults.not_finite=skip"]),
        ("train.checkpoint.keep", ["train.checkpoint={folder: c, keep: 1}"]),
        ("train.evaluate.every_steps", ["train.evaluate.every_steps=3", "data.validation=v.txt"]),
        ("train.evaluate.target_loss", ["train.evaluate={every_steps: 5, target_loss: 2.0}"]),
        ("train.evaluate.workers", ["train.evaluate={every_steps: 5, workers: 2}"]),
        ("train.trackers", ["train.trackers=[mlflow]"]),
        ("data.workers", ["data.workers=2"]),
        ("gemm_tuning", ["gemm_tuning=tuned.csv"]),
        ("train: says neither", ["train.steps=null"]),
        ("lora.targets", ["task=lora", "lora.targets=[query, key]"]),
        ("lora.dropout", ["task=lora", "lora.dropout=0.1"]),
        ("lora.base_format", ["task=lora", "lora.base_format=nf4"]),
        ("model: torchtitan 0.3.0 has no model", ["model.attention.bias=true"]),
        ("model: rotary", ["model.rope={scaling: yarn, factor: 4, original_context: 128}"]),
        ("parallel: torchtitan 0.3.0 does not shard optimizer", [plan("sharding: optimizer")]),
        ("parallel: tensor 4 does not divide 2 key/value heads", [plan("tensor: 4")]),
        ("parallel: torchtitan 0.3.0 has no zero_bubble", [plan("pipeline: 2, schedule: zero_bubble")]),
        ("parallel: context 4", ["data.sequence_length=640", plan("context: 4")]),
        ("parallel: torchtitan 0.3.0 cannot recompute", [plan("recompute: {modules: [mlp]}")]),
        ("parallel.recompute.layers", [plan("recompute: {layers: 2}")]),
        ("parallel.offload", [plan("offload: optimizer")]),
        ("parallel.sequence_parallel: experts get wrong gradients", [MIXTURE, plan("tensor: 2")]),
        ("parallel.pipeline: tied", ["model.tied_embeddings=true", plan("pipeline: 2")]),
        ("parallel.pipeline: every stage", [plan("pipeline: 2, virtual_pipeline: 3, schedule: interleaved")]),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_key(key, overrides):
    assert any(problem.startswith(key) for problem in refused(*overrides)), refused(*overrides)


def test_nothing_is_lowered_that_is_refused():
    run = runfile.loads(BASE, overrides=["parallel={data_shard: 2}"])
    with pytest.raises(InputError, match="the torchtitan engine cannot do this run: parallel"):
        find_engine("torchtitan").lower(run, folder=Path("out"))
