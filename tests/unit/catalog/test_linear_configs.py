"""config.json of models with layers of linear attention. Values: those that the catalogue names the sources of."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from meshwright.catalog import lookup as catalog
from meshwright.catalog.huggingface import model_from_config
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.errors import InputError

NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_dropout": 0.0, "decoder_sparse_step": 1,
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 151936,
}  # fmt: skip

LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
MIXTURE = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_output_gate": True, "dtype": "bfloat16", "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "hidden_size": 2048, "layer_types": LAYERS * 10, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [], "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
    "num_hidden_layers": 40, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "shared_expert_intermediate_size": 512,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "vocab_size": 248320,
}  # fmt: skip
DENSE = {
    key: value for key, value in MIXTURE.items() if "expert" not in key and not key.startswith(("moe", "mtp", "mlp"))
} | {
    "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288, "layer_types": LAYERS * 8,
    "num_hidden_layers": 32, "num_key_value_heads": 4, "model_type": "qwen3_5_text",
}  # fmt: skip
FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI = {
    "architectures": ["KimiLinearForCausalLM"], "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu",
    "hidden_size": 2304, "intermediate_size": 9216, "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": FULL, "head_dim": 128, "kda_layers": [n for n in range(1, 28) if n not in FULL],
        "num_heads": 32, "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 1024,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
    "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1, "use_grouped_topk": True,
    "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
OLMO = {
    "architectures": ["OlmoHybridForCausalLM"], "hidden_size": 3840, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 30, "vocab_size": 100352, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "linear_a_log_min": 0.0, "linear_a_log_max": 16.0, "linear_dt_min": 0.001, "linear_dt_max": 0.1,
    "linear_dt_init_floor": 1e-4, "linear_allow_neg_eigval": True, "rope_parameters": {"rope_theta": 500000.0},
}  # fmt: skip
KNOWN = {
    "qwen3-next-80b-a3b": NEXT, "qwen3.5-35b-a3b": MIXTURE, "qwen3.5-9b": DENSE, "kimi-linear-48b-a3b": KIMI,
    "olmo-hybrid-7b": OLMO,
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_the_config_is_read_whole(name):
    read, known = model_from_config(KNOWN[name], name=name), catalog.model(name)
    if name == "qwen3-next-80b-a3b":  # its config.json does not name the prediction module
        known = replace(known, num_mtp_layers=0)
    pattern = (known.linear_attention.pattern * known.num_layers)[: known.num_layers]
    assert read.unsupported == ()
    assert read.linear_layers == pattern
    assert model_row(read) == model_row(known)
    assert replace(read, linear_attention=None) == replace(known, linear_attention=None)


def test_the_names_of_transformers_own_class_mean_the_same():
    kept = {"num_expert_group", "num_experts", "num_experts_per_token", "num_shared_experts", "moe_renormalize",
            "linear_attn_config", "first_k_dense_replace"}  # fmt: skip
    saved = {key: value for key, value in KIMI.items() if key not in kept} | {
        "n_group": 1, "num_local_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "norm_topk_prob": True,
        "linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4, "dense_ffn_hidden": 9216,
        "mlp_layer_types": ["dense"] + ["sparse"] * 26, "attn_res_block_size": 0, "mla_use_output_gate": False,
        "layer_types": ["full_attention" if n in FULL else "linear_attention" for n in range(1, 28)],
    }  # fmt: skip
    assert model_from_config(saved, name="kimi") == model_from_config(KIMI, name="kimi")


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (NEXT, {"layer_types": ["linear_attention"] * 3}, "3 entries"),
        (NEXT, {"layer_types": ["mamba"] * 48}, "48 entries"),
        (NEXT, {"layer_types": [[]] * 48}, "48 entries"),
        (NEXT, {"linear_num_key_heads": 5}, "32 and 5"),
        (NEXT, {"linear_num_key_heads": "many"}, "a whole number"),
        (NEXT, {"full_attention_interval": 0}, "a whole number"),
        (KIMI, {"linear_attn_config": KIMI["linear_attn_config"] | {"kda_layers": [1, 2]}}, "name every layer once"),
        (KIMI, {"linear_attn_config": KIMI["linear_attn_config"] | {"kda_layers": [1.0] * 20}}, "name every layer"),
        (KIMI, {"linear_attn_config": 7}, "a mapping"),
        (KIMI, {"linear_attn_config": {"num_heads": 4}}, "head_dim.* is missing"),
    ],
)
def test_what_is_not_read_is_refused(config, changes, message):
    with pytest.raises(InputError) as found:
        model_from_config(config | changes, name="other")
    assert re.search(message, str(found.value))


@pytest.mark.parametrize(
    ("config", "changes", "note"),
    [
        (NEXT, {"attn_output_gate": False}, "attn_output_gate: False"),
        (MIXTURE, {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings: True"),
        (KIMI, {"mla_use_output_gate": True}, "mla_use_output_gate: True"),
        (KIMI, {"attn_res_block_size": 12}, "attn_res_block_size: 12"),
        (KIMI, {"routed_expert_hidden_size": 3584}, "routed_expert_hidden_size: 3584"),
        (KIMI, {"linear_attn_config": KIMI["linear_attn_config"] | {"use_full_rank_gate": True}}, "use_full_rank_gate"),
        (KIMI, {"moe_router_activation_func": "tanh"}, "moe_router_activation_func: 'tanh'"),
        (KIMI, {"mlp_layer_types": ["sparse"] * 26 + ["dense"]}, "dense layers after mixtures"),
    ],
)
def test_what_is_not_costed_is_noted(config, changes, note):
    assert note in "; ".join(model_from_config(config | changes, name="other").unsupported)


@pytest.mark.parametrize("name", KNOWN)
def test_random_shapes_are_read_or_refused_clearly(name):
    """Any key with a hostile value: a model whose parameters are finite, or an InputError."""
    draw = random.Random(name)
    values = [None, 0, -1, 1, 3, 7, 64, 2**40, 0.5, True, "x", [], {}, [1], {"a": 1}, float("nan")]
    for _ in range(300):
        changes = {key: draw.choice(values) for key in draw.sample(sorted(KNOWN[name]), 2) if key != "architectures"}
        try:
            model = model_from_config(KNOWN[name] | changes, name="hostile")
        except InputError:
            continue
        assert 0 < float(count_parameters(model_row(model)).total) < float("inf"), changes
