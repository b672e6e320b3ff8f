"""A run that Megatron-Core 0.16 cannot do is refused with the key and the reason; Megatron is not needed to say so."""

from __future__ import annotations

from tests.every_member import check_every

ENGINE = "megatron"


def test_a_plain_run_is_accepted(refused):
    assert refused() == []
    assert refused("train.checkpoint={folder: c}") == []
    assert refused("parallel={data_shard: 2, tensor: 2, pipeline: 2, sharding: optimizer}") == []
    assert refused("mixture", "parallel={data_shard: 4, expert: 4, sharding: optimizer}") == []
    for model in ("llama3.1-8b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b"):
        assert refused(f"model={model}") == []
    assert refused("model=mixtral-8x7b", "train.balance_loss=0.01", "train.router_z_loss=0.001") == []


def test_experts_that_every_tensor_rank_has_are_refused(refused):
    assert refused("mixture", "plan: tensor: 2, expert: 2") == []
    assert refused("mixture", "plan: tensor: 2, expert_tensor: 2") == []
    (problem,) = refused("mixture", "plan: tensor: 2")
    assert problem.startswith("parallel.expert_tensor: ")


def test_what_is_not_honoured_is_refused(refused):
    def check(key, overrides):
        assert any(problem.startswith(key) for problem in refused(*overrides)), refused(*overrides)

    check_every(
        [
            ("model: latent attention", ["model=deepseek-v2-lite"]),
            ("model: attention.sinks of gpt-oss-20b is true", ["model=gpt-oss-20b"]),
            ("precision: fp8", ["precision=fp8"]),
            (
                "train.balance_loss: Megatron counts",
                ["mixture", "model.experts.router=sigmoid", "train.balance_loss=0.1"],
            ),
            ("optimizer.schedule: the engine has no cosine_with", ["optimizer.schedule=cosine_with_restarts"]),
            ("optimizer.states", ["optimizer.states=bf16"]),
            ("optimizer.master_weights: megatron", ["precision=bf16", "optimizer.master_weights=false"]),
            ("train.trackers", ["train.trackers=[tensorboard]"]),
            ("train.compile", ["train.compile=true"]),
            ("task", ["task=lora"]),
            ("parallel.context", ["plan: context: 2"]),
            ("parallel.tensor: tensor 4 does not divide 2 key/value heads", ["plan: tensor: 4"]),
            ("parallel: expert 2", ["parallel={data_shard: 2, expert: 2, sharding: none}"]),
            ("parallel: megatron 0.16 has no zbv", ["plan: pipeline: 2, virtual_pipeline: 2, schedule: zbv"]),
            ("parallel.sharding", ["parallel={data_shard: 2, sharding: parameters}"]),
            ("parallel.data_replicate", ["parallel={data_shard: 2, data_replicate: 2, sharding: optimizer}"]),
            ("parallel.recompute", ["plan: recompute: {modules: [alternate_matmuls]}"]),
        ],
        lambda case: check(*case),
    )
