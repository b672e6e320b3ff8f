"""config.json of families that are planned and not trained, with layers of other families: from keys to a `Model`.

Source of the keys and their defaults: the configuration classes of Hugging Face transformers
(https://github.com/huggingface/transformers, src/transformers/models). Keys that change numbers and not cost are read
over: positions, multipliers, temperatures, the scale of logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshwright.catalog.config_keys import (
    ConfigKeys,
    activation_of,
    decoder,
    grouped_attention,
    in_layers,
    windowed_attention,
)
from meshwright.errors import InputError
from meshwright.specs.model import Attention, AttentionKind, Experts, FullLayers, Model, NormPlacement, Rope, Router

_POSITIONS = (
    "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "rope_interleave",
    "no_rope_layers", "no_rope_layer_interval",
)  # fmt: skip
_MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
_TEMPERATURES = ("attn_temperature_tuning", "floor_scale", "attn_scale")


def planned(
    c: ConfigKeys, attention: Attention, *, experts: Experts | None = None, tied: bool = False, gated: bool = True
) -> Model:
    """A decoder without its positions. Blocks that are not gated have any activation of one operand."""
    for key in (*_POSITIONS, *_MULTIPLIERS, *_TEMPERATURES):
        c.value(key)
    if not gated:
        c.require("hidden_act", "relu2", "relu", "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "silu")
    activation = activation_of(c, "hidden_act") if gated else activation_of(ConfigKeys({}, name=c.name), "none")
    model = decoder(c, attention, experts=experts, tied=tied, rope=Rope(), activation=activation)
    return replace(model, gated_ffn=gated)


def _biases(c: ConfigKeys, model: Model, *, key: str = "mlp_bias", usual: bool = False) -> Model:
    """`model` with biases of its feed-forward blocks."""
    if model.experts is None:
        return replace(model, ffn_bias=c.flag(key, usual))
    c.require(key, False)
    return model


def normalized(attention: Attention, *, across_heads: bool = False) -> Attention:
    """`attention` with norms of queries and keys."""
    return replace(attention, qk_norm=True, qk_norm_across_heads=across_heads)


def read_olmo3(c: ConfigKeys) -> Model:
    """OLMo 2 with a sliding window in three of four layers."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", False))
    usual = [(index + 1) % 4 != 0 for index in range(c.count("num_hidden_layers"))]
    attention = windowed_attention(normalized(attention, across_heads=True), c, usual=usual, window=4096)
    return replace(planned(c, attention), norm_placement=NormPlacement.AFTER)


def read_olmoe(c: ConfigKeys) -> Model:
    """Experts in all layers; queries and keys are normalised over all heads."""
    c.require("clip_qkv")
    attention = grouped_attention(c, bias=c.flag("attention_bias", False))
    return planned(c, normalized(attention, across_heads=True), experts=_softmax_experts(c, 64, 8))


def _softmax_experts(c: ConfigKeys, num_experts: int, top_k: int) -> Experts:
    """Experts in all layers, as wide as `intermediate_size`."""
    name = "num_experts" if "num_experts" in c.values else "num_local_experts"
    return Experts(
        num_experts=c.count(name, num_experts),
        top_k=c.count("num_experts_per_tok", top_k),
        ffn_hidden=c.count("intermediate_size"),
        normalize_top_k=c.flag("norm_topk_prob", False),
    )


def read_granite(c: ConfigKeys) -> Model:
    """Granite 3 and 4: a Llama with multipliers."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", False))
    return _biases(c, planned(c, attention))


def read_granitemoe(c: ConfigKeys) -> Model:
    """Granite 3 with experts in all layers."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", False))
    return planned(c, attention, experts=_softmax_experts(c, 8, 2))


def read_smollm3(c: ConfigKeys) -> Model:
    """A Llama with positions in three of four layers; windows, where they are used, in the fourth."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", False), kv_heads=4)
    num_layers, step = c.count("num_hidden_layers"), c.count("no_rope_layer_interval", 4)
    given = c.items("no_rope_layers") or [int((index + 1) % step != 0) for index in range(num_layers)]
    window = c.flag("use_sliding_window", False) and c.value("sliding_window") is not None
    usual = [window and not given[index] if index < len(given) else False for index in range(num_layers)]
    return _biases(c, planned(c, windowed_attention(attention, c, usual=usual), tied=True))


def read_seed_oss(c: ConfigKeys) -> Model:
    """A Llama with biases of queries, keys and values."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", True), head_dim=128, kv_heads=8)
    c.require("residual_dropout", 0)
    return _biases(c, planned(c, replace(attention, output_bias=c.flag("attention_out_bias", False))))


def read_ernie4_5(c: ConfigKeys) -> Model:
    """ERNIE 4.5: a Llama; `use_bias` is of all matrices."""
    attention = grouped_attention(c, bias=c.flag("use_bias", False), head_dim=128, kv_heads=2)
    return _biases(c, planned(c, attention, tied=True), key="use_bias")


def read_ernie4_5_moe(c: ConfigKeys) -> Model:
    """ERNIE 4.5 with experts from layer `moe_layer_start_index` to `moe_layer_end_index`, and shared ones."""
    c.require("use_bias", False)
    num_layers, step = c.count("num_hidden_layers"), c.count("moe_layer_interval", 1)
    first, last = (c.count("moe_layer_start_index", 1, minimum=0), c.count("moe_layer_end_index", -1, minimum=-1))
    last = num_layers - 1 if last == -1 else last
    num_moe = sum(first <= i <= last and (i + 1) % step == 0 for i in range(num_layers))
    c.value("moe_norm_min")
    experts = Experts(
        num_experts=c.count(c.named("moe_num_experts", "num_experts"), 64),
        top_k=c.count(c.named("moe_k", "num_experts_per_tok"), 6),
        ffn_hidden=c.count("moe_intermediate_size", 1536),
        num_shared=c.count("moe_num_shared_experts", 2, minimum=0),
        num_dense_layers=num_layers - num_moe,
    )
    return planned(c, grouped_attention(c, kv_heads=4), experts=experts, tied=True)


def read_hunyuan_v1_dense(c: ConfigKeys) -> Model:
    """Hunyuan: a Llama that normalises queries and keys."""
    return planned(c, normalized(grouped_attention(c, bias=c.flag("attention_bias", False))))


def read_hunyuan_v1_moe(c: ConfigKeys) -> Model:
    """Hunyuan with experts in all layers beside a shared one of their width."""
    top_k = c.value("moe_topk", c.value("num_experts_per_tok", 1))
    if isinstance(top_k, list):
        c.refuse(f"moe_topk: {top_k!r}, a number for each layer")
        top_k = max((k for k in top_k if isinstance(k, int)), default=1)
    experts = Experts(
        num_experts=c.count(c.named("num_experts", "num_local_experts"), 1),
        top_k=ConfigKeys({"moe_topk": top_k}, name=c.name).count("moe_topk"),
        ffn_hidden=c.count("intermediate_size"),
        num_shared=1,
    )
    attention = grouped_attention(c, bias=c.flag("attention_bias", False))
    return planned(c, normalized(attention), experts=experts)


def read_exaone4(c: ConfigKeys) -> Model:
    """EXAONE 4.0: norms of outputs, of queries and of keys, and windows in three of four layers."""
    attention = windows_by_pattern(c, normalized(grouped_attention(c, kv_heads=32)))
    return replace(planned(c, attention), norm_placement=NormPlacement.AFTER)


def windows_by_pattern(c: ConfigKeys, attention: Attention) -> Attention:
    """Windows in all layers but every `sliding_window_pattern`-th; without a window in none."""
    num_layers = c.count("num_hidden_layers")
    if c.value("sliding_window", 4096) is None:
        c.value("sliding_window_pattern")
        return windowed_attention(attention, c, usual=[False] * num_layers)
    step = 4 if c.items("layer_types") is not None else c.count("sliding_window_pattern", 4)
    c.value("sliding_window_pattern")  # what `layer_types` was made from
    usual = [(index + 1) % step != 0 for index in range(num_layers)]
    return windowed_attention(attention, c, usual=usual, window=4096)


def read_exaone_moe(c: ConfigKeys) -> Model:
    """K-EXAONE: EXAONE 4.0 with norms of inputs, and DeepSeek-V3's experts."""
    attention = windows_by_pattern(c, normalized(grouped_attention(c, kv_heads=32)))
    usual = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "first_k_dense_replace": 1}
    c.default(usual | {"num_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5})
    return planned(c, attention, experts=_sigmoid_experts(c, experts="num_experts", shared="num_shared_experts"))


def _sigmoid_experts(c: ConfigKeys, *, experts: str = "n_routed_experts", shared: str = "n_shared_experts") -> Experts:
    """DeepSeek-V3's experts. `mlp_layer_types` or `first_k_dense_replace` gives the number of dense layers."""
    dense, types = c.count("first_k_dense_replace", 0, minimum=0), c.items("mlp_layer_types")
    if types is not None:
        dense = _count_of(c, types, "dense", "sparse")
    groups, chosen = c.count("n_group", 1), c.count("topk_group", 1)
    return Experts(
        num_experts=c.count(c.named(experts, "num_local_experts")),
        top_k=c.count("num_experts_per_tok"),
        ffn_hidden=c.count("moe_intermediate_size"),
        num_shared=c.count(shared, 0, null=0, minimum=0),
        num_dense_layers=min(dense, c.count("num_hidden_layers")),
        router=Router.SIGMOID,
        num_groups=groups if groups > 1 else 0,
        groups_per_token=chosen if groups > 1 else 0,
        normalize_top_k=c.flag("norm_topk_prob", False),
        routed_scale=c.number("routed_scaling_factor", 1.0),
    )


def _count_of(c: ConfigKeys, types: Sequence[object], kind: str, other: str) -> int:
    """Layers of `kind` in `mlp_layer_types`."""
    if len(types) != c.count("num_hidden_layers") or any(one not in (kind, other) for one in types):
        c.refuse(f"mlp_layer_types: not one of {kind} and {other} for each layer")
    return sum(one == kind for one in types)


def read_dots1(c: ConfigKeys) -> Model:
    """dots.llm1: norms of queries and keys, windows after `max_window_layers`, DeepSeek-V3's experts."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", False), kv_heads=32)
    full = c.count("max_window_layers", 62, minimum=0)
    windowed = c.value("sliding_window", 4096) is not None
    usual = [windowed and index >= full for index in range(c.count("num_hidden_layers"))]
    attention = windowed_attention(normalized(attention), c, usual=usual, window=4096)
    return planned(c, attention, experts=_sigmoid_experts(c))


def read_solar_open(c: ConfigKeys) -> Model:
    """Solar Open: experts in all layers beside grouped attention."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", False), head_dim=128, kv_heads=8)
    c.default({"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1280,
               "n_shared_experts": 1, "norm_topk_prob": True})  # fmt: skip
    c.require("use_qk_norm", False)
    return planned(c, replace(attention, output_bias=False), experts=_sigmoid_experts(c))


def read_mistral4(c: ConfigKeys) -> Model:
    """Mistral 4: latent attention and experts scored by softmax."""
    c.default({"n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048,
               "n_shared_experts": 1, "norm_topk_prob": True})  # fmt: skip
    ranks = {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64}
    attention = _latent_attention(c, ranks | {"v_head_dim": 128})
    return planned(c, attention, experts=replace(_sigmoid_experts(c), router=Router.SOFTMAX))


def read_glm4_moe_lite(c: ConfigKeys) -> Model:
    """GLM-4.7-Flash: latent attention and DeepSeek-V3's experts."""
    c.default({"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1,
               "norm_topk_prob": True, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1})  # fmt: skip
    ranks = {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192}
    attention = _latent_attention(c, ranks | {"v_head_dim": 256})
    num_mtp_layers = c.count("num_nextn_predict_layers", 0, minimum=0)
    return replace(planned(c, attention, experts=_sigmoid_experts(c)), num_mtp_layers=num_mtp_layers)


def _latent_attention(c: ConfigKeys, usual: dict[str, int]) -> Attention:
    c.default(usual)
    num_heads, rope = c.count("num_attention_heads"), c.count("qk_rope_head_dim")
    c.require("attention_bias", False)
    c.require("num_key_value_heads", num_heads)
    if c.value("q_lora_rank") == 0:
        c.refuse("q_lora_rank: 0")  # null is no rank, 0 is one of no width
    for key in ("head_dim", "qk_head_dim"):  # made from the others
        c.value(key)
    return Attention(
        kind=AttentionKind.MLA,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=c.count("qk_nope_head_dim") + rope,
        value_head_dim=c.count("v_head_dim"),
        query_lora_rank=c.count("q_lora_rank", null=0, minimum=0),
        kv_lora_rank=c.count("kv_lora_rank"),
        rope_head_dim=rope,
    )


def read_glm4(c: ConfigKeys) -> Model:
    """GLM-4: norms of inputs and of outputs, biases of queries, keys and values."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", True), head_dim=128, kv_heads=2)
    return replace(planned(c, replace(attention, output_bias=False)), norm_placement=NormPlacement.BOTH)


def read_ministral(c: ConfigKeys) -> Model:
    """Ministral: a Mistral whose layers may have full attention."""
    attention = grouped_attention(c, kv_heads=8)
    windowed = c.value("sliding_window", 4096) is not None
    usual = [windowed] * c.count("num_hidden_layers")
    return planned(c, windowed_attention(attention, c, usual=usual, window=4096))


def read_ministral3(c: ConfigKeys) -> Model:
    """Ministral 3 and the language part of Mistral 3.2: a window in all layers or in none."""
    attention = grouped_attention(c, head_dim=128, kv_heads=8)
    usual = [c.value("sliding_window") is not None] * c.count("num_hidden_layers")
    return planned(c, windowed_attention(attention, c, usual=usual))


def read_gemma(c: ConfigKeys) -> Model:
    """The first Gemma: a Llama with scaled embeddings and norms about 1."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", False), head_dim=256, kv_heads=16)
    c.value("hidden_activation")
    c.default({"hidden_act": "gelu_pytorch_tanh"})
    return replace(planned(c, attention, tied=True), zero_centered_norms=True, scaled_embeddings=True)


def read_arcee(c: ConfigKeys) -> Model:
    """AFM: a Llama whose feed-forward blocks are not gated."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", False))
    return _biases(c, planned(c, attention, gated=False))


def read_nemotron(c: ConfigKeys) -> Model:
    """Nemotron-4 and Minitron: LayerNorm with a bias, and ungated feed-forward blocks."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", False))
    c.value("norm_eps")
    return replace(_biases(c, planned(c, attention, gated=False)), norm_bias=True)


def read_starcoder2(c: ConfigKeys) -> Model:
    """LayerNorm, biases everywhere, ungated feed-forward blocks, a window in all layers or in none."""
    attention = grouped_attention(c, bias=c.flag("use_bias", True), kv_heads=2)
    usual = [c.value("sliding_window") is not None] * c.count("num_hidden_layers")
    for key in ("residual_dropout", "embedding_dropout"):
        c.require(key, 0)
    c.value("norm_epsilon")
    c.default({"hidden_act": "gelu_pytorch_tanh"})
    model = planned(c, windowed_attention(attention, c, usual=usual), gated=False, tied=True)
    return replace(_biases(c, model, key="use_bias", usual=True), norm_bias=True)


def read_llama4(c: ConfigKeys) -> Model:
    """Llama 4's language part: experts beside a shared one, in all layers or in every `interleave_moe_layer_step`-th.

    Attention within chunks is read as a window of a chunk's length: up to twice the keys in sequences of many
    chunks.
    """
    num_layers, step = c.count("num_hidden_layers"), c.count("interleave_moe_layer_step", 1)
    given = c.items("moe_layers")
    sparse = set(map(repr, range(step - 1, num_layers, step) if given is None else given))
    c.value("use_qk_norm")  # without weights
    experts = Experts(
        num_experts=c.count("num_local_experts", 16),
        top_k=c.count("num_experts_per_tok", 1),
        ffn_hidden=c.count("intermediate_size"),
        num_shared=1,
        num_dense_layers=num_layers - sum(repr(index) in sparse for index in range(num_layers)),
        router=Router.SIGMOID,
    )
    attention = grouped_attention(c, bias=c.flag("attention_bias", False), head_dim=128, kv_heads=8)
    dense = c.count("intermediate_size_mlp", 16384)
    model = planned(c, _chunked(c, attention, num_layers), experts=experts)
    return replace(model, ffn_hidden=dense if experts.num_dense_layers else 0)


def _chunked(c: ConfigKeys, attention: Attention, num_layers: int) -> Attention:
    step, chunk = c.count("no_rope_layer_interval", 4), c.value("attention_chunk_size", 8192)
    positions = c.items("no_rope_layers") or [int((index + 1) % step != 0) for index in range(num_layers)]
    types: Iterable[object] = c.items("layer_types") or [
        "chunked_attention" if has else "full_attention" for has in positions
    ]
    kinds = ["sliding_attention" if one == "chunked_attention" else one for one in types]
    keys = ConfigKeys({"layer_types": kinds, "sliding_window": chunk}, name=c.name)
    found = windowed_attention(attention, keys, usual=[False] * num_layers)
    for text in keys.unsupported():
        c.refuse(text)
    return found


_GEMMA4_KINDS = {"sliding_attention": True, "full_attention": False}


def read_gemma4(c: ConfigKeys) -> Model:
    """Gemma 4's language part: the dense model of 31 billion parameters and the mixture of 26.

    Layers with full attention have wider heads, and fewer of them for keys and values, which one projection may make
    both. Mixtures have experts beside the dense block of each layer. The norm of values, which has no weights, is left
    out. Embeddings of each layer and keys and values of other layers have no formula: smaller models, which have them,
    are refused.
    """
    for key, usual in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 0)):
        if c.count(key, usual, minimum=0):
            raise InputError(f"{c.name}: {key} is not costed", got=c.value(key, usual), allowed="0")
    for key in ("vocab_size_per_layer_input", "use_double_wide_mlp"):  # of those two
        c.value(key)
    c.default({"hidden_act": c.value("hidden_activation", "gelu_pytorch_tanh")})
    return replace(
        planned(c, _gemma4_attention(c), tied=True, experts=_gemma4_experts(c)),
        norm_placement=NormPlacement.BOTH,
        scaled_embeddings=True,
        logit_cap=c.limit("final_logit_softcapping", 0.0),
    )


def _gemma4_attention(c: ConfigKeys) -> Attention:
    # The last layer has no window; its entry in `layer_types` has no effect.
    num_layers, types = c.count("num_hidden_layers"), c.items("layer_types")
    if types is None:
        types = [list(_GEMMA4_KINDS)[(index + 1) % 6 == 0] for index in range(num_layers)]
    if len(types) != num_layers or any(kind not in list(_GEMMA4_KINDS) for kind in types):
        allowed = f"{num_layers} of {', '.join(_GEMMA4_KINDS)}"
        raise InputError(f"{c.name}: layer_types", got=f"{len(types)} entries", allowed=allowed)
    windowed = [*(_GEMMA4_KINDS[kind] for kind in types[:-1]), False]
    attention = grouped_attention(c, bias=c.flag("attention_bias", False), head_dim=256, kv_heads=4)
    attention, window = normalized(attention), c.count("sliding_window", 512)
    full = _gemma4_full_layers(c, attention, windowed)
    if any(windowed):
        return in_layers(replace(attention, window=window, full_layers=full), windowed)
    if full.shares_values:
        c.refuse("attention_k_eq_v: in all layers")
    return replace(attention, head_dim=full.head_dim, num_kv_heads=full.num_kv_heads)


def _gemma4_full_layers(c: ConfigKeys, attention: Attention, windowed: Sequence[bool]) -> FullLayers:
    """Shape of the full layers, by `global_head_dim`, or by `per_layer_config` in files of transformers 5."""
    shares, heads = c.flag("attention_k_eq_v", False), attention.num_kv_heads
    width, of_full = c.count("global_head_dim", 512), c.count("num_global_key_value_heads", heads)
    given = c.section("per_layer_config")
    if not given.values:
        return FullLayers(head_dim=width, num_kv_heads=of_full if shares else heads, shares_values=shares)
    shapes = [given.section(key) for key in given.values]
    layers = {str(index) for index, has_window in enumerate(windowed) if not has_window}
    if {key.lstrip("0") or "0" for key in given.values} != layers or any(
        shape.values != shapes[0].values for shape in shapes
    ):
        raise InputError(
            f"{c.name}: per_layer_config", got=f"layers {', '.join(given.values)}",
            allowed="one shape for all layers with full attention, and for no others",
        )  # fmt: skip
    found = [
        (shape.count("head_dim", attention.head_dim), shape.count("num_key_value_heads", heads)) for shape in shapes
    ]
    return FullLayers(head_dim=found[0][0], num_kv_heads=found[0][1], shares_values=shares)


def _gemma4_experts(c: ConfigKeys) -> Experts | None:
    """Experts of all layers, each beside a dense block, which is costed as a shared expert."""
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not c.flag("enable_moe_block", False):
        for name in names:
            c.value(name)
        return None
    num_experts, top_k, width = (c.count(name) for name in names)
    return Experts(
        num_experts=num_experts,
        top_k=top_k,
        ffn_hidden=width,
        num_shared=1,
        shared_ffn_hidden=c.count("intermediate_size"),
        own_norms=True,
    )


# --- attention and feed-forward that both read the layer's input ---


def read_cohere(c: ConfigKeys) -> Model:
    """Command R and R+: one norm without a bias. R+ normalises each head of queries and keys by weights of its own,
    as many as a norm over all heads has."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", False))
    if c.flag("use_qk_norm", False):
        attention = normalized(attention, across_heads=True)
    return _cohere(c, attention)


def read_cohere2(c: ConfigKeys) -> Model:
    """Command R7B and Command A: Command R with a sliding window in three of four layers."""
    c.require("use_qk_norm", False)
    for key in ("use_parallel_block", "use_gated_activation"):
        c.require(key, True)
    for key in ("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct"):
        c.value(key)  # of other programs
    attention = grouped_attention(c, bias=c.flag("attention_bias", False))
    return _cohere(c, windows_by_pattern(c, attention))


def _cohere(c: ConfigKeys, attention: Attention) -> Model:
    c.value("logit_scale")
    epsilon = c.number("layer_norm_eps", 1e-5)
    return replace(planned(c, attention, tied=True), parallel_norms=1, norm_epsilon=epsilon)


def read_falcon(c: ConfigKeys) -> Model:
    """Falcon 7B with one norm and one key/value head, 40B and 180B with two norms. Without `parallel_attn` the
    feed-forward follows attention, as in GPT-2."""
    if c.flag("alibi", False):
        raise InputError(
            f"{c.name}: alibi is not costed: it adds a bias to each score of attention, for which no rate is known",
            got=True, allowed="false", hint="the same shapes with rotary positions are planned with `alibi: false`",
        )  # fmt: skip
    num_heads, new = c.count("num_attention_heads"), c.flag("new_decoder_architecture", False)
    shares, given = c.flag("multi_query", True), c.count("num_kv_heads", num_heads)
    num_norms, parallel = c.count("num_ln_in_parallel_attn", 1 + new), c.flag("parallel_attn", True)
    if num_norms > 1 + new:
        c.refuse(f"num_ln_in_parallel_attn: {num_norms}")
    if new and not parallel:
        c.refuse("parallel_attn: False with new_decoder_architecture")
    c.require("apply_residual_connection_post_layernorm", False)
    kv_heads = given if new else 1 if shares else num_heads
    model = _ungated(
        c, _heads(c, num_heads, kv_heads, bias=c.flag("bias", False)), tied=True,
        width=c.count("ffn_hidden_size", 4 * c.count("hidden_size")), activation="activation",
    )  # fmt: skip
    return replace(model, ffn_bias=model.attention.bias, parallel_norms=parallel * min(num_norms, 2))


def read_gpt_neox(c: ConfigKeys) -> Model:
    """GPT-NeoX and Pythia: biases everywhere, two norms. Without `use_parallel_residual` the feed-forward follows
    attention."""
    num_heads = c.count("num_attention_heads")
    for key in ("attention_probs_dropout_prob", "hidden_dropout_prob"):  # which transformers ignores
        c.require(key, 0)
    for key in ("rotary_pct", "rotary_emb_base", "classifier_dropout"):
        c.value(key)
    attention = _heads(c, num_heads, num_heads, bias=c.flag("attention_bias", True))
    parallel_norms = 2 * c.flag("use_parallel_residual", True)
    return replace(_ungated(c, attention), ffn_bias=True, parallel_norms=parallel_norms)


def read_gptj(c: ConfigKeys) -> Model:
    """GPT-J: one norm, biases of the feed-forward and of the head alone."""
    names = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    c.default({name: c.count(theirs) for name, theirs in names.items()})
    c.require("scale_attn_weights", True)
    for key in ("rotary", "rotary_dim", "n_positions"):
        c.value(key)
    c.require("attn_pdrop", 0)
    num_heads, width = c.count("num_attention_heads"), c.count("n_inner", 4 * c.count("hidden_size"))
    attention = _heads(c, num_heads, num_heads, bias=False)
    model = _ungated(c, attention, width=width, activation="activation_function", usual="gelu_new")
    epsilon = c.number("layer_norm_epsilon", 1e-5)
    return replace(model, ffn_bias=True, head_bias=True, parallel_norms=1, norm_epsilon=epsilon)


def read_phi(c: ConfigKeys) -> Model:
    """Phi-1, Phi-1.5 and Phi-2: one norm, biases everywhere."""
    attention = grouped_attention(c, bias=True)
    if c.flag("qk_layernorm", False):
        attention = normalized(attention)
    return replace(_ungated(c, attention, usual="gelu_new"), ffn_bias=True, head_bias=True, parallel_norms=1)


def _heads(c: ConfigKeys, num_heads: int, num_kv_heads: int, *, bias: bool) -> Attention:
    """Attention whose heads have the model's width together."""
    return Attention(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=c.count("hidden_size") // num_heads, bias=bias
    )


def _ungated(
    c: ConfigKeys,
    attention: Attention,
    *,
    width: int | None = None,
    activation: str = "hidden_act",
    usual: str = "gelu",
    tied: bool = False,
) -> Model:
    """A decoder with LayerNorm and ungated feed-forward blocks; `width`: theirs, where another key has it."""
    c.require("hidden_dropout", 0)
    c.default({"hidden_act": c.value(activation, usual)} | ({"intermediate_size": width} if width else {}))
    epsilon = c.number("layer_norm_epsilon", c.number("layer_norm_eps", 1e-5))
    return replace(planned(c, attention, gated=False, tied=tied), norm_bias=True, norm_epsilon=epsilon)
