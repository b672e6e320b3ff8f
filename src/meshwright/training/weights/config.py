"""The `config.json` of a model: `catalog.huggingface.model_from_config` the other way.

Keys are those that transformers 4 writes; version 5 reads them too.
"""

from __future__ import annotations

from typing import Any

from meshwright.catalog.families import ModelFamily
from meshwright.specs.model import AttentionKind, Model, Rope, RopeScaling
from meshwright.training.weights.names import family_of


def config_of(model: Model, *, dtype: str, max_positions: int | None = None) -> dict[str, Any]:
    """The config.json that `transformers.AutoModelForCausalLM.from_pretrained` reads with the weights.

    `dtype` is `float32` or `bfloat16`; `max_positions` defaults to the scaled context, or 4096.
    Raises InputError when no architecture has these shapes.
    """
    family = family_of(model)
    rope = model.rope
    scaled_context = int(rope.original_context * rope.factor)
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "num_hidden_layers": model.num_layers,
        "vocab_size": model.vocab,
        "num_attention_heads": model.attention.num_heads,
        "num_key_value_heads": model.attention.num_kv_heads,
        "attention_bias": model.attention.bias,
        "max_position_embeddings": max_positions or scaled_context or 4096,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": rope.theta,
        "tie_word_embeddings": model.tied_embeddings,
    }
    scaling = scaling_of(rope)
    config |= {"rope_scaling": scaling} if scaling else {}
    config |= _latent(model) if model.attention.kind is AttentionKind.MLA else _grouped(model, family)
    return config | _feed_forward(model, family)


def scaling_of(rope: Rope) -> dict[str, Any] | None:
    """`rope_scaling` of a config.json; None without RoPE scaling."""
    if rope.scaling is RopeScaling.LLAMA3:
        return {
            "rope_type": "llama3",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_context,
            "low_freq_factor": rope.low_frequency,
            "high_freq_factor": rope.high_frequency,
        }
    if rope.scaling is RopeScaling.YARN:
        scaling = {
            "rope_type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_context,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
        scaling |= {"mscale": rope.mscale} if rope.mscale else {}
        return scaling | ({"mscale_all_dim": rope.mscale_all_dims} if rope.mscale_all_dims else {})
    return None


def _grouped(model: Model, family: ModelFamily) -> dict[str, Any]:
    a = model.attention
    config: dict[str, Any] = {"head_dim": a.head_dim, "sliding_window": a.window or None}
    if family.counts_full_layers:
        config["use_sliding_window"] = a.num_windowed_layers > 0
        config["max_window_layers"] = model.num_layers - a.num_windowed_layers
    return config


def _latent(model: Model) -> dict[str, Any]:
    a = model.attention
    return {
        "q_lora_rank": a.query_lora_rank or None,
        "kv_lora_rank": a.kv_lora_rank,
        "qk_nope_head_dim": a.head_dim - a.rope_head_dim,
        "qk_rope_head_dim": a.rope_head_dim,
        "v_head_dim": a.v_dim,
    }


def _feed_forward(model: Model, family: ModelFamily) -> dict[str, Any]:
    x = model.experts
    if x is None:
        return {"intermediate_size": model.ffn_hidden, "mlp_bias": False}
    # A width that no layer has must still be positive.
    return {"intermediate_size": model.ffn_hidden or x.ffn_hidden} | family.expert_keys(x)
