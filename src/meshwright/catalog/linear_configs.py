"""config.json of models with layers of linear attention to shapes: Qwen3-Next, Qwen3.5, OLMo Hybrid and Kimi Linear.

Source of the keys and their defaults: the configuration classes of Hugging Face transformers (qwen3_next, qwen3_5,
qwen3_5_moe, olmo_hybrid, kimi_linear), and the class beside Kimi Linear's weights, which has other names for some keys
(vLLM has a copy: transformers_utils/configs/kimi_linear.py).
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.catalog.config_keys import ConfigKeys, decoder, grouped_attention, partial_rope, shortest_pattern
from meshwright.errors import InputError
from meshwright.specs.model import Attention, AttentionKind, Experts, LinearAttention, LinearKind, Model, Rope, Router

_LAYER_TYPES = {"linear_attention": True, "full_attention": False}
_NAMES = {is_linear: name for name, is_linear in _LAYER_TYPES.items()}


def read_qwen3_next(c: ConfigKeys) -> Model:
    """Gated DeltaNet in three of four layers, gated full attention in the fourth; experts beside a gated shared one."""
    num_layers, step = c.count("num_hidden_layers"), c.count("decoder_sparse_step", 1)
    dense_only = c.items("mlp_only_layers") or []
    num_moe = sum(i not in dense_only and (i + 1) % step == 0 for i in range(num_layers))
    experts = _qwen_experts(c, num_experts=512, top_k=10, num_dense_layers=num_layers - num_moe)
    experts = replace(experts, normalize_top_k=c.flag("norm_topk_prob", True))
    return _qwen(c, experts=experts, kv_heads=2)


def read_qwen3_5(c: ConfigKeys) -> Model:
    """The dense language models of Qwen3.5: the same mixers."""
    _without_images(c)
    return _qwen(c, experts=None, kv_heads=4)


def read_qwen3_5_moe(c: ConfigKeys) -> Model:
    """The mixtures of Qwen3.5: every layer has experts; `mlp_only_layers` has no effect."""
    _without_images(c)
    c.value("mlp_only_layers")  # ignored, as in transformers
    return _qwen(c, experts=_qwen_experts(c, num_experts=256, top_k=8), kv_heads=2)


def _without_images(c: ConfigKeys) -> None:
    """Keys of text_config that do not change what text costs: positions of images, the format of states."""
    c.value("mamba_ssm_dtype")
    c.require("mtp_use_dedicated_embeddings", False)
    rope = c.section("rope_parameters")
    for key in ("mrope_section", "mrope_interleaved"):
        rope.value(key)


def _qwen_experts(c: ConfigKeys, *, num_experts: int, top_k: int, num_dense_layers: int = 0) -> Experts:
    renamed = "num_local_experts" if "num_local_experts" in c.values else "num_experts"  # transformers 5
    shared = c.count("shared_expert_intermediate_size", 512, minimum=0)
    return Experts(
        num_experts=c.count(renamed, num_experts),
        top_k=c.count("num_experts_per_tok", top_k),
        ffn_hidden=c.count("moe_intermediate_size", 512),
        num_shared=int(shared > 0),
        shared_ffn_hidden=shared or None,
        num_dense_layers=num_dense_layers,
        shared_gate=True,
    )


def _qwen(c: ConfigKeys, *, experts: Experts | None, kv_heads: int) -> Model:
    c.require("attn_output_gate", True)
    attention = grouped_attention(c, bias=c.flag("attention_bias", False), head_dim=256, kv_heads=kv_heads)
    model = decoder(
        c,
        replace(attention, qk_norm=True, output_gate=True),
        experts=experts,
        rope=partial_rope(c, theta=10_000.0, share=0.25),
    )
    return replace(
        model,
        zero_centered_norms=True,
        num_mtp_layers=c.count("mtp_num_hidden_layers", 0, minimum=0),
        linear_attention=_gated_delta_net(c),
    )


def _gated_delta_net(
    c: ConfigKeys, *, key_heads: int = 16, value_heads: int = 32, key_dim: int = 128, value_dim: int = 128
) -> LinearAttention | None:
    """The linear layers; None where all have full attention. The arguments are the sizes of a config without
    the keys."""
    layers = _layers(c)
    linear = LinearAttention(
        num_key_heads=c.count("linear_num_key_heads", key_heads),
        num_value_heads=c.count("linear_num_value_heads", value_heads),
        key_head_dim=c.count("linear_key_head_dim", key_dim),
        value_head_dim=c.count("linear_value_head_dim", value_dim),
        conv_kernel=c.count("linear_conv_kernel_dim", 4),
        pattern=shortest_pattern(layers),
    )
    return linear if any(layers) else None


def _layers(c: ConfigKeys) -> list[bool]:
    """For each layer True where `layer_types` has linear attention, or by the interval of full attention."""
    num_layers, types = c.count("num_hidden_layers"), c.items("layer_types")
    interval = c.count("full_attention_interval", 4)
    if types is None:
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if len(types) != num_layers or any(kind not in tuple(_LAYER_TYPES) for kind in types):
        known = ", ".join(_LAYER_TYPES)
        raise InputError(f"{c.name}: layer_types", got=f"{len(types)} entries", allowed=f"{num_layers} of {known}")
    return [_LAYER_TYPES[kind] for kind in types]


def read_olmo_hybrid(c: ConfigKeys) -> Model:
    """Gated DeltaNet in three of four layers, OLMo 3's full attention without windows in the others.

    Norms are before the blocks of linear layers and after the blocks of the others, which costs the same.
    """
    attention = grouped_attention(c, bias=c.flag("attention_bias", False))
    for key in ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"):
        c.value(key)  # of initialization
    c.value("linear_allow_neg_eigval")  # a factor of 2 in the kernel
    num_layers = c.count("num_hidden_layers")
    full = range(3, num_layers, 4) if num_layers > 3 else (num_layers - 1,)
    c.default({"layer_types": [_NAMES[i not in full] for i in range(num_layers)]})
    heads, width = attention.num_heads, 3 * c.count("hidden_size") // 4
    key_dim = c.count("linear_key_head_dim", max(width // c.count("linear_num_key_heads", heads), 1))
    linear = _gated_delta_net(c, key_heads=heads, value_heads=heads, key_dim=key_dim, value_dim=2 * key_dim)
    return replace(
        decoder(c, replace(attention, qk_norm=True, qk_norm_across_heads=True), theta=500_000.0),
        linear_attention=linear,
    )


def read_kimi_linear(c: ConfigKeys) -> Model:
    """Kimi Delta Attention, latent attention without positions in the layers that are listed, DeepSeek-V3's experts."""
    c.pass_over("kimi_linear")
    c.require("num_key_value_heads", c.count("num_attention_heads"))
    return replace(
        decoder(c, _kimi_attention(c), experts=_kimi_experts(c), rope=Rope(), epsilon=1e-5),
        num_mtp_layers=c.count("num_nextn_predict_layers", 0, minimum=0),
        linear_attention=_kimi_delta(c),
    )


def _kimi_attention(c: ConfigKeys) -> Attention:
    num_heads, rope = c.count("num_attention_heads"), c.count("qk_rope_head_dim", 64, minimum=0)
    return Attention(
        kind=AttentionKind.MLA,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=c.count("qk_nope_head_dim", 128) + rope,
        value_head_dim=c.count("v_head_dim", 128),
        query_lora_rank=c.count("q_lora_rank", 0, null=0, minimum=0),
        kv_lora_rank=c.count("kv_lora_rank", 512),
        rope_head_dim=rope,
    )


def _kimi_experts(c: ConfigKeys) -> Experts:
    groups = c.count(c.named("num_expert_group", "n_group"), 1)
    chosen = c.count("topk_group", 1)
    return Experts(
        num_experts=c.count(c.named("num_experts", "num_local_experts", "n_routed_experts")),
        top_k=c.count(c.named("num_experts_per_token", "num_experts_per_tok")),
        ffn_hidden=c.count("moe_intermediate_size"),
        num_shared=c.count(c.named("num_shared_experts", "n_shared_experts"), 1, minimum=0),
        num_dense_layers=_kimi_dense_layers(c),
        router=Router.SIGMOID,
        num_groups=groups if groups > 1 else 0,
        groups_per_token=chosen if groups > 1 else 0,
        normalize_top_k=c.flag(c.named("moe_renormalize", "norm_topk_prob"), True),
        routed_scale=c.number("routed_scaling_factor", 1.0),
    )


def _kimi_dense_layers(c: ConfigKeys) -> int:
    types, num = c.items("mlp_layer_types"), c.count("first_k_dense_replace", 1, minimum=0)
    c.require("dense_ffn_hidden", c.value("intermediate_size"))
    if types is None:
        return num
    num = sum(kind == "dense" for kind in types)
    if types != ["dense"] * num + ["sparse"] * (c.count("num_hidden_layers") - num):
        c.refuse("mlp_layer_types: dense layers after mixtures")
    return num


def _kimi_delta(c: ConfigKeys) -> LinearAttention:
    linear = c.section("linear_attn_config")
    heads, width, kernel = "num_heads", "head_dim", "short_conv_kernel_size"
    if not linear.values:
        linear, heads, width, kernel = c, "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"
    num_heads, head_dim = linear.count(heads), linear.count(width)
    return LinearAttention(
        kind=LinearKind.KDA,
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_head_dim=head_dim,
        value_head_dim=head_dim,
        conv_kernel=linear.count(kernel, 4),
        pattern=shortest_pattern(_kimi_layers(c)),
    )


def _kimi_layers(c: ConfigKeys) -> list[bool]:
    """For each layer True where it has linear attention."""
    linear, num_layers = c.section("linear_attn_config"), c.count("num_hidden_layers")
    if c.items("layer_types") is not None:
        return _layers(c)
    if not linear.values:  # transformers': full attention in the fifth layer and every fourth after it
        return [layer == 0 or layer % 4 != 0 for layer in range(num_layers)]
    kda, full = (linear.items(key) or [] for key in ("kda_layers", "full_attn_layers"))
    listed = [*kda, *full]
    if not kda or len(listed) != num_layers or set(map(repr, listed)) != set(map(repr, range(1, num_layers + 1))):
        raise InputError(
            f"{c.name}: linear_attn_config: kda_layers and full_attn_layers name every layer once, from 1",
            got=f"{len(listed)} layers", allowed=f"1 to {num_layers}, at least one of them in kda_layers",
        )  # fmt: skip
    return [layer in kda for layer in range(1, num_layers + 1)]
