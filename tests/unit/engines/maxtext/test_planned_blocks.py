"""Blocks of MaxText that are planned: its own configurations have the parameters of the published models."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.engines.maxtext.test_importing import imported, written

from meshwright.catalog import lookup as catalog
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.errors import InputError
from meshwright.specs.model import Model


def sizes(hidden: int, heads: int, kv_heads: int, mlp: int, layers: int, vocab: int, **more: Any) -> dict[str, Any]:
    names = ("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "base_num_decoder_layers")
    return dict(zip(names, (hidden, heads, kv_heads, mlp, layers), strict=True)) | {"vocab_size": vocab} | more


GELU = {"mlp_activations": ["gelu", "linear"], "logits_via_embedding": True, "normalization_layer_epsilon": 1e-6}
BOTH = {"use_post_attn_norm": True, "use_post_ffw_norm": True}
FOUR = {
    "global_head_dim": 512,
    "share_kv_projections": True,
    "final_logits_soft_cap": 30.0,
    "sliding_window_size": 1024,
}
GDN = {"inhomogeneous_layer_cycle_interval": 4, "shared_experts": 1, "partial_rotary_factor": 0.25, "head_dim": 256}
LLAMA4 = {"nope_layer_interval": 4, "chunk_attn_window_size": 8192, "shared_experts": 1, "num_experts_per_tok": 1}
OLMO = {"use_qk_norm": True, "sliding_window_size": 4096, "inhomogeneous_layer_cycle_interval": 4}
# maxtext/configs/models/NAME.yml, and the parameters of transformers' models
ITS_OWN: dict[str, tuple[dict[str, Any], float]] = {
    "gemma-7b": (sizes(3072, 16, 16, 24576, 28, 256128, decoder_block="gemma", head_dim=256, **GELU), 8.538074112e9),
    "gemma2-2b": (
        sizes(2304, 8, 4, 9216, 13, 256128, decoder_block="gemma2", head_dim=256, sliding_window_size=4096,
              final_logits_soft_cap=30.0, attn_logits_soft_cap=50.0, **GELU, **BOTH), 2.614341888e9 + 128 * 2304,
    ),
    "gemma3-12b": (
        sizes(3840, 16, 8, 15360, 48, 262144, decoder_block="gemma3", head_dim=256, sliding_window_size=1024,
              rope_linear_scaling_factor=8.0, **GELU, **BOTH), 11.765788416e9,
    ),
    "gemma4-31b": (
        sizes(5376, 32, 16, 21504, 60, 262144, decoder_block="gemma4", head_dim=256, global_num_kv_heads=4,
              **GELU, **BOTH, **FOUR), 30.697345280e9,
    ),
    "gemma4-26b": (
        sizes(2816, 16, 8, 2112, 30, 262144, decoder_block="gemma4", head_dim=256, global_num_kv_heads=2,
              base_moe_mlp_dim=704, num_experts=128, num_experts_per_tok=8, shared_experts=1, **GELU, **BOTH, **FOUR),
        25.233e9,
    ),
    "llama4-17b-16e": (
        sizes(5120, 40, 8, 8192, 48, 202048, decoder_block="llama4", base_moe_mlp_dim=8192, num_experts=16, **LLAMA4),
        107.77e9,
    ),
    "llama4-17b-128e": (
        sizes(5120, 40, 8, 16384, 48, 202048, decoder_block="llama4", base_moe_mlp_dim=8192, num_experts=128,
              interleave_moe_layer_step=2, **LLAMA4), 400.71e9,
    ),
    "olmo3-7b": (sizes(4096, 32, 32, 11008, 32, 100278, decoder_block="olmo3", **OLMO), 7.298011136e9),
    "qwen2.5-7b": (
        sizes(3584, 28, 4, 18944, 28, 152064, decoder_block="qwen2", attention_bias=True,
              rope_max_timescale=1000000, normalization_layer_epsilon=1e-6), 7.615616512e9,
    ),
    "qwen3-next-80b-a3b": (
        sizes(2048, 16, 2, 512, 48, 151936, decoder_block="qwen3_next", base_moe_mlp_dim=512, num_experts=512,
              num_experts_per_tok=10, **GDN), 79.674391296e9,
    ),
}  # fmt: skip


def counted(model: Model) -> float:
    return float(count_parameters(model_row(model)).total)


@pytest.mark.parametrize("name", ITS_OWN)
def test_its_own_models_have_the_published_parameters(name, tmp_path):
    values, parameters = ITS_OWN[name]
    run, _ = imported(written(tmp_path, {"steps": 10, **values}, f"{name}.yml"))
    assert counted(run.model) == pytest.approx(parameters, rel=1e-5)


def test_a_model_of_the_catalogue_has_its_name(tmp_path):
    values, _ = ITS_OWN["qwen2.5-7b"]
    run, _ = imported(written(tmp_path, {"steps": 10, **values}))
    assert run.model == catalog.model("qwen2.5-7b")


def test_gpt3_has_biases_and_positions(tmp_path):
    values = sizes(
        12288, 96, 96, 49152, 96, 50304, decoder_block="gpt3", mlp_activations=["gelu"], logits_via_embedding=True,
        trainable_position_size=2048,
    )  # fmt: skip
    run, _ = imported(written(tmp_path, {"steps": 10, **values}))
    ours = catalog.model("gpt3-175b")
    assert counted(run.model) == counted(ours) + 12288 * (50304 - ours.vocab)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma2-2b", {"use_post_attn_norm": False}, "use_post_attn_norm: got False"),
        ("gemma3-12b", {"mlp_activations": ["silu", "linear"]}, "mlp_activations"),
        ("llama4-17b-16e", {"num_experts": 1}, "the block llama4 that is not supported: got '1 experts'"),
        ("qwen3-next-80b-a3b", {"inhomogeneous_layer_cycle_interval": 2}, "inhomogeneous_layer_cycle_interval"),
    ],
)
def test_other_variants_of_a_block_are_refused(name, change, message, tmp_path):
    with pytest.raises(InputError, match=message):
        imported(written(tmp_path, {"steps": 10, **ITS_OWN[name][0], **change}))


def test_the_other_dimension_of_weights_is_fully_sharded_too(tmp_path):
    values = {"steps": 10, "ici_fsdp_transpose_parallelism": 4, "ici_fsdp_parallelism": -1}
    run, notes = imported(written(tmp_path, values))
    assert (run.plan.data_shard, run.global_batch) == (8, 96)
    assert "fsdp_transpose of 4 is read as a part of fully sharded data parallelism" in notes


def test_an_indexer_is_that_of_deepseek_v32(tmp_path):
    values = sizes(
        7168, 128, 128, 18432, 61, 129280, decoder_block="deepseek", base_moe_mlp_dim=2048, first_num_dense_layers=3,
        num_experts=256, num_experts_per_tok=8, shared_experts=1, routed_scaling_factor=2.5, routed_bias=True,
        routed_score_func="sigmoid", attention_type="mla", q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, mscale=1.0, rope_type="yarn", rope_factor=40, rope_interleave=True,
        max_position_embeddings=163840, original_max_position_embeddings=4096, rope_attention_scaling=False,
        use_indexer=True, indexer_n_heads=64, indexer_head_dim=128, indexer_topk=2048,
    )  # fmt: skip
    run, _ = imported(written(tmp_path, {"steps": 10, **values}, "deepseek3.2-671b.yml"))
    assert run.model.attention.indexer == catalog.model("deepseek-v3.2").attention.indexer
    assert run.model.family == "DeepseekV32ForCausalLM"
