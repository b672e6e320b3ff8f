"""What MaxText cannot do is refused with the key and the reason; MaxText is not needed to say so."""

from __future__ import annotations

import pytest

ENGINE = "maxtext"


def test_a_plain_run_is_accepted(refused):
    assert refused() == []
    assert refused("mixture") == []
    assert refused("plan: data_shard: 2, tensor: 2, pipeline: 2, schedule: gpipe, sharding: parameters") == []
    assert refused("mixture", "plan: data_shard: 4, expert: 4, sharding: parameters") == []
    assert refused("plan: data_shard: 4, sharding: optimizer", "precision=bf16") == []
    assert refused("task=lora", "plan: data_shard: 2, tensor: 2, sharding: parameters") == []
    assert refused("train.evaluate={target_loss: 1.5}", "data.validation=v.txt") == []


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("precision: fp8 is not lowered", ["precision=fp8"]),
        ("optimizer.states", ["optimizer.states=bf16"]),
        ("train.trackers", ["train.trackers=[tensorboard]"]),
        ("lora.dropout", ["task=lora", "lora.dropout=0.1"]),
        ("lora.base_format", ["task=lora", "lora.base_format=nf4"]),
        ("lora.targets: experts", ["mixture", "task=lora", "lora.targets=[query, up]"]),
        ("parallel.pipeline: adapters", ["task=lora", "plan: pipeline: 2, schedule: gpipe"]),
        ("model: biases in attention", ["model.attention.bias=true"]),
        ("model: rotary frequencies stretched by yarn",
         ["model.rope={scaling: yarn, factor: 4, original_context: 128}"]),
        ("model: rotary frequencies are stretched as Llama 3.1 does",
         ["model.rope={scaling: llama3, factor: 32, original_context: 8192}"]),
        ("model: latent attention", ["model=deepseek-v2-lite"]),
        ("model: shared experts", ["model=deepseek-v2-lite"]),
        ("parallel: MaxText 0.2.5 does not shard gradients" , ["plan: sharding: gradients"]),
        ("parallel: tensor 4 does not divide 2 key/value heads", ["plan: tensor: 4"]),
        ("parallel: maxtext 0.2.5 has no 1f1b schedule", ["plan: pipeline: 2, schedule: 1f1b"]),
        ("parallel: maxtext 0.2.5 has no recomputation 'none'", ["plan: recompute: none"]),
        ("parallel: maxtext 0.2.5 cannot recompute", ["plan: recompute: {modules: [mlp]}"]),
        ("parallel.sharding: MaxText shards weights", ["plan: context: 2"]),
        ("parallel.sharding: MaxText rounds weights", ["precision=fp32", "plan: data_shard: 2, sharding: optimizer"]),
        ("parallel: MaxText's expert axis",
         ["mixture", "plan: data_shard: 2, tensor: 2, expert: 2, sharding: parameters"]),
        ("parallel.sequence_parallel", ["mixture", "plan: tensor: 2, expert_tensor: 2"]),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_with_the_key(refused, key, overrides):
    told = [problem.lower() for problem in refused(*overrides)]
    assert any(problem.startswith(key.lower()) for problem in told), told
