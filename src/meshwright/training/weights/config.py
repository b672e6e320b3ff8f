"""The `config.json` of a model: `catalog.huggingface.model_from_config` the other way.

Keys are as transformers 4 writes them; version 5 reads them too.
"""

from __future__ import annotations

from typing import Any

from meshwright.catalog.families import ModelFamily
from meshwright.catalog.family_shapes import activation_key, scaling_keys
from meshwright.catalog.huggingface import SCORES_TEXTS, WRITES_TEXTS
from meshwright.specs.model import AttentionKind, Model
from meshwright.training.weights.names import family_of

NULL_IS_ANOTHER_VALUE = frozenset(
    ("sliding_window", "q_lora_rank", "attn_logit_softcapping", "final_logit_softcapping", "pad_token_id")
)
"""Keys that mean something else when they are absent."""


def config_of(model: Model, *, dtype: str, max_positions: int | None = None) -> dict[str, Any]:
    """The config.json that `transformers.AutoModelForCausalLM.from_pretrained` reads with the weights.

    `dtype` is `float32` or `bfloat16`; `max_positions` defaults to the scaled context, or 4096.
    Raises InputError when no architecture has these shapes.
    """
    family = family_of(model)
    rope = model.rope
    scaled_context = int(rope.original_context * rope.factor)
    config = {
        "architectures": [
            family.architecture.replace(WRITES_TEXTS, SCORES_TEXTS if model.num_labels else WRITES_TEXTS)
        ],
        "model_type": family.model_type,
        "torch_dtype": dtype,
        "hidden_act": activation_key(model),
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
    if model.num_labels:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    scaling = scaling_keys(rope)
    config |= {"rope_scaling": scaling} if scaling else {}
    config |= _latent(model) if model.attention.kind is AttentionKind.MLA else _grouped(model)
    config |= _feed_forward(model, family) | family.keys(model)
    return {key: value for key, value in config.items() if value is not None or key in NULL_IS_ANOTHER_VALUE}


def _grouped(model: Model) -> dict[str, Any]:
    window = model.attention.window if model.num_windowed_layers else 0
    return {"head_dim": model.attention.head_dim, "sliding_window": window or None}


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
