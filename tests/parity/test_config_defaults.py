"""A config.json that leaves keys out is read with the defaults that transformers takes for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from meshwright.catalog.huggingface import model_from_config
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.errors import InputError

CLASSES = (
    "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Qwen2Moe", "Olmo2", "Phi3", "Gemma2", "GptOss",
    "DeepseekV2", "DeepseekV3", "Glm4Moe", "MiniMaxM2",
)  # fmt: skip
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def _written(name: str, **keys: object) -> dict[str, object]:
    """All keys of transformers' configuration with `keys`, as its config.json states them."""
    config = getattr(transformers, f"{name}Config")(**keys).to_dict()
    return {k: v for k, v in config.items() if v is not None} | {"architectures": [f"{name}ForCausalLM"]}


def _sizes(name: str) -> dict[str, object]:
    per_token = {"num_experts_per_tok": 2} if name == "DeepseekV2" else {}  # transformers has no default
    return TINY | per_token | ({"num_key_value_heads": 32} if name.startswith("Deepseek") else {})


@pytest.mark.parametrize("name", CLASSES)
def test_a_key_left_out_has_the_default_of_transformers(name):
    stated = _written(name, **_sizes(name))
    read = 0
    for left_out in set(stated) - {"architectures", "model_type"}:
        rest = {k: v for k, v in stated.items() if k != left_out}
        try:
            ours = model_from_config(rest, name="m")
        except InputError:  # a key that every file has
            continue
        complete = _written(name, **{k: v for k, v in rest.items() if k not in ("architectures", "model_type")})
        assert _without_notes(ours) == _without_notes(model_from_config(complete, name="m")), left_out
        read += 1
    assert read > 10


def _without_notes(model):
    # modules for prediction are in the files of DeepSeek-V3 where their key is, and nowhere in transformers
    return replace(model, unsupported=(), num_mtp_layers=0)


@pytest.mark.parametrize("name", CLASSES)
def test_sizes_alone_give_the_parameters_that_transformers_builds(name):
    keys = _sizes(name)
    stated = keys | {"architectures": [f"{name}ForCausalLM"]} | _required(name)
    config = getattr(transformers, f"{name}Config")(**keys, **_required(name))
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    ours = model_from_config(stated, name="m")
    assert count_parameters(model_row(ours)).total == sum(p.numel() for p in built.parameters())


def _required(name: str) -> dict[str, int]:
    """Keys without which our reader refuses a file: it guesses no numbers of experts and no widths of latents."""
    config = getattr(transformers, f"{name}Config")()
    keys = (
        "num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
        "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank",
    )  # fmt: skip
    return {k: getattr(config, k) for k in keys if getattr(config, k, None) is not None and k not in _sizes(name)}
