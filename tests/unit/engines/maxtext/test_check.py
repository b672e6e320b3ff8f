"""What MaxText cannot do is refused with the key and the reason; MaxText is not needed to say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import runfile
from meshwright.engines.maxtext import contract
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
    """An override that pins a plan of one data rank, recomputed and not sharded where `words` do not say."""
    given = {"data_shard: 1", "sharding: none", "recompute: full", *words.split("; ")}
    said = {word.partition(":")[0] for word in words.split("; ")}
    kept = sorted(g for g in given if g in words.split("; ") or g.partition(":")[0] not in said)
    return f"parallel={{{', '.join(kept)}}}"


def refused(*overrides: str) -> list[str]:
    run = runfile.loads(BASE, overrides=overrides)
    return [str(problem) for problem in contract.check(run)]


def test_a_plain_run_is_accepted():
    assert refused() == []
    assert refused(MIXTURE) == []
    assert refused(plan("data_shard: 2; tensor: 2; pipeline: 2; schedule: gpipe; sharding: parameters")) == []
    assert refused(MIXTURE, plan("data_shard: 4; expert: 4; sharding: parameters")) == []
    assert refused(plan("data_shard: 4; sharding: optimizer"), "precision=bf16") == []


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("precision: fp8 is not lowered", ["precision=fp8"]),
        ("optimizer.states", ["optimizer.states=bf16"]),
        ("train.z_loss", ["train.z_loss=0.001"]),
        ("train.balance_loss", [MIXTURE, "train.balance_loss=0.01"]),
        ("train.balance_bias_rate", ["train.balance_bias_rate=0.1"]),
        ("train.faults.spike", ["train.faults.spike=stop"]),
        ("train.faults.not_finite", ["train.faults.not_finite=skip"]),
        ("train.trackers", ["train.trackers=[tensorboard]"]),
        ("train.evaluate", ["train.evaluate={every_steps: 5}"]),
        ("data.workers", ["data.workers=2"]),
        ("gemm_tuning", ["gemm_tuning=tuned.csv"]),
        ("train: says neither", ["train.steps=null"]),
        ("lora", ["task=lora"]),
        ("model: biases in attention", ["model.attention.bias=true"]),
        ("model: rotary frequencies stretched by yarn",
         ["model.rope={scaling: yarn, factor: 4, original_context: 128}"]),
        ("model: rotary frequencies are stretched as Llama 3.1 does",
         ["model.rope={scaling: llama3, factor: 32, original_context: 8192}"]),
        ("model: latent attention", ["model=deepseek-v2-lite"]),
        ("model: shared experts", ["model=deepseek-v2-lite"]),
        ("parallel: MaxText 0.2.5 does not shard gradients" , [plan("sharding: gradients")]),
        ("parallel: tensor 4 does not divide 2 key/value heads", [plan("tensor: 4")]),
        ("parallel: maxtext 0.2.5 has no 1f1b schedule", [plan("pipeline: 2; schedule: 1f1b")]),
        ("parallel: maxtext 0.2.5 has no recomputation 'none'", [plan("recompute: none")]),
        ("parallel: maxtext 0.2.5 cannot recompute", [plan("recompute: {modules: [mlp]}")]),
        ("parallel.recompute.layers", [plan("recompute: {layers: 2}")]),
        ("parallel.offload", [plan("offload: optimizer")]),
        ("parallel.sharding: MaxText shards weights", [plan("context: 2")]),
        ("parallel.sharding: MaxText rounds weights", ["precision=fp32", plan("data_shard: 2; sharding: optimizer")]),
        ("parallel: MaxText's expert axis",
         [MIXTURE, plan("data_shard: 2; tensor: 2; expert: 2; sharding: parameters")]),
        ("parallel.sequence_parallel", [MIXTURE, plan("tensor: 2; expert_tensor: 2")]),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_with_the_key(key, overrides):
    told = [problem.lower() for problem in refused(*overrides)]
    assert any(problem.startswith(key.lower()) for problem in told), told


def test_nothing_is_lowered_that_is_refused():
    run = runfile.loads(BASE, overrides=["parallel={data_shard: 2, sharding: gradients}"])
    with pytest.raises(InputError, match="the maxtext engine cannot do this run: parallel"):
        contract.lower(run, folder=Path("out"))
