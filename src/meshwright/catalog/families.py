"""Model families: one record for each architecture of Hugging Face transformers.

A record says how the architecture's `config.json` is read and written, which models the config can express, what
its tensors are called in files, and why Meshwright does not train it where it does not. The catalogue, the training
code and the weights ask it; docs/guides/adding-a-model-family.md shows how to add one.

Our name of a tensor is its path in the model (`layers.3.attention.query.weight`). The tables of names give the part
after the number of the layer. A stack of experts [E, ...] is E tensors in a file: `{expert}` stands for their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.catalog.config_keys import ConfigKeys, decoder, grouped_attention, windowed_attention
from meshwright.specs.model import Attention, AttentionKind, Experts, Model, Router


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """An architecture of Hugging Face transformers.

    `trains` families also need `tensors` and `fits`. Windowed layers come last, dense layers of a mixture first.
    """

    architecture: str
    model_type: str  # in config.json
    read: Callable[[ConfigKeys], Model]
    not_trained: str = ""  # the reason why Meshwright does not train it; empty: it does
    tensors: Mapping[str, str] = field(default_factory=dict)  # our names within a layer -> names in files
    fits: Callable[[Model], bool] = lambda model: False  # True if its config can express the model
    expert_keys: Callable[[Experts], dict[str, Any]] = lambda experts: {}  # of its config.json
    knows_dense_layers: bool = True  # of a mixture: which layers are dense
    counts_full_layers: bool = False  # Qwen: windows are switched on by a flag, after `max_window_layers`

    @property
    def trains(self) -> bool:
        return not self.not_trained


# --- config.json to shapes ---


def _llama(c: ConfigKeys) -> Model:
    return decoder(c, grouped_attention(c, bias=c.flag("attention_bias", False)))


def _mistral(c: ConfigKeys) -> Model:
    return decoder(c, _mistral_attention(c))


def _mistral_attention(c: ConfigKeys) -> Attention:
    """Mistral's config class has 8 key/value heads; Mixtral's as well."""
    return windowed_attention(grouped_attention(c, kv_heads=8), c, num_layers=c.count("num_hidden_layers"))


def _mixtral(c: ConfigKeys) -> Model:
    experts = Experts(
        num_experts=c.count("num_local_experts"),
        top_k=c.count("num_experts_per_tok"),
        ffn_hidden=c.count("intermediate_size"),
    )
    return decoder(c, _mistral_attention(c), experts=experts, theta=1e6, epsilon=1e-5)


def _qwen2_attention(c: ConfigKeys) -> Attention:
    return _qwen_windows(grouped_attention(c, bias=True, kv_heads=32), c)


def _qwen_windows(attention: Attention, c: ConfigKeys) -> Attention:
    if not c.flag("use_sliding_window", False):
        c.value("sliding_window")  # ignored, as in transformers
        c.value("max_window_layers")
        if "sliding_attention" in (c.items("layer_types") or ()):
            c.refuse("layer_types: sliding layers with use_sliding_window false")
        return attention
    num_layers = c.count("num_hidden_layers")
    full = c.count("max_window_layers", num_layers, minimum=0)  # the first layers keep full attention
    return windowed_attention(attention, c, num_layers=max(0, num_layers - full))


def _qwen2(c: ConfigKeys) -> Model:
    return decoder(c, _qwen2_attention(c))


def _qwen_experts(c: ConfigKeys) -> Experts:
    """Every `decoder_sparse_step`-th layer is a mixture of experts, but not those in `mlp_only_layers`."""
    num_layers, step = c.count("num_hidden_layers"), c.count("decoder_sparse_step", 1)
    dense_only = c.items("mlp_only_layers") or []
    num_moe = sum(i not in dense_only and (i + 1) % step == 0 for i in range(num_layers))
    shared = c.count("shared_expert_intermediate_size", 0, minimum=0)
    renamed = "num_local_experts" if "num_local_experts" in c.values else "num_experts"  # transformers 5
    return Experts(
        num_experts=c.count(renamed),
        top_k=c.count("num_experts_per_tok"),
        ffn_hidden=c.count("moe_intermediate_size"),
        num_shared=int(shared > 0),
        shared_ffn_hidden=shared or None,
        num_dense_layers=num_layers - num_moe,
        normalize_top_k=c.flag("norm_topk_prob", False),
    )


def _qwen2_moe(c: ConfigKeys) -> Model:
    return decoder(c, _qwen2_attention(c), experts=_qwen_experts(c))


def _qwen3(c: ConfigKeys) -> Model:
    return decoder(c, _qwen3_attention(c))


def _qwen3_moe(c: ConfigKeys) -> Model:
    return decoder(c, _qwen3_attention(c), experts=_qwen_experts(c))


def _qwen3_attention(c: ConfigKeys) -> Attention:
    attention = grouped_attention(c, bias=c.flag("attention_bias", False), head_dim=128, kv_heads=32)
    return _qwen_windows(replace(attention, qk_norm=True), c)


def _deepseek(c: ConfigKeys, experts: Experts) -> Model:
    rope, num_heads = c.count("qk_rope_head_dim"), c.count("num_attention_heads")
    attention = Attention(
        kind=AttentionKind.MLA,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=c.count("qk_nope_head_dim") + rope,
        value_head_dim=c.count("v_head_dim"),
        query_lora_rank=c.count("q_lora_rank", 0, minimum=0),
        kv_lora_rank=c.count("kv_lora_rank"),
        rope_head_dim=rope,
    )
    c.require("num_key_value_heads", num_heads)
    c.require("head_dim", rope)  # transformers writes both, derived from the others
    c.require("qk_head_dim", attention.head_dim)
    c.require("moe_layer_freq", 1)
    return decoder(c, attention, experts=experts)


def _deepseek_v2(c: ConfigKeys) -> Model:
    """Softmax scores that are not normalized. `topk_method` decides whether groups limit the choice."""
    method = c.value("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        c.refuse(f"topk_method: {method!r}")
    c.require("scoring_func", "softmax")
    c.require("norm_topk_prob", False)
    return _deepseek(c, _deepseek_experts(c, router=Router.SOFTMAX, limited=method != "greedy"))


def _deepseek_v3(c: ConfigKeys) -> Model:
    """Sigmoid scores with a bias; groups limit the choice when there are several."""
    c.require("scoring_func", "sigmoid")
    c.require("topk_method", "noaux_tc")
    c.require("rope_interleave", True)
    experts = _deepseek_experts(
        c, router=Router.SIGMOID, limited=True, num_groups=8, scale=2.5, normalize=True, num_dense=3
    )
    num_mtp_layers = c.count("num_nextn_predict_layers", 0, minimum=0)
    return replace(_deepseek(c, experts), num_mtp_layers=num_mtp_layers)


def _deepseek_experts(
    c: ConfigKeys,
    *,
    router: Router,
    limited: bool,
    num_groups: int = 1,
    scale: float = 1.0,
    normalize: bool = False,
    num_dense: int = 0,
) -> Experts:
    """The first `first_k_dense_replace` layers are dense. One routing group is no limit."""
    num_groups = c.count("n_group", num_groups)
    limited = limited and num_groups > 1
    groups_per_token = c.count("topk_group", 4 if limited else num_groups)
    return Experts(
        num_experts=c.count("n_routed_experts"),
        top_k=c.count("num_experts_per_tok"),
        ffn_hidden=c.count("moe_intermediate_size"),
        num_shared=c.count("n_shared_experts", 0, minimum=0),
        num_dense_layers=c.count("first_k_dense_replace", num_dense, minimum=0),
        router=router,
        num_groups=num_groups if limited else 0,
        groups_per_token=groups_per_token if limited else 0,
        normalize_top_k=c.flag("norm_topk_prob", normalize),
        routed_scale=c.number("routed_scaling_factor", scale),
    )


def _gpt_oss(c: ConfigKeys) -> Model:
    """Sliding and full attention alternate, sliding first, unless `layer_types` says otherwise."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", True), head_dim=64)
    experts = Experts(
        num_experts=c.count("num_local_experts"),
        top_k=c.count("num_experts_per_tok"),
        ffn_hidden=c.count("intermediate_size"),
    )
    windowed = windowed_attention(
        attention, c, num_layers=(c.count("num_hidden_layers") + 1) // 2, order="alternating"
    )
    c.require("swiglu_alpha", 1.702)
    c.require("swiglu_limit", 7)
    return decoder(c, windowed, experts=experts, theta=150_000.0, epsilon=1e-5)


def _gemma2(c: ConfigKeys) -> Model:
    """Sliding and full attention alternate, sliding first."""
    attention = grouped_attention(c, head_dim=256)
    return decoder(
        c,
        windowed_attention(
            attention, c, num_layers=(c.count("num_hidden_layers") + 1) // 2, order="alternating"
        ),
        tied=True,
    )


def _gemma3(c: ConfigKeys) -> Model:
    """Every `sliding_window_pattern`-th layer has full attention (the sixth, by default)."""
    num_layers, pattern = c.count("num_hidden_layers"), c.count("sliding_window_pattern", 6)
    attention = grouped_attention(c, head_dim=256)
    return decoder(
        c,
        windowed_attention(attention, c, num_layers=num_layers - num_layers // pattern, order="interleaved"),
        tied=True,
    )


def _gpt2(c: ConfigKeys) -> Model:
    hidden, num_heads = c.count("n_embd"), c.count("n_head")
    return Model(
        name=c.name,
        hidden=hidden,
        num_layers=c.count("n_layer"),
        vocab=c.count("vocab_size"),
        attention=Attention(
            num_heads=num_heads, num_kv_heads=num_heads, head_dim=hidden // num_heads, bias=True
        ),
        ffn_hidden=c.count("n_inner", 4 * hidden),
        gated_ffn=False,
        tied_embeddings=c.flag("tie_word_embeddings", True),
        learned_positions=c.count("n_positions"),
        norm_bias=True,
        norm_epsilon=c.number("layer_norm_epsilon", 1e-5),
    )


# --- names of tensors in files ---

OUTSIDE_LAYERS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}

_NORMS = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}

_GROUPED_ATTENTION = {
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.query.bias": "self_attn.q_proj.bias",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.key.bias": "self_attn.k_proj.bias",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.value.bias": "self_attn.v_proj.bias",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.output.bias": "self_attn.o_proj.bias",
}

_LATENT_ATTENTION = {
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.query_down.weight": "self_attn.q_a_proj.weight",
    "attention.query_down.bias": "self_attn.q_a_proj.bias",
    "attention.query_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.query_up.weight": "self_attn.q_b_proj.weight",
    "attention.kv_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_down.bias": "self_attn.kv_a_proj_with_mqa.bias",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up.weight": "self_attn.kv_b_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.output.bias": "self_attn.o_proj.bias",
}

_DENSE = {
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
}

_MIXTRAL_EXPERTS = {
    "ffn.router.weight": "block_sparse_moe.gate.weight",
    "ffn.experts.gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "ffn.experts.up": "block_sparse_moe.experts.{expert}.w3.weight",
    "ffn.experts.down": "block_sparse_moe.experts.{expert}.w2.weight",
}

_EXPERTS = {
    "ffn.router.weight": "mlp.gate.weight",
    "ffn.router.bias_E": "mlp.gate.e_score_correction_bias",
    "ffn.experts.gate": "mlp.experts.{expert}.gate_proj.weight",
    "ffn.experts.up": "mlp.experts.{expert}.up_proj.weight",
    "ffn.experts.down": "mlp.experts.{expert}.down_proj.weight",
    "ffn.shared.gate.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared.up.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared.down.weight": "mlp.shared_experts.down_proj.weight",
}


# --- models that a config can express ---


def _is_grouped(model: Model, *, qk_norm: bool) -> bool:
    return model.attention.kind is AttentionKind.GQA and model.attention.qk_norm is qk_norm


def _fits_llama(model: Model) -> bool:
    return _is_grouped(model, qk_norm=False) and not model.experts and not model.attention.num_windowed_layers


def _fits_mistral(model: Model) -> bool:
    windowed = model.attention.num_windowed_layers in (0, model.num_layers)
    return _is_grouped(model, qk_norm=False) and not model.experts and not model.attention.bias and windowed


def _fits_mixtral(model: Model) -> bool:
    windowed = model.attention.num_windowed_layers in (0, model.num_layers)
    plain = _is_grouped(model, qk_norm=False) and not model.attention.bias and windowed
    x = model.experts
    return plain and x is not None and x.normalize_top_k and _is_plain_mixture(model)


def _fits_qwen3(model: Model) -> bool:
    return _is_grouped(model, qk_norm=True) and not model.experts


def _fits_qwen3_moe(model: Model) -> bool:
    plain = _is_grouped(model, qk_norm=True) and not model.attention.num_windowed_layers
    return plain and model.experts is not None and _is_plain_mixture(model)


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
        and x is not None
        and x.router is router
        and x.normalize_top_k in normalized
        and x.num_shared > 0
        and x.shared_hidden == x.num_shared * x.ffn_hidden
    )


def _fits_deepseek_v2(model: Model) -> bool:
    return _is_deepseek(model, router=Router.SOFTMAX, normalized=(False,))


def _fits_deepseek_v3(model: Model) -> bool:
    return _is_deepseek(model, router=Router.SIGMOID, normalized=(False, True))


# --- experts to config.json ---


def _mixtral_keys(x: Experts) -> dict[str, Any]:
    return {
        "intermediate_size": x.ffn_hidden,
        "num_local_experts": x.num_experts,
        "num_experts_per_tok": x.top_k,
    }


def _plain_keys(x: Experts) -> dict[str, Any]:
    return {
        "moe_intermediate_size": x.ffn_hidden,
        "num_experts_per_tok": x.top_k,
        "norm_topk_prob": x.normalize_top_k,
    }


def _qwen3_keys(x: Experts) -> dict[str, Any]:
    return _plain_keys(x) | {"num_experts": x.num_experts, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _topk_method(x: Experts) -> str:
    if x.router is Router.SIGMOID:
        return "noaux_tc"
    return "group_limited_greedy" if x.num_groups else "greedy"


def _deepseek_keys(x: Experts) -> dict[str, Any]:
    return _plain_keys(x) | {
        "n_routed_experts": x.num_experts,
        "n_shared_experts": x.num_shared,
        "first_k_dense_replace": x.num_dense_layers,
        "routed_scaling_factor": x.routed_scale,
        "scoring_func": x.router.value,
        "n_group": x.num_groups or 1,
        "topk_group": x.groups_per_token or 1,
        "topk_method": _topk_method(x),
        "num_nextn_predict_layers": 0,
    }


# --- the records ---

_RECORDS = (  # a model that names no family gets the first that fits
    ModelFamily(
        architecture="LlamaForCausalLM",
        model_type="llama",
        read=_llama,
        tensors=_NORMS | _GROUPED_ATTENTION | _DENSE,
        fits=_fits_llama,
    ),
    ModelFamily(
        architecture="MistralForCausalLM",
        model_type="mistral",
        read=_mistral,
        tensors=_NORMS | _GROUPED_ATTENTION | _DENSE,
        fits=_fits_mistral,
    ),
    ModelFamily(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        read=_mixtral,
        tensors=_NORMS | _GROUPED_ATTENTION | _MIXTRAL_EXPERTS,
        fits=_fits_mixtral,
        expert_keys=_mixtral_keys,
    ),
    ModelFamily(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        read=_qwen3,
        tensors=_NORMS | _GROUPED_ATTENTION | _DENSE,
        fits=_fits_qwen3,
        knows_dense_layers=False,
        counts_full_layers=True,
    ),
    ModelFamily(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        read=_qwen3_moe,
        tensors=_NORMS | _GROUPED_ATTENTION | _EXPERTS,
        fits=_fits_qwen3_moe,
        expert_keys=_qwen3_keys,
        knows_dense_layers=False,
        counts_full_layers=True,
    ),
    ModelFamily(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        read=_deepseek_v2,
        tensors=_NORMS | _LATENT_ATTENTION | _DENSE | _EXPERTS,
        fits=_fits_deepseek_v2,
        expert_keys=_deepseek_keys,
    ),
    ModelFamily(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        read=_deepseek_v3,
        tensors=_NORMS | _LATENT_ATTENTION | _DENSE | _EXPERTS,
        fits=_fits_deepseek_v3,
        expert_keys=_deepseek_keys,
    ),
    ModelFamily(
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        read=_gpt2,
        not_trained="learned positions and LayerNorm",
    ),
    ModelFamily(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        read=_gemma2,
        not_trained="norms around each block and capped logits",
    ),
    ModelFamily(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        read=_gemma3,
        not_trained="norms around each block and two rotary bases",
    ),
    ModelFamily(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        read=_gpt_oss,
        not_trained="attention sinks and biased experts",
    ),
    ModelFamily(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        read=_qwen2,
        not_trained="biases of some projections only",
    ),
    ModelFamily(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        read=_qwen2_moe,
        not_trained="biases of some projections only and a gated shared expert",
    ),
)

FAMILIES: dict[str, ModelFamily] = {record.architecture: record for record in _RECORDS}
"""Every known family, by architecture."""


def trained_families() -> tuple[ModelFamily, ...]:
    """The families that Meshwright trains: their logits and gradients equal those of transformers."""
    return tuple(family for family in FAMILIES.values() if family.trains)
