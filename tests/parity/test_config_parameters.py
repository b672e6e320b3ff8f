"""Random configs of the families that are planned and not trained: the parameters of transformers, or the key is named.

Families that are trained have `test_config_fuzz`, which compares logits.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from meshwright.catalog.families import FAMILIES
from meshwright.catalog.huggingface import model_from_config
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.errors import InputError

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "q_lora_rank": 12, "n_routed_experts": 4}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
          "linear_value_head_dim": 12}  # fmt: skip
QWEN = SMALL | LINEAR | {"num_key_value_heads": 2, "head_dim": 8}
QWEN_EXPERTS = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 48}

BASES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 3, "vocab_size": 61, "n_positions": 64, "attn_pdrop": 0,
             "embd_pdrop": 0, "resid_pdrop": 0},
    "qwen2_moe": {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4,
                  "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 24,
                  "shared_expert_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "hybrid_override_pattern": "M-*-",
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "mamba_num_heads": 4,
                   "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16},
    "deepseek_v32": SMALL | EXPERTS | LATENT | INDEXER | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
                    "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "glm_moe_dsa": SMALL | EXPERTS | LATENT | INDEXER | {"first_k_dense_replace": 1, "num_key_value_heads": 4,
                   "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "deepseek_v4": SMALL | EXPERTS | INDEXER | {"head_dim": 8, "o_groups": 2, "o_lora_rank": 6, "hc_mult": 2,
                   "num_nextn_predict_layers": 0, "sliding_window": 8, "intermediate_size": 24},
    "qwen3_next": QWEN | QWEN_EXPERTS,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN | QWEN_EXPERTS,
    "olmo_hybrid": SMALL | LINEAR,
    "olmo3": SMALL | {"sliding_window": 8},
    "olmoe": SMALL | {"num_experts": 4, "num_experts_per_tok": 2},
    "granite": SMALL,
    "granitemoe": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "smollm3": SMALL,
    "seed_oss": SMALL | {"head_dim": 8, "num_key_value_heads": 2, "attention_dropout": 0, "residual_dropout": 0},
    "ernie4_5": SMALL | {"head_dim": 8},
    "ernie4_5_moe": SMALL | {"num_key_value_heads": 2, "moe_intermediate_size": 24, "moe_k": 2, "moe_num_experts": 4},
    "hunyuan_v1_dense": SMALL | {"head_dim": 8, "num_key_value_heads": 2},
    "hunyuan_v1_moe": SMALL | {"head_dim": 8, "num_key_value_heads": 2, "num_experts": 4, "moe_topk": 2},
    "exaone4": SMALL | {"num_key_value_heads": 2, "sliding_window": 8},
    "exaone_moe": SMALL | EXPERTS | {"num_key_value_heads": 2, "num_experts": 4},
    "dots1": SMALL | EXPERTS | {"num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1,
                                "first_k_dense_replace": 1},
    "solar_open": SMALL | EXPERTS | {"num_key_value_heads": 2, "n_routed_experts": 4, "head_dim": 8},
    "mistral4": SMALL | EXPERTS | LATENT | {"n_routed_experts": 4, "num_key_value_heads": 4, "q_lora_rank": 12},
    "ministral": SMALL | {"num_key_value_heads": 2, "head_dim": 8},
    "ministral3": SMALL | {"num_key_value_heads": 2, "head_dim": 8},
    "glm4": SMALL | {"head_dim": 8},
    "glm4_moe_lite": SMALL | EXPERTS | LATENT | {"n_routed_experts": 4, "num_key_value_heads": 4, "q_lora_rank": 12},
    "gemma": SMALL | {"num_key_value_heads": 2, "head_dim": 8},
    "gemma4_text": SMALL | {"num_key_value_heads": 2, "head_dim": 8, "hidden_size_per_layer_input": 0,
                            "global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 8,
                            "num_hidden_layers": 7, "num_experts": 4, "top_k_experts": 2,
                            "moe_intermediate_size": 24},
    "arcee": SMALL,
    "nemotron": SMALL | {"num_key_value_heads": 2, "head_dim": 8},
    "starcoder2": SMALL,
    "llama4_text": SMALL | {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4,
                            "intermediate_size_mlp": 56, "interleave_moe_layer_step": 2},
    "cohere": SMALL | {"num_key_value_heads": 2, "use_qk_norm": True},
    "cohere2": SMALL | {"num_key_value_heads": 2, "sliding_window": 8},
    "falcon": {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
               "ffn_hidden_size": 40, "num_kv_heads": 2, "new_decoder_architecture": True},
    "gpt_neox": SMALL,
    "gptj": {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64, "rotary_dim": 4,
             "bos_token_id": 1, "eos_token_id": 2},
    "phi": SMALL | {"num_key_value_heads": 2, "qk_layernorm": True},
    "kimi_linear": SMALL | EXPERTS | LATENT | {"num_key_value_heads": 4, "num_experts": 4,
                    "linear_num_heads": 2, "linear_head_dim": 8},
}  # fmt: skip
BOOKKEEPING = {"architectures", "chunk_size_feed_forward", "dtype", "id2label", "is_encoder_decoder", "label2id",
               "layer_types", "layers_block_type", "model_type", "transformers_version",
               "num_nextn_predict_layers"}  # fmt: skip
"""Keys that are not varied; transformers leaves out prediction modules, which are counted here."""


ALWAYS = ("gpt2", "nemotron_h", "qwen3_next", "granite")
"""Dense models, state spaces, linear attention and experts: other families have the same parts."""


def test_every_family_that_is_not_trained_has_a_base():
    assert set(BASES) == {family.model_type for family in FAMILIES.values() if not family.trains}


def architecture_of(model_type: str) -> str:
    return next(family.architecture for family in FAMILIES.values() if family.model_type == model_type)


def config_class(model_type: str, config: dict[str, Any]):
    return transformers.AutoConfig.for_model(model_type, **config)


def changed(value: Any, draw: random.Random) -> Any:
    """Another value of the type of `value`."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice([value * 2, max(1, value // 2), value + 1, 0])
    if isinstance(value, float):
        return draw.choice([value * 2, value / 2])
    if isinstance(value, str):
        return draw.choice([None, "gelu_new", "silu", "relu2", "relu"])
    return draw.choice([7, [0], [1, 2], True])


def parameters_of_transformers(model_type: str, config: dict[str, Any]) -> int | None:
    """None: transformers cannot build the model."""
    try:
        with torch.device("meta"):
            model = getattr(transformers, architecture_of(model_type))(config_class(model_type, config))
    except Exception:  # any that a config class or a module raises for values that it has not foreseen
        return None
    return sum(p.numel() for name, p in model.named_parameters() if not name.endswith("correction_bias"))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    "model_type", [t if t in ALWAYS else pytest.param(t, marks=pytest.mark.when_touched) for t in BASES]
)
def test_parameters_are_those_of_transformers_or_the_key_is_named(model_type):
    draw, base, compared = random.Random(f"parameters of {model_type}"), BASES[model_type], 0
    architecture = architecture_of(model_type)
    usual = {k: v for k, v in config_class(model_type, base).to_dict().items() if k not in BOOKKEEPING}
    for key in (None, *usual, *draw.choices(list(usual), k=20)):
        config = dict(base) if key is None else base | {key: changed(usual[key], draw)}
        try:
            model = model_from_config(config | {"architectures": [architecture]}, name="m")
        except InputError:
            continue
        expected = parameters_of_transformers(model_type, config)
        if expected is not None and not model.unsupported:
            assert round(float(count_parameters(model_row(model)).total)) == expected, f"{key}: {config.get(key)!r}"
            compared += 1
    assert compared > 20


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("falcon", {"new_decoder_architecture": False}),
        ("falcon", {"new_decoder_architecture": False, "multi_query": False, "bias": True}),
        ("falcon", {"new_decoder_architecture": False, "parallel_attn": False, "tie_word_embeddings": False}),
        ("falcon", {"num_ln_in_parallel_attn": 1}),
        ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
        ("phi", {"tie_word_embeddings": True}),
        ("cohere", {"use_qk_norm": False, "attention_bias": True}),
    ],
)
def test_families_with_parallel_blocks_have_the_parameters_of_transformers(model_type, changes):
    config = BASES[model_type] | changes
    model = model_from_config(config | {"architectures": [architecture_of(model_type)]}, name="m")
    assert model.unsupported == ()
    expected = parameters_of_transformers(model_type, config)
    assert round(float(count_parameters(model_row(model)).total)) == expected


@pytest.mark.parametrize("model_type", BASES)
def test_a_config_that_transformers_writes_is_read_as_a_whole(model_type):
    written = config_class(model_type, BASES[model_type]).to_dict()
    model = model_from_config(written | {"architectures": [architecture_of(model_type)]}, name="m")
    assert model.unsupported == ()
    given = {key: value for key, value in written.items() if key != "model_type"}
    assert round(float(count_parameters(model_row(model)).total)) == parameters_of_transformers(model_type, given)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gpt2", {"add_cross_attention": True}),
        ("gpt2", {"activation_function": "relu"}),
        ("qwen2_moe", {"attention_dropout": 0.5}),
        ("nemotron_h", {"tie_word_embeddings": True}),
        ("nemotron_h", {"use_conv_bias": False}),
        ("nemotron_h", {"sliding_window": 7}),
    ],
)
def test_what_a_planned_family_is_asked_for_and_not_computed_is_named(model_type, changes):
    architecture = architecture_of(model_type)
    config = BASES[model_type] | {"architectures": [architecture]}
    assert model_from_config(config, name="m").unsupported == ()
    expected = tuple(f"{key}: {value!r}" for key, value in changes.items())
    assert model_from_config(config | changes, name="m").unsupported == expected
