"""A run that MaxText cannot do is refused with the key and the reason; MaxText is not needed to say so."""

from __future__ import annotations

from tests.every_member import check_every

ENGINE = "maxtext"
LATENT = """model={hidden: 64, num_layers: 3, vocab: 512, ffn_hidden: 96, norm_epsilon: 1.0e-6,
attention: {kind: mla, num_heads: 4, head_dim: 24, value_head_dim: 16, kv_lora_rank: 16, rope_head_dim: 8},
experts: {num_experts: 8, top_k: 2, ffn_hidden: 32, num_shared: 1, num_dense_layers: 1, router: sigmoid}}"""
GPT_OSS = """model={family: GptOssForCausalLM, activation: clamped_swiglu, hidden: 64, num_layers: 4, vocab: 512,
attention: {num_heads: 4, num_kv_heads: 2, bias: true, window: 32, window_pattern: [true, false], sinks: true},
experts: {num_experts: 4, top_k: 2, ffn_hidden: 32, bias: true}}"""


def test_a_plain_run_is_accepted(refused):
    assert refused() == []
    assert refused("mixture") == []
    assert refused("plan: data_shard: 2, tensor: 2, pipeline: 2, schedule: gpipe, sharding: parameters") == []
    assert refused("mixture", "plan: data_shard: 4, expert: 4, sharding: parameters") == []
    assert refused("plan: data_shard: 4, sharding: optimizer", "precision=bf16") == []
    assert refused("task=lora", "plan: data_shard: 2, tensor: 2, sharding: parameters") == []
    assert refused(LATENT, "plan: data_shard: 4, expert: 2, sharding: parameters") == []
    assert refused(LATENT, "model.rope={scaling: yarn, factor: 4, original_context: 128}") == []
    assert refused("model=deepseek-v2-lite", "data.sequence_length=4096") == []
    assert refused("model=kimi-k2", "data.sequence_length=4096") == []
    assert refused("model=gpt-oss-20b", "data.sequence_length=4096") == []
    assert refused(GPT_OSS, "plan: data_shard: 4, expert: 2, sharding: parameters") == []
    assert refused("train.evaluate={target_loss: 1.5}", "data.validation=v.txt") == []
    assert refused("optimizer={schedule: wsd, decay_shape: cosine}") == []
    assert refused("precision=bf16", "optimizer.master_weights=false") == []


REFUSED = [
    ("precision: fp8 is not lowered", ["precision=fp8"]),
    ("optimizer.states", ["optimizer.states=bf16"]),
    ("optimizer.master_weights: weights of fp32", ["precision=fp32", "optimizer.master_weights=false"]),
    ("optimizer.schedule: the engine has no polynomial", ["optimizer.schedule=polynomial"]),
    ("optimizer.decay_shape", ["optimizer={schedule: wsd, decay_shape: sqrt}"]),
    ("train.trackers", ["train.trackers=[tensorboard]"]),
    ("lora.dropout", ["task=lora", "lora.dropout=0.1"]),
    ("lora.base_format", ["task=lora", "lora.base_format=nf4"]),
    ("lora.targets: experts", ["mixture", "task=lora", "lora.targets=[query, up]"]),
    ("parallel.pipeline: MaxText finds", ["task=lora", "plan: pipeline: 2, schedule: gpipe"]),
    ("model: biases in attention", ["model.attention.bias=true"]),
    ("model: YARN's factor must be a whole number",
     ["model.rope={scaling: yarn, factor: 2.5, original_context: 128}"]),
    ("model: YARN's mscale and mscale_all_dims",
     ["model.rope={scaling: yarn, factor: 4, original_context: 128, mscale: 1, mscale_all_dims: 0.7}"]),
    ("model: RoPE scaling llama3 must have",
     ["model.rope={scaling: llama3, factor: 32, original_context: 8192}"]),
    ("model.num_mtp_layers: multi-token prediction", ["model=deepseek-v3"]),
    ("model: groups of experts under softmax scores", ["model=deepseek-v2"]),
    ("model: latent attention without experts", [LATENT, "model.experts.num_shared=0"]),
    ("model: sigmoid scores that are not normalised", [LATENT, "model.experts.normalize_top_k=false"]),
    ("model: normalised softmax scores with shared experts", [LATENT, "model.experts.router=softmax"]),
    ("model: groups of one expert", [LATENT, "model.experts.num_groups=8", "model.experts.groups_per_token=4"]),
    ("model: MaxText normalises latents with the model's norm_epsilon", [LATENT, "model.norm_epsilon=1.0e-5"]),
    ("model: RoPE scaling llama3 is not lowered",
     [LATENT, "model.rope={scaling: llama3, factor: 8, original_context: 8192}"]),
    ("model: sigmoid scores without latent attention", ["mixture", "model.experts.router=sigmoid"]),
    ("model: attention.window_pattern of inline is (true,)", [GPT_OSS, "model.attention.window_pattern=[true]"]),
    ("model: attention.sinks of inline is false", [GPT_OSS, "model.attention.sinks=false"]),
    ("model: an odd number of layers", [GPT_OSS, "model.num_layers=3"]),
    ("model: the family GPT-OSS without biases", [GPT_OSS, "model.attention.bias=false"]),
    ("model: sliding windows", ["model.attention.window=32", "model.attention.num_windowed_layers=4"]),
    ("lora.targets: adapters of modules with biases", [GPT_OSS, "task=lora", "lora.targets=[query]"]),
    ("parallel: MaxText's blocks of layers with windows", [GPT_OSS, "plan: pipeline: 2, schedule: gpipe"]),
    ("lora.targets: adapters under latent attention", [LATENT, "task=lora", "lora.targets=[query]"]),
    ("parallel: under latent attention MaxText runs dense layers", [LATENT, "plan: pipeline: 3, schedule: gpipe"]),
    ("parallel: under latent attention MaxText's policies",
     [LATENT, "plan: recompute: {modules: [norm, activation]}"]),
    ("parallel.sharding: maxtext 0.2.5 does not shard gradients" , ["plan: sharding: gradients"]),
    ("parallel.tensor: tensor 4 does not divide 2 key/value heads", ["plan: tensor: 4"]),
    ("parallel: maxtext 0.2.5 has no 1f1b schedule", ["plan: pipeline: 2, schedule: 1f1b"]),
    ("parallel: maxtext 0.2.5 has no recomputation 'none'", ["plan: recompute: none"]),
    ("parallel: maxtext 0.2.5 cannot recompute", ["plan: recompute: {modules: [mlp]}"]),
    ("parallel.sharding: MaxText shards weights", ["plan: context: 2"]),
    ("parallel.sharding: MaxText rounds weights", ["precision=fp32", "plan: data_shard: 2, sharding: optimizer"]),
    ("parallel: MaxText's expert axis",
     ["mixture", "plan: data_shard: 2, tensor: 2, expert: 2, sharding: parameters"]),
    ("parallel.sequence_parallel", ["mixture", "plan: tensor: 2, expert_tensor: 2"]),
]  # fmt: skip


def test_what_it_cannot_do_is_refused_with_the_key(refused):
    def check(key, overrides):
        problems = [problem.lower() for problem in refused(*overrides)]
        assert any(problem.startswith(key.lower()) for problem in problems), problems

    check_every(REFUSED, lambda case: check(*case))
