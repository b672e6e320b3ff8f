"""config.json of DeepSeek-V3.2, GLM-5 and DeepSeek-V4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.catalog import lookup as catalog
from meshwright.catalog.huggingface import model_from_config
from meshwright.cost.flops import count_parameters, model_flops_per_token
from meshwright.cost.tables import model_row
from meshwright.errors import InputError
from meshwright.specs.model_parts import contradictions

V32: dict[str, Any] = {
    # deepseek-ai/DeepSeek-V3.2-Exp, config.json
    "architectures": ["DeepseekV32ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 2048, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v32", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144,
    "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 78, "num_attention_heads": 64,
    "vocab_size": 154880, "num_nextn_predict_layers": 1, "rope_parameters": {"rope_theta": 1000000},
}  # fmt: skip
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096,
    "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
    "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "qk_rope_head_dim": 64, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "index_topk": 512,
    "index_n_heads": 64, "index_head_dim": 128, "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0], "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "num_hash_layers": 3, "swiglu_limit": 10.0, "expert_dtype": "fp4",
    "sliding_window": 128, "vocab_size": 129280, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "compress_rope_theta": 40000, "max_position_embeddings": 1048576,
}  # fmt: skip
CONFIGS = {"deepseek-v3.2": V32, "glm-5": GLM, "deepseek-v4-flash": FLASH}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_published_config_is_the_catalogue_entry(name):
    read, listed = model_from_config(CONFIGS[name], name=name), catalog.model(name)
    assert read.unsupported == ()
    assert replace(read, rope=listed.rope) == listed


def test_pro_is_flash_with_other_sizes():
    changes = {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
        "n_routed_experts": 384, "moe_intermediate_size": 3072, "index_topk": 1024, "routed_scaling_factor": 2.5,
        "compress_ratios": [128] + [128, 4] * 30 + [0],
    }  # fmt: skip
    read, listed = (model_from_config(FLASH | changes, name="deepseek-v4-pro"), catalog.model("deepseek-v4-pro"))
    assert replace(read, rope=listed.rope) == listed


def test_layer_types_say_the_same_as_ratios():
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    types = [kinds[ratio] for ratio in FLASH["compress_ratios"][:43]]
    named = {k: v for k, v in FLASH.items() if k not in ("compress_ratios", "num_hash_layers")}
    named |= {"layer_types": types, "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40}
    assert model_from_config(named, name="m") == model_from_config(FLASH, name="m")


def test_layers_without_an_indexer_of_their_own_are_counted():
    every_fourth = model_from_config(GLM | {"index_topk_freq": 4, "index_skip_topk_offset": 2}, name="m")
    by_pattern = model_from_config(GLM | {"index_topk_pattern": "FFSSS" + "FSSS" * 18 + "F"}, name="m")
    assert every_fourth.attention.indexer.num_layers == 21
    assert by_pattern.attention.indexer.num_layers == 21
    assert not by_pattern.unsupported


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GLM, {"indexer_types": ["shared"] * 78}, "indexer_types"),
        (GLM, {"index_topk_pattern": "FX"}, "indexer_types"),
        (GLM, {"mlp_layer_types": ["sparse"] * 78}, "mlp_layer_types"),
        (V32, {"layer_types": ["full_attention"] * 61}, "layer_types"),
        (FLASH, {"compress_ratios": [7] * 43}, "layer_types"),
        (FLASH, {"layer_types": ["sliding_attention"]}, "layer_types"),
        (FLASH, {"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types"),
        (FLASH, {"scoring_func": "softmax"}, "scoring_func"),
        (FLASH, {"num_key_value_heads": 8}, "num_key_value_heads"),
        (FLASH, {"a_key_of_tomorrow": 3}, "a_key_of_tomorrow"),
    ],
)
def test_what_is_not_computed_is_noted(config, changes, message):
    assert any(message in text for text in model_from_config(config | changes, name="m").unsupported)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (V32, {"index_topk": 0}), (V32, {"index_n_heads": "many"}), (V32, {"q_lora_rank": None}),
        (GLM, {"index_topk_freq": 0}), (FLASH, {"hc_mult": 0}), (FLASH, {"o_groups": 7}),
        (FLASH, {"compress_rates": 3}), (FLASH, {"head_dim": -1}), (FLASH, {"num_hash_layers": 3.5}),
    ],
)  # fmt: skip
def test_impossible_values_are_errors(config, changes):
    with pytest.raises(InputError):
        model_from_config(config | changes, name="m")


HOSTILE = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5000), st.floats(allow_nan=True), st.text(max_size=4),
    st.lists(st.one_of(st.integers(-2, 130), st.sampled_from(["full", "shared", "moe", None])), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(CONFIGS)), data=st.data())
def test_any_value_is_read_whole_or_refused(name, data):
    keys = data.draw(st.lists(st.sampled_from(sorted(CONFIGS[name])), min_size=1, max_size=3))
    changes = {key: data.draw(HOSTILE) for key in keys if key != "architectures"}
    try:
        model = model_from_config(CONFIGS[name] | changes, name="m")
    except InputError:
        return
    if not list(contradictions(model)):
        assert count_parameters(model_row(model)).total > 0
        assert model_flops_per_token(model_row(model), seq_len=4096) > 0
