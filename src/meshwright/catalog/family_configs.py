"""config.json to shapes: one function for each architecture, from its keys to a `Model`."""

from __future__ import annotations

from dataclasses import replace

from meshwright.catalog.config_keys import (
    ConfigKeys,
    activation_of,
    decoder,
    grouped_attention,
    longrope,
    partial_rope,
    rope_of,
    rope_per_layer_type,
    windowed_attention,
)
from meshwright.errors import InputError
from meshwright.specs.model import (
    Activation,
    Attention,
    AttentionKind,
    BlockKind,
    Experts,
    Model,
    NormPlacement,
    Rope,
    RopeScaling,
    Router,
    StateSpace,
)


def read_llama(c: ConfigKeys) -> Model:
    return decoder(c, grouped_attention(c, bias=c.flag("attention_bias", False)))


def read_mistral(c: ConfigKeys) -> Model:
    return decoder(c, _mistral_attention(c, window=4096))


def _mistral_attention(c: ConfigKeys, *, window: int | None = None) -> Attention:
    """Mistral's config class has 8 key/value heads; Mixtral's as well."""
    everywhere = [True] * c.count("num_hidden_layers")
    return windowed_attention(grouped_attention(c, kv_heads=8), c, usual=everywhere, window=window)


def read_mixtral(c: ConfigKeys) -> Model:
    experts = Experts(
        num_experts=c.count("num_local_experts"),
        top_k=c.count("num_experts_per_tok"),
        ffn_hidden=c.count("intermediate_size"),
    )
    return decoder(c, _mistral_attention(c), experts=experts, theta=1e6, epsilon=1e-5)


def _qwen_windows(attention: Attention, c: ConfigKeys, *, everywhere: bool = False) -> Attention:
    """Windows behind a flag, after `max_window_layers`; in Qwen3's mixtures `everywhere`, without regard to
    other keys."""
    if not c.flag("use_sliding_window", False):
        c.value("sliding_window")  # ignored, as in transformers
        c.value("max_window_layers")
        if "sliding_attention" in (c.items("layer_types") or ()):
            c.refuse("layer_types: sliding layers with use_sliding_window false")
        return attention
    num_layers = c.count("num_hidden_layers")
    full = c.count("max_window_layers", 28, minimum=0)  # the first layers keep full attention
    if everywhere:
        full = 0
        if "full_attention" in (c.items("layer_types") or ()):
            c.refuse("layer_types: full layers of a mixture, which transformers ignores")
    return windowed_attention(attention, c, usual=[i >= full for i in range(num_layers)], window=4096)


def read_qwen2(c: ConfigKeys) -> Model:
    attention = grouped_attention(c, bias=True, kv_heads=32)
    return decoder(c, _qwen_windows(replace(attention, output_bias=False), c))


def _qwen_experts(c: ConfigKeys, *, shared_width: int = 0, shared_gate: bool = False) -> Experts:
    """Every `decoder_sparse_step`-th layer is a mixture of experts, but not those in `mlp_only_layers`."""
    num_layers, step = c.count("num_hidden_layers"), c.count("decoder_sparse_step", 1)
    dense_only = c.items("mlp_only_layers") or []
    num_moe = sum(i not in dense_only and (i + 1) % step == 0 for i in range(num_layers))
    shared = c.count("shared_expert_intermediate_size", shared_width, minimum=0)
    renamed = "num_local_experts" if "num_local_experts" in c.values else "num_experts"  # transformers 5
    return Experts(
        num_experts=c.count(renamed),
        top_k=c.count("num_experts_per_tok"),
        ffn_hidden=c.count("moe_intermediate_size"),
        num_shared=int(shared > 0),
        shared_ffn_hidden=shared or None,
        num_dense_layers=num_layers - num_moe,
        normalize_top_k=c.flag("norm_topk_prob", False),
        shared_gate=shared_gate,
    )


def read_qwen2_moe(c: ConfigKeys) -> Model:
    """Sliding windows, where they are used, in every other one of the first `max_window_layers` layers."""
    attention = grouped_attention(c, bias=c.flag("qkv_bias", True), kv_heads=16)
    attention = replace(attention, output_bias=False)
    is_windowed, last = c.flag("use_sliding_window", False), c.count("max_window_layers", 28, minimum=0)
    usual = [is_windowed and sliding and i < last for i, sliding in enumerate(_alternating(c))]
    attention = windowed_attention(attention, c, usual=usual, window=4096 if is_windowed else None)
    experts = _qwen_experts(c, shared_width=5632, shared_gate=True)
    return decoder(c, attention, experts=experts)


def read_qwen3(c: ConfigKeys) -> Model:
    return decoder(c, _qwen3_attention(c, head_dim=128, kv_heads=32))


def read_qwen3_moe(c: ConfigKeys) -> Model:
    return decoder(c, _qwen3_attention(c, kv_heads=4, everywhere=True), experts=_qwen_experts(c))


def _qwen3_attention(
    c: ConfigKeys, *, head_dim: int | None = None, kv_heads: int, everywhere: bool = False
) -> Attention:
    attention = grouped_attention(c, bias=c.flag("attention_bias", False), head_dim=head_dim, kv_heads=kv_heads)
    c.require("use_qk_norm", True)  # files of Qwen3-Coder have both, and transformers ignores them
    c.require("qkv_bias", False)
    return _qwen_windows(replace(attention, qk_norm=True), c, everywhere=everywhere)


def _deepseek(c: ConfigKeys, experts: Experts) -> Model:
    rope, num_heads = c.count("qk_rope_head_dim"), c.count("num_attention_heads")
    attention = Attention(
        kind=AttentionKind.MLA,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=c.count("qk_nope_head_dim") + rope,
        value_head_dim=c.count("v_head_dim"),
        query_lora_rank=c.count("q_lora_rank", 1536, null=0, minimum=0),
        kv_lora_rank=c.count("kv_lora_rank"),
        rope_head_dim=rope,
    )
    c.require("num_key_value_heads", num_heads)
    c.require("head_dim", rope)  # transformers writes both, derived from the others
    c.require("qk_head_dim", attention.head_dim)
    c.require("moe_layer_freq", 1)
    return decoder(c, attention, experts=experts)


def read_deepseek_v2(c: ConfigKeys) -> Model:
    """Softmax scores that are not normalized. `topk_method` decides whether groups limit the choice."""
    method = c.value("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        c.refuse(f"topk_method: {method!r}")
    c.require("scoring_func", "softmax")
    c.require("norm_topk_prob", False)
    return _deepseek(c, _deepseek_experts(c, router=Router.SOFTMAX, limited=method != "greedy"))


def read_deepseek_v3(c: ConfigKeys) -> Model:
    """Sigmoid scores with a bias; groups limit the choice when there are several."""
    c.require("scoring_func", "sigmoid")
    c.require("topk_method", "noaux_tc")
    c.require("rope_interleave", True)
    experts = _deepseek_experts(
        c, router=Router.SIGMOID, limited=True, num_groups=8, scale=2.5, normalize=True, num_dense=3, num_shared=1
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
    num_shared: int = 2,
    topk_group: int = 4,
) -> Experts:
    """The first `first_k_dense_replace` layers are dense. One routing group is no limit."""
    num_groups = c.count("n_group", num_groups)
    limited = limited and num_groups > 1
    groups_per_token = c.count("topk_group", topk_group if limited else num_groups)
    return Experts(
        num_experts=c.count("n_routed_experts"),
        top_k=c.count("num_experts_per_tok"),
        ffn_hidden=c.count("moe_intermediate_size"),
        num_shared=c.count("n_shared_experts", num_shared, null=0, minimum=0),
        num_dense_layers=c.count("first_k_dense_replace", num_dense, minimum=0),
        router=router,
        num_groups=num_groups if limited else 0,
        groups_per_token=groups_per_token if limited else 0,
        normalize_top_k=c.flag("norm_topk_prob", normalize),
        routed_scale=c.number("routed_scaling_factor", scale),
    )


def read_glm4_moe(c: ConfigKeys) -> Model:
    """GLM-4.5 to 4.7: DeepSeek-V3's experts beside grouped attention whose heads are rotated in half."""
    c.require("scoring_func", "sigmoid")
    c.require("topk_method", "noaux_tc")
    attention = grouped_attention(c, bias=c.flag("attention_bias", False), kv_heads=8)
    attention = replace(attention, output_bias=False, qk_norm=c.flag("use_qk_norm", False))
    experts = _deepseek_experts(
        c, router=Router.SIGMOID, limited=True, normalize=True, num_dense=1, num_shared=1, topk_group=1
    )
    rope = partial_rope(c, theta=10_000.0, share=0.5)
    num_mtp_layers = c.count("num_nextn_predict_layers", 0, minimum=0)
    return replace(decoder(c, attention, experts=experts, epsilon=1e-5, rope=rope), num_mtp_layers=num_mtp_layers)


def read_minimax_m2(c: ConfigKeys) -> Model:
    """Sigmoid scores with a bias, experts in all layers, and norms of queries and keys over all heads."""
    attention = grouped_attention(c, head_dim=128, kv_heads=8)
    c.pass_over("minimax_m2")
    if set(c.items("attn_type_list") or [1]) != {1}:
        c.refuse("attn_type_list: layers of another attention than softmax")
    for ignored in ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta",
                    "mlp_intermediate_size", "mtp_transformer_layers", "shared_moe_mode"):  # fmt: skip
        c.value(ignored)
    share = c.count("rotary_dim", attention.head_dim) / attention.head_dim
    return decoder(
        c,
        replace(attention, qk_norm=True, qk_norm_across_heads=True),
        experts=Experts(
            num_experts=c.count("num_local_experts", 256),
            top_k=c.count("num_experts_per_tok", 8),
            ffn_hidden=c.count("intermediate_size"),
            router=Router.SIGMOID,
        ),
        rope=partial_rope(c, theta=5_000_000.0, share=share),
    )


def read_olmo2(c: ConfigKeys) -> Model:
    """Norms of outputs, and of queries and keys over all heads."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", False))
    attention = replace(attention, qk_norm=True, qk_norm_across_heads=True)
    return replace(decoder(c, attention, epsilon=1e-5), norm_placement=NormPlacement.AFTER)


def read_phi3(c: ConfigKeys) -> Model:
    """Phi-3 and Phi-4: a Llama with a window in all layers or in none, LongRoPE, and heads that are rotated in part."""
    everywhere = [True] * c.count("num_hidden_layers")
    for key, same in (("lm_head_bias", False), ("interpolate_factor", 1), ("full_attn_mod", 1)):
        c.require(key, same)
    attention = windowed_attention(grouped_attention(c), c, usual=everywhere)
    rope = longrope(c, theta=10_000.0, context=4096)
    num_divisors = {len(rope.short_factors), len(rope.long_factors)}
    if rope.scaling is RopeScaling.LONGROPE and num_divisors != {rope.rotary_width(attention.head_dim) // 2}:
        c.refuse("rope_scaling: another number of factors than of frequencies")
    return decoder(c, attention, rope=rope, epsilon=1e-5)


def read_gpt_oss(c: ConfigKeys) -> Model:
    """Sliding and full attention alternate, sliding first, unless `layer_types` says otherwise."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", True), head_dim=64, kv_heads=8)
    experts = Experts(
        num_experts=c.count("num_local_experts"),
        top_k=c.count("num_experts_per_tok"),
        ffn_hidden=c.count("intermediate_size"),
        bias=True,
    )
    attention = windowed_attention(replace(attention, sinks=True), c, usual=_alternating(c), window=128)
    c.require("swiglu_alpha", 1.702)
    c.require("swiglu_limit", 7)
    c.require("experts_per_token", experts.top_k)
    for ignored in ("hidden_act", "initial_context_length"):  # by transformers as well
        c.value(ignored)
    return decoder(
        c, attention, experts=experts, epsilon=1e-5, rope=_gpt_oss_rope(c), activation=Activation.CLAMPED_SWIGLU
    )


def _gpt_oss_rope(c: ConfigKeys) -> Rope:
    """Without keys of RoPE scaling it is YaRN all the same."""
    if c.value("rope_parameters") is not None or c.value("rope_scaling"):
        return rope_of(c, theta=150_000.0)
    return Rope(
        theta=c.number("rope_theta", 150_000.0, minimum=1),
        scaling=RopeScaling.YARN,
        factor=32.0,
        original_context=4096,
        truncate=False,
    )


def _alternating(c: ConfigKeys) -> list[bool]:
    """True for the first layer and every second one after it."""
    return [index % 2 == 0 for index in range(c.count("num_hidden_layers"))]


def _gemma_attention(c: ConfigKeys, usual: list[bool]) -> Attention:
    attention = grouped_attention(c, bias=c.flag("attention_bias", False), head_dim=256, kv_heads=4)
    attention = replace(attention, score_divisor=c.count("query_pre_attn_scalar", 256))
    return windowed_attention(attention, c, usual=usual, window=4096)


def _gemma(c: ConfigKeys, attention: Attention, *, logit_cap: float, rope: Rope | None = None) -> Model:
    c.value("hidden_act")  # ignored, as in transformers
    activation = activation_of(c, "hidden_activation", "gelu_pytorch_tanh")
    return replace(
        decoder(c, attention, tied=True, activation=activation, rope=rope),
        norm_placement=NormPlacement.BOTH,
        zero_centered_norms=True,
        scaled_embeddings=True,
        logit_cap=c.limit("final_logit_softcapping", logit_cap),
    )


def read_gemma2(c: ConfigKeys) -> Model:
    """Sliding and full attention alternate, sliding first; scores and logits are capped."""
    attention = _gemma_attention(c, _alternating(c))
    attention = replace(attention, score_cap=c.limit("attn_logit_softcapping", 50.0))
    return _gemma(c, attention, logit_cap=30.0)


def read_gemma3(c: ConfigKeys) -> Model:
    """Every `sliding_window_pattern`-th layer has full attention (the sixth, by default), and a RoPE of its own."""
    num_layers, pattern = c.count("num_hidden_layers"), c.count("sliding_window_pattern", 6)
    if c.items("layer_types") is None:
        c.require("_sliding_window_pattern", pattern)
    c.value("_sliding_window_pattern")  # what `layer_types` was made from
    attention = _gemma_attention(c, [(index + 1) % pattern != 0 for index in range(num_layers)])
    rope, windowed_rope = rope_per_layer_type(c, theta=1e6, windowed_theta=1e4)
    model = _gemma(c, replace(attention, qk_norm=True), logit_cap=0.0, rope=rope)
    return replace(model, windowed_rope=windowed_rope)


BLOCK_LETTERS = {
    "linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip


def read_nemotron_h(c: ConfigKeys) -> Model:
    """Layers of one block each: Mamba-2, attention without positions, an ungated feed-forward block or a mixture."""
    written = _block_letters(c, "hybrid_override_pattern", "layers_block_type")
    num_mtp_layers = c.count("num_nextn_predict_layers", 0, minimum=0)
    mtp_pattern = _block_letters(c, "mtp_hybrid_override_pattern", "mtp_layers_block_type", usual="*E")
    heads, hidden = c.count("mamba_num_heads", 128), c.count("hidden_size")
    c.pass_over("nemotron_h")
    return Model(
        name=c.name,
        hidden=hidden,
        num_layers=c.count("num_hidden_layers", len(written)),
        vocab=c.count("vocab_size"),
        attention=Attention(
            num_heads=c.count("num_attention_heads", 32),
            num_kv_heads=c.count("num_key_value_heads", 8),
            head_dim=c.count("attention_head_dim" if "attention_head_dim" in c.values else "head_dim", 128),
        ),
        ffn_hidden=c.count("intermediate_size", 21504),
        experts=_nemotron_h_experts(c) if BlockKind.MIXTURE in written else None,
        gated_ffn=False,
        ffn_bias=c.flag("mlp_bias", False),
        state_space=StateSpace(
            state_size=c.count("ssm_state_size", 128),
            num_heads=heads,
            head_dim=c.count("mamba_head_dim", 64),
            num_groups=c.count("n_groups", 8),
            conv_kernel=c.count("conv_kernel", 4),
            chunk_size=c.count("chunk_size", 128),
            bias=c.flag("use_bias", False),
        ),
        layer_pattern=written,
        num_mtp_layers=num_mtp_layers,
        mtp_pattern=mtp_pattern if num_mtp_layers else "",
        norm_epsilon=c.number("layer_norm_epsilon", 1e-5),
    )


def _block_letters(c: ConfigKeys, pattern_key: str, list_key: str, *, usual: str = "") -> str:
    """Blocks in letters, from either of the keys that name them; `usual` where both are absent."""
    written = c.value(pattern_key)
    if not isinstance(written, str):
        kinds = c.items(list_key)
        written = usual if kinds is None else "".join(BLOCK_LETTERS.get(str(kind), "?") for kind in kinds)
    if not written or set(written) - set(BlockKind):
        raise InputError(
            f"{c.name}: layers of Nemotron-H that are read are M (Mamba-2), * (attention), - (feed-forward) and E "
            "(mixture of experts)",
            got=c.value(pattern_key) or c.value(list_key),
        )
    return written


def _nemotron_h_experts(c: ConfigKeys) -> Experts:
    """DeepSeek-V3's router over ungated experts; all shared experts are one block of a width of its own."""
    c.require("mlp_bias", False)  # which shared experts would have as well
    num_groups = c.count("n_group", 1)
    return Experts(
        num_experts=c.count("n_routed_experts", 8),
        top_k=c.count("num_experts_per_tok", 2),
        ffn_hidden=c.count("moe_intermediate_size", 7688),
        num_shared=c.count("n_shared_experts", 1),
        shared_ffn_hidden=c.count("moe_shared_expert_intermediate_size", 7688),
        latent=0 if c.value("moe_latent_size") is None else c.count("moe_latent_size"),
        router=Router.SIGMOID,
        num_groups=num_groups if num_groups > 1 else 0,
        groups_per_token=c.count("topk_group", 1) if num_groups > 1 else 0,
        normalize_top_k=c.flag("norm_topk_prob", True),
        routed_scale=c.number("routed_scaling_factor", 1.0),
    )


def read_gpt2(c: ConfigKeys) -> Model:
    """Blocks with biases everywhere, LayerNorm and learned positions."""
    hidden, num_heads = c.count("n_embd"), c.count("n_head")
    c.require("activation_function", "gelu_new", "gelu", "gelu_pytorch_tanh")
    c.require("scale_attn_weights", True)
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        c.require(key, False)
    for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        c.require(key, 0)
    c.value("n_ctx")  # an older name of n_positions, which transformers ignores
    return Model(
        name=c.name,
        hidden=hidden,
        num_layers=c.count("n_layer"),
        vocab=c.count("vocab_size"),
        attention=Attention(num_heads=num_heads, num_kv_heads=num_heads, head_dim=hidden // num_heads, bias=True),
        ffn_hidden=c.count("n_inner", 4 * hidden),
        gated_ffn=False,
        ffn_bias=True,
        tied_embeddings=c.flag("tie_word_embeddings", True),
        learned_positions=c.count("n_positions"),
        norm_bias=True,
        norm_epsilon=c.number("layer_norm_epsilon", 1e-5),
    )
