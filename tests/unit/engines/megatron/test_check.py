"""What Megatron-Core 0.16 cannot do is refused with the key and the reason; Megatron is not needed to say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import runfile
from meshwright.engines.megatron import contract
from meshwright.errors import InputError

BASE = """
model: {hidden: 64, num_layers: 4, vocab: 512, ffn_hidden: 128, attention: {num_heads: 4, num_kv_heads: 2}}
data: {sequence_length: 256}
batch: {global_sequences: 16}
cluster: here
engine: megatron
train: {steps: 10}
"""
MIXTURE = """model={hidden: 64, num_layers: 4, vocab: 512,
attention: {num_heads: 4, num_kv_heads: 2, qk_norm: true}, experts: {num_experts: 4, top_k: 2, ffn_hidden: 32}}"""


def plan(words: str) -> str:
    """An override that pins a plan of one data rank, not sharded where `words` do not say."""
    return f"parallel={{data_shard: 1, {words if 'sharding' in words else words + ', sharding: none'}}}"


def refused(*overrides: str) -> list[str]:
    return [str(problem) for problem in contract.check(runfile.loads(BASE, overrides=overrides))]


def test_a_plain_run_is_accepted():
    assert refused() == []
    assert refused("parallel={data_shard: 2, tensor: 2, pipeline: 2, sharding: optimizer}") == []
    assert refused(MIXTURE, "parallel={data_shard: 4, expert: 4, sharding: optimizer}") == []
    for model in ("llama3.1-8b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b"):
        assert refused(f"model={model}") == []


def test_experts_that_every_tensor_rank_has_are_refused():
    assert refused(MIXTURE, plan("tensor: 2, expert: 2")) == []
    assert refused(MIXTURE, plan("tensor: 2, expert_tensor: 2")) == []
    (problem,) = refused(MIXTURE, plan("tensor: 2"))
    assert problem.startswith("parallel.expert_tensor: ")


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("model: latent attention", ["model=deepseek-v2-lite"]),
        ("model: attention sinks", ["model=gpt-oss-20b"]),
        ("precision: fp8", ["precision=fp8"]),
        ("optimizer.states", ["optimizer.states=bf16"]),
        ("train.z_loss", ["train.z_loss=0.001"]),
        ("train.balance_loss", [MIXTURE, "train.balance_loss=0.01"]),
        ("train.balance_bias_rate", ["train.balance_bias_rate=0.1"]),
        ("train.faults.spike", ["train.faults.spike=stop"]),
        ("train.faults.not_finite", ["train.faults.not_finite=skip"]),
        ("train.checkpoint.asynchronous", ["train.checkpoint={folder: c}"]),
        ("train.evaluate.target_loss", ["train.evaluate={target_loss: 2.0}", "data.validation=v.txt"]),
        ("train.evaluate.workers", ["train.evaluate={workers: 2}", "data.validation=v.txt"]),
        ("train.evaluate: random", ["train.evaluate={}"]),
        ("train.trackers", ["train.trackers=[tensorboard]"]),
        ("train.compile", ["train.compile=true"]),
        ("data.workers", ["data.workers=2"]),
        ("gemm_tuning", ["gemm_tuning=tuned.csv"]),
        ("train: says neither", ["train.steps=null"]),
        ("task", ["task=lora"]),
        ("parallel.context", [plan("context: 2")]),
        ("parallel.tensor: 4 does not divide the 2 key/value heads", [plan("tensor: 4")]),
        ("parallel: expert 2", ["parallel={data_shard: 2, expert: 2, sharding: none}"]),
        ("parallel: megatron 0.16 has no zbv", [plan("pipeline: 2, virtual_pipeline: 2, schedule: zbv")]),
        ("parallel.sharding", ["parallel={data_shard: 2, sharding: parameters}"]),
        ("parallel.data_replicate", ["parallel={data_shard: 2, data_replicate: 2, sharding: optimizer}"]),
        ("parallel.recompute", [plan("recompute: {modules: [alternate_matmuls]}")]),
    ],
)
def test_what_is_not_honoured_is_refused(key, overrides):
    assert any(problem.startswith(key) for problem in refused(*overrides)), refused(*overrides)


def test_what_is_refused_is_not_lowered():
    with pytest.raises(InputError, match=r"megatron engine cannot do this run: data\.workers"):
        contract.lower(runfile.loads(BASE, overrides=["data.workers=2"]), folder=Path("x"))
