"""A run that torchtitan 0.3.0 cannot do is refused with the key and the reason; torchtitan is not needed to say so."""

from __future__ import annotations

from tests.every_member import check_every

ENGINE = "torchtitan"


def test_a_plain_run_is_accepted(refused):
    assert refused() == []
    assert refused("parallel={data_shard: 2, tensor: 2, pipeline: 2, sharding: parameters}") == []
    assert refused("mixture", "parallel={data_shard: 4, expert: 4, sharding: parameters}") == []
    assert refused("mixture", "precision=fp32") == []
    assert refused("mixture", "plan: tensor: 2, sequence_parallel: false") == []
    assert refused("mixture", "plan: tensor: 2", "batch.micro=2") == []
    assert refused("task=lora") == []


def test_what_it_cannot_do_is_refused_with_the_key(refused):
    def check(key, overrides):
        assert any(problem.startswith(key) for problem in refused(*overrides)), refused(*overrides)

    check_every(
        [
            ("precision: nvfp4", ["precision=nvfp4"]),
            ("precision: GPT-OSS's experts in torchtitan", ["model=gpt-oss-20b", "precision=fp32"]),
            ("optimizer.states", ["optimizer.states=int8"]),
            ("train.checkpoint.keep", ["train.checkpoint={folder: c, keep: 1}"]),
            ("train.evaluate.every_steps", ["train.evaluate.every_steps=3", "data.validation=v.txt"]),
            ("train.trackers", ["train.trackers=[mlflow]"]),
            ("kernels.loss_chunk: torchtitan splits", ["kernels.loss_chunk=100", "plan: tensor: 2"]),
            ("kernels: the engine has kernels", ["kernels.loss_chunk=256", "kernels.weight_cache='on'"]),
            ("lora.targets", ["task=lora", "lora.targets=[query, key]"]),
            ("lora.dropout", ["task=lora", "lora.dropout=0.1"]),
            ("lora.ranks", ["task=lora", "lora.ranks={query: 4}"]),
            ("lora.layers", ["task=lora", "lora.layers=[0]"]),
            ("lora.base_format", ["task=lora", "lora.base_format=nf4"]),
            ("model: torchtitan 0.3.0 has no model", ["model.attention.bias=true"]),
            ("model: RoPE scaling", ["model.rope={scaling: yarn, factor: 4, original_context: 128}"]),
            ("parallel.sharding: torchtitan 0.3.0 does not shard optimizer", ["plan: sharding: optimizer"]),
            ("parallel.tensor: tensor 4 does not divide 2 key/value heads", ["plan: tensor: 4"]),
            ("parallel: torchtitan 0.3.0 has no zero_bubble", ["plan: pipeline: 2, schedule: zero_bubble"]),
            ("parallel: context 4", ["data.sequence_length=640", "plan: context: 4"]),
            ("parallel: torchtitan 0.3.0 cannot recompute", ["plan: recompute: {modules: [mlp]}"]),
            ("parallel.sequence_parallel: experts get wrong gradients", ["mixture", "plan: tensor: 2"]),
            ("parallel.pipeline: tied", ["model.tied_embeddings=true", "plan: pipeline: 2"]),
            ("parallel.pipeline: every stage", ["plan: pipeline: 2, virtual_pipeline: 3, schedule: interleaved"]),
        ],
        lambda case: check(*case),
    )
