import json
from dataclasses import replace

import pytest

from meshwright.catalog.huggingface import architectures, model_from_config, model_from_path
from meshwright.catalog.lookup import model
from meshwright.errors import InputError, MeshwrightError
from meshwright.specs.model import Rope, RopeScaling

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "vocab_size": 32000,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "norm_topk_prob": False,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V3 = DEEPSEEK_V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": DEEPSEEK_V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "mlp_intermediate_size": 8192,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5_000_000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
GPT3 = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 12288,
    "n_head": 96,
    "n_inner": None,
    "n_layer": 96,
    "n_positions": 2048,
    "vocab_size": 50257,
}
QWEN2_MOE = QWEN3_MOE | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "shared_expert_intermediate_size": 5632,
    "mlp_only_layers": [0],
}
GEMMA3 = QWEN3 | {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 512, "num_hidden_layers": 26}
SAMPLES = [LLAMA, MIXTRAL, QWEN3, QWEN3_MOE, QWEN2_MOE, DEEPSEEK_V2_LITE, DEEPSEEK_V3, GPT_OSS, GPT3, GEMMA3]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama3-8b", LLAMA),
        ("mixtral-8x7b", MIXTRAL),
        ("qwen3-0.6b", QWEN3),
        ("qwen3-30b-a3b", QWEN3_MOE),
        ("deepseek-v2-lite", DEEPSEEK_V2_LITE),
        ("deepseek-v3", DEEPSEEK_V3),
        ("kimi-k2", KIMI_K2),
        ("glm-4.5-air", GLM_4_5_AIR),
        ("minimax-m2", MINIMAX_M2),
        ("gpt-oss-20b", GPT_OSS),
    ],
)
def test_config_gives_the_catalogued_model(name, config):
    assert model_from_config(config, name=name) == model(name)


def test_gpt2_config_of_gpt3_gives_the_catalogued_model():
    # the catalogue's GPT-3 has no architecture name, because it was never released
    assert replace(model_from_config(GPT3, name="gpt3-175b"), family="") == model("gpt3-175b")


def test_absent_keys_take_the_defaults_of_transformers():
    bare = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "tie_word_embeddings")}
    m = model_from_config(bare, name="bare")
    assert (m.attention.num_kv_heads, m.attention.head_dim, m.tied_embeddings) == (32, 128, False)
    no_types = {key: value for key, value in GPT_OSS.items() if key != "layer_types"}
    assert model_from_config(no_types, name="gpt-oss-20b") == model("gpt-oss-20b")


def test_some_layers_may_be_dense_or_windowed():
    moe = model_from_config(QWEN2_MOE, name="m")
    assert (moe.experts.num_dense_layers, moe.ffn_hidden, moe.experts.shared_hidden) == (1, 6144, 5632)
    assert moe.attention.bias
    every_other = model_from_config(QWEN3_MOE | {"decoder_sparse_step": 2}, name="m")
    assert every_other.num_moe_layers == 24
    gemma = model_from_config(GEMMA3, name="g")
    assert (gemma.attention.window, gemma.num_windowed_layers) == (512, 22)  # 26 less 4 full ones
    mistral = model_from_config(LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, name="m")
    assert mistral.attention.num_windowed_layers == 32
    qwen2 = LLAMA | {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 1024,
        "max_window_layers": 20,
    }
    assert model_from_config(qwen2, name="m").attention.num_windowed_layers == 12


def test_unknown_architecture_lists_the_known_ones():
    with pytest.raises(InputError, match="LlamaForCausalLM"):
        model_from_config(LLAMA | {"architectures": ["RwkvForCausalLM"]}, name="m")
    assert "DeepseekV3ForCausalLM" in architectures()


@pytest.mark.parametrize(
    ("config", "way_on"),
    [
        ({"architectures": ["RwkvForCausalLM"]}, "model.num_layers"),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"model_type": "gemma3_text"}},
         "text_config: save that as a config.json of its own, with architectures: [Gemma3ForCausalLM]"),
        ({"architectures": ["LlavaModel"], "text_config": {"model_type": 7}}, "[one that is read]"),
    ],
)  # fmt: skip
def test_unknown_architecture_says_the_way_on(config, way_on):
    with pytest.raises(InputError) as refused:
        model_from_config(config, name="m")
    assert way_on in str(refused.value.hint)


@pytest.mark.parametrize("absent", [{}, {"architectures": None}, {"architectures": []}])
@pytest.mark.parametrize(
    ("model_type", "way_on"),
    [
        ("llama", "add architectures: [LlamaForCausalLM]"),
        ("rwkv", "plan it by its shapes"),
        (None, "plan it by its shapes"),
    ],
)
def test_a_config_without_architectures_says_so(absent, model_type, way_on):
    config = {k: v for k, v in LLAMA.items() if k != "architectures"} | {"model_type": model_type} | absent
    with pytest.raises(InputError, match=r"its config\.json names no architecture") as refused:
        model_from_config(config, name="m")
    assert way_on in str(refused.value.hint)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_missing_key_is_named(key):
    with pytest.raises(InputError, match=f"key '{key}' is missing"):
        model_from_config({k: v for k, v in LLAMA.items() if k != key}, name="m")


@pytest.mark.parametrize("config", SAMPLES)
@pytest.mark.parametrize("nonsense", [-1, 0, "many", 1.5, True, [], {}])
def test_nonsense_in_any_key_is_a_model_or_one_clear_error(config, nonsense):
    refused = 0
    for key in config:
        try:
            model_from_config(config | {key: nonsense}, name="m")
        except MeshwrightError:
            refused += 1
    assert refused >= 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 5}, "not a multiple"),
        ({"num_attention_heads": 8192, "num_key_value_heads": 8}, "head_dim"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        model_from_config(LLAMA | changes, name="m")


def test_more_choices_than_experts_are_refused():
    with pytest.raises(InputError, match="exceed the experts"):
        model_from_config(MIXTRAL | {"num_experts_per_tok": 9}, name="m")


def test_path_may_be_the_file_or_its_folder(tmp_path):
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    expected = replace(model("llama3-8b"), name="My-Model")
    assert model_from_path(folder) == expected
    assert model_from_path(folder / "config.json") == expected
    (folder / "other.json").write_text(json.dumps(LLAMA))
    assert model_from_path(folder / "other.json").name == "other"


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b'"text"', b"\xff\xfe\x00", b"null"])
def test_files_that_are_no_config_are_refused(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(InputError):
        model_from_path(file)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        model_from_path(tmp_path / "nowhere")


def test_rope_is_read_from_both_spellings():
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    expected = replace(model("llama3.1-8b"), name="m")
    assert model_from_config(LLAMA | {"rope_scaling": scaling}, name="m") == expected
    newer = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    newer["rope_parameters"] = scaling | {"rope_theta": 500_000.0}
    assert model_from_config(newer, name="m") == expected


def test_a_rope_scaling_without_formulas_is_kept_as_other():
    rope = model_from_config(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, name="m").rope
    assert rope == Rope(theta=500_000.0, scaling=RopeScaling.OTHER)


@pytest.mark.parametrize(
    ("config", "changes", "unsupported"),
    [
        (LLAMA, {"hidden_act": "relu"}, "hidden_act: 'relu'"),
        (MIXTRAL, {"hidden_act": "relu2"}, "hidden_act: 'relu2'"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                                  "attention_factor": 0}}, "rope_scaling.attention_factor: 0"),
        (LLAMA, {"residual_multiplier": 0.5}, "residual_multiplier: 0.5"),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 8,
                 "layer_types": ["chunked_attention", "full_attention"]},
         "layer_types: ['chunked_attention', 'full_attention']"),
        (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave: False"),
        (DEEPSEEK_V2_LITE, {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc'"),
    ],
)  # fmt: skip
def test_what_a_config_asks_for_and_is_not_computed_is_named(config, changes, unsupported):
    assert model_from_config(config, name="m").unsupported == ()
    assert model_from_config(config | changes, name="m").unsupported == (unsupported,)


def test_v2_limits_the_choice_by_groups_only_when_its_method_says_so():
    grouped = DEEPSEEK_V2_LITE | {"n_group": 8, "topk_group": 3}
    limited = model_from_config(grouped | {"topk_method": "group_limited_greedy"}, name="m").experts
    greedy = model_from_config(grouped | {"topk_method": "greedy"}, name="m").experts
    assert limited is not None
    assert greedy is not None
    assert (limited.num_groups, limited.groups_per_token) == (8, 3)
    assert (greedy.num_groups, greedy.groups_per_token) == (0, 0)
