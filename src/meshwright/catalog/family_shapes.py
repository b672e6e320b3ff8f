"""Shapes to config.json: the models that an architecture's config can express, and the keys that only it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.specs.model import Activation, AttentionKind, Experts, Model, NormPlacement, Rope, RopeScaling, Router
from meshwright.specs.model_parts import GPT_OSS, parts_of

# --- models that a config can express ---

OF_ANY = frozenset(("activation", "rope.attention_factor"))
"""Parts that the configs of all Llama-like decoders can express."""


def _has_only(model: Model, *parts: str) -> bool:
    """True if `model` has no parts but `parts` and `OF_ANY`."""
    return model.activation is not Activation.CLAMPED_SWIGLU and parts_of(model).keys() <= OF_ANY | {*parts}


def _is_grouped(model: Model, *parts: str, qk_norm: bool) -> bool:
    is_plain = not (model.norm_bias or model.learned_positions) and model.gated_ffn
    grouped = model.attention.kind is AttentionKind.GQA and model.attention.qk_norm is qk_norm
    return is_plain and grouped and _has_only(model, *parts)


def _has_windows_everywhere_or_nowhere(model: Model) -> bool:
    return len(set(model.windowed_layers)) == 1


def fits_llama(model: Model) -> bool:
    return _is_grouped(model, qk_norm=False) and not model.experts and not model.num_windowed_layers


def fits_mistral(model: Model) -> bool:
    windowed = _has_windows_everywhere_or_nowhere(model)
    return _is_grouped(model, qk_norm=False) and not model.experts and not model.attention.bias and windowed


def fits_mixtral(model: Model) -> bool:
    windowed = _has_windows_everywhere_or_nowhere(model)
    plain = _is_grouped(model, qk_norm=False) and not model.attention.bias and windowed
    x = model.experts
    return plain and x is not None and x.normalize_top_k and _is_plain_mixture(model)


def fits_qwen2(model: Model) -> bool:
    a, parts = model.attention, ("attention.output_bias", "attention.window_pattern")
    biased = a.bias and not a.has_output_bias
    return _is_grouped(model, *parts, qk_norm=False) and biased and not model.experts


def fits_qwen3(model: Model) -> bool:
    return _is_grouped(model, "attention.window_pattern", qk_norm=True) and not model.experts


def fits_qwen3_moe(model: Model) -> bool:
    plain = _is_grouped(model, qk_norm=True) and _has_windows_everywhere_or_nowhere(model)
    return plain and model.experts is not None and _is_plain_mixture(model)


def fits_olmo2(model: Model) -> bool:
    a, parts = model.attention, ("norm_placement", "attention.qk_norm_across_heads")
    plain = _is_grouped(model, *parts, qk_norm=True) and not model.num_windowed_layers and not model.experts
    whole_heads = a.num_heads * a.head_dim == model.hidden  # there is no key for another width
    return plain and whole_heads and a.qk_norm_across_heads and model.norm_placement is NormPlacement.AFTER


def fits_phi3(model: Model) -> bool:
    a = model.attention
    rotated = ("rope.rotated_share", "rope.short_factors", "rope.long_factors")
    plain = _is_grouped(model, *rotated, qk_norm=False) and not a.bias and not model.experts
    scaled = model.rope.scaling in (RopeScaling.NONE, RopeScaling.LONGROPE)
    whole_heads = a.num_heads * a.head_dim == model.hidden
    return plain and scaled and whole_heads and _has_windows_everywhere_or_nowhere(model)


_GEMMA = (
    "norm_placement", "zero_centered_norms", "scaled_embeddings", "logit_cap", "attention.score_divisor",
    "attention.window_pattern",
)  # fmt: skip


def _is_gemma(model: Model) -> bool:
    around = model.norm_placement is NormPlacement.BOTH and not model.experts
    return around and model.zero_centered_norms and model.scaled_embeddings


def fits_gemma2(model: Model) -> bool:
    return _is_gemma(model) and _is_grouped(model, *_GEMMA, "attention.score_cap", qk_norm=False)


def fits_gemma3(model: Model) -> bool:
    return _is_gemma(model) and _is_grouped(model, *_GEMMA, "windowed_rope", qk_norm=True)


def fits_gpt_oss(model: Model) -> bool:
    x, parts = model.experts, parts_of(model)
    own = GPT_OSS.keys() - {"attention.window_pattern"}
    return (
        x is not None
        and model.attention.kind is AttentionKind.GQA
        and not model.attention.qk_norm
        and all(parts.get(path) == GPT_OSS[path] for path in own)
        and parts.keys() <= GPT_OSS.keys() | {"rope.attention_factor"}
        and _is_plain_mixture(model)
        and x.normalize_top_k
    )


def _is_plain_mixture(model: Model) -> bool:
    """Softmax scores, an expert layer everywhere, nothing shared."""
    x = model.experts
    return (
        x is not None
        and x.router is Router.SOFTMAX
        and not (x.num_groups or x.num_dense_layers or x.shared_hidden)
        and x.routed_scale == 1
    )


def _is_deepseek(model: Model, *, router: Router, normalized: tuple[bool, ...]) -> bool:
    x = model.experts
    return (
        model.attention.kind is AttentionKind.MLA
        and _has_only(model)
        and x is not None
        and x.router is router
        and x.normalize_top_k in normalized
        and x.num_shared > 0
        and x.shared_hidden == x.num_shared * x.ffn_hidden
    )


def fits_deepseek_v2(model: Model) -> bool:
    return _is_deepseek(model, router=Router.SOFTMAX, normalized=(False,))


def fits_deepseek_v3(model: Model) -> bool:
    return _is_deepseek(model, router=Router.SIGMOID, normalized=(False, True))


_PARTIAL_ROPE = "rope.rotated_share"


def fits_glm4_moe(model: Model) -> bool:
    a, x = model.attention, model.experts
    plain = _is_grouped(model, _PARTIAL_ROPE, "attention.output_bias", qk_norm=a.qk_norm)
    if x is None or not plain or model.num_windowed_layers or (a.bias and a.has_output_bias):
        return False
    return x.router is Router.SIGMOID and x.num_shared > 0 and x.shared_hidden == x.num_shared * x.ffn_hidden


def fits_minimax_m2(model: Model) -> bool:
    x, own = model.experts, (_PARTIAL_ROPE, "attention.qk_norm_across_heads")
    plain = _is_grouped(model, *own, qk_norm=True) and not (model.attention.bias or model.num_windowed_layers)
    sigmoid = x is not None and x.router is Router.SIGMOID and x.normalize_top_k
    softmax = model if x is None else replace(model, experts=replace(x, router=Router.SOFTMAX))
    return plain and sigmoid and model.attention.qk_norm_across_heads and _is_plain_mixture(softmax)


# --- keys of config.json ---


def _layer_types(model: Model) -> list[str]:
    return ["sliding_attention" if windowed else "full_attention" for windowed in model.windowed_layers]


def qwen_keys(model: Model) -> dict[str, Any]:
    num = model.num_windowed_layers
    keys = {"use_sliding_window": num > 0, "max_window_layers": model.num_layers - num}
    return keys | ({"layer_types": _layer_types(model)} if model.attention.window_pattern else {})


def qwen2_keys(model: Model) -> dict[str, Any]:
    return qwen_keys(model) | {"attention_bias": None}  # always there


def phi3_keys(model: Model) -> dict[str, Any]:
    rope = model.rope
    keys: dict[str, Any] = {"partial_rotary_factor": rope.rotated_share}
    keys |= {"pad_token_id": None}  # without it a token beyond a small vocabulary
    if rope.scaling is RopeScaling.LONGROPE:
        context = round(rope.original_context * rope.factor)
        scaling: dict[str, Any] = {
            "type": "longrope",
            "short_factor": list(rope.short_factors),
            "long_factor": list(rope.long_factors),
        }
        scaling |= {"attention_factor": rope.attention_factor} if rope.attention_factor else {}
        scaling |= {} if context == rope.original_context * rope.factor else {"factor": rope.factor}
        keys |= {
            "rope_scaling": scaling,
            "max_position_embeddings": context,  # the ratio of both is the factor
            "original_max_position_embeddings": rope.original_context,
        }
    return keys


def gemma2_keys(model: Model) -> dict[str, Any]:
    a, activation = model.attention, _HIDDEN_ACTS[model.activation]
    return {
        "hidden_activation": activation,
        "hidden_act": activation,
        "layer_types": _layer_types(model),
        "query_pre_attn_scalar": a.score_divisor or a.head_dim,
        "attn_logit_softcapping": a.score_cap or None,
        "final_logit_softcapping": model.logit_cap or None,
    }


def gemma3_keys(model: Model) -> dict[str, Any]:
    """RoPE as in transformers 5, as no earlier key has a scaling for layers with a window."""
    windowed = model.windowed_rope or model.rope
    ropes = {"full_attention": model.rope, "sliding_attention": windowed}
    keys = gemma2_keys(model)
    if windowed.scaling is RopeScaling.NONE:
        return keys | {"rope_local_base_freq": windowed.theta}
    parameters = {
        name: {"rope_theta": rope.theta} | (scaling_keys(rope) or {"rope_type": "default"})
        for name, rope in ropes.items()
    }
    return keys | {"rope_theta": None, "rope_scaling": None, "rope_parameters": parameters}


def gpt_oss_keys(model: Model) -> dict[str, Any]:
    keys: dict[str, Any] = {"layer_types": _layer_types(model), "swiglu_limit": 7.0}
    if model.rope.scaling is RopeScaling.NONE:  # without a key it would be YaRN
        keys |= {"rope_scaling": {"rope_type": "default", "rope_theta": model.rope.theta}}
    return keys


_HIDDEN_ACTS = {
    Activation.SILU: "silu",
    Activation.GELU: "gelu",
    Activation.GELU_TANH: "gelu_pytorch_tanh",
    Activation.CLAMPED_SWIGLU: "silu",  # as gpt-oss says
}


def activation_key(model: Model) -> str:
    """`hidden_act` of a config.json."""
    return _HIDDEN_ACTS[model.activation]


def scaling_keys(rope: Rope) -> dict[str, Any] | None:
    """`rope_scaling` of a config.json; None without RoPE scaling."""
    if rope.scaling is RopeScaling.LINEAR:
        return {"rope_type": "linear", "factor": rope.factor}
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
        scaling |= {"attention_factor": rope.attention_factor} if rope.attention_factor else {}
        scaling |= {"mscale": rope.mscale} if rope.mscale else {}
        return scaling | ({"mscale_all_dim": rope.mscale_all_dims} if rope.mscale_all_dims else {})
    return None


# --- keys of experts ---


def mixtral_keys(x: Experts) -> dict[str, Any]:
    return {"intermediate_size": x.ffn_hidden, "num_local_experts": x.num_experts, "num_experts_per_tok": x.top_k}


def _plain_keys(x: Experts) -> dict[str, Any]:
    return {"moe_intermediate_size": x.ffn_hidden, "num_experts_per_tok": x.top_k, "norm_topk_prob": x.normalize_top_k}


def qwen3_keys(x: Experts) -> dict[str, Any]:
    return _plain_keys(x) | {"num_experts": x.num_experts, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _topk_method(x: Experts) -> str:
    if x.router is Router.SIGMOID:
        return "noaux_tc"
    return "group_limited_greedy" if x.num_groups else "greedy"


def deepseek_keys(x: Experts) -> dict[str, Any]:
    return _plain_keys(x) | {
        "n_routed_experts": x.num_experts,
        "n_shared_experts": x.num_shared,
        "first_k_dense_replace": x.num_dense_layers,
        "routed_scaling_factor": x.routed_scale,
        "scoring_func": x.router.value,
        "n_group": x.num_groups or 1,
        "topk_group": x.groups_per_token or 1,
        "topk_method": _topk_method(x),
    }


def glm4_moe_keys(model: Model) -> dict[str, Any]:
    return {
        "num_nextn_predict_layers": model.num_mtp_layers,
        "partial_rotary_factor": model.rope.rotated_share,
        "use_qk_norm": model.attention.qk_norm,
    }


def minimax_m2_keys(model: Model) -> dict[str, Any]:
    """`rotary_dim` is the key of published files; transformers makes the share of it."""
    return {"rotary_dim": model.rope.rotary_width(model.attention.head_dim)}


def deepseek_v3_keys(model: Model) -> dict[str, Any]:
    return {"num_nextn_predict_layers": model.num_mtp_layers}
