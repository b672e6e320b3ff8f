"""config.json to shapes: architectures with sparse and compressed attention (DeepSeek-V3.2, GLM-5, DeepSeek-V4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.catalog.config_keys import ConfigKeys, decoder
from meshwright.catalog.family_configs import read_deepseek_v3
from meshwright.specs.model import Attention, AttentionKind, Experts, Model, Rope, Router
from meshwright.specs.sparse_attention import Compression, Indexer


def read_deepseek_v32(c: ConfigKeys) -> Model:
    """DeepSeek-V3 with an indexer in every layer."""
    return _with_indexer(c, read_deepseek_v3(c), heads=64, num_layers=None)


def read_glm_moe_dsa(c: ConfigKeys) -> Model:
    """GLM-5: as DeepSeek-V3.2, without groups of experts; layers may take the keys that one before them has chosen."""
    usual = {
        "n_group": 1, "topk_group": 1, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192, "v_head_dim": 256, "num_experts_per_tok": 8, "n_routed_experts": 256,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    c.default(usual)
    model = read_deepseek_v3(c)
    return _with_indexer(c, model, heads=32, num_layers=_own_indexers(c, model.num_layers))


def _with_indexer(c: ConfigKeys, model: Model, *, heads: int, num_layers: int | None) -> Model:
    indexer = Indexer(
        num_heads=c.count("index_n_heads", heads),
        head_dim=c.count("index_head_dim", 128),
        top_k=c.count("index_topk", 2048),
        num_layers=num_layers,
    )
    c.value("indexer_rope_interleave")  # an order of dimensions
    _all_layers(c, "layer_types", "deepseek_sparse_attention", "indexed_attention")
    dense, types = model.experts.num_dense_layers if model.experts else 0, c.items("mlp_layer_types")
    if types is not None and types != ["dense"] * dense + ["sparse"] * (model.num_layers - dense):
        c.refuse("mlp_layer_types: others than the first first_k_dense_replace layers are dense")
    if not model.attention.query_lora_rank:
        c.refuse("q_lora_rank: null, from which the indexer's queries come")
    return replace(model, attention=replace(model.attention, indexer=indexer))


def _own_indexers(c: ConfigKeys, num_layers: int) -> int | None:
    """Layers with an indexer of their own; None: all."""
    types, pattern = c.items("indexer_types"), c.value("index_topk_pattern")
    every, offset = c.count("index_topk_freq", 1), c.count("index_skip_topk_offset", 2, minimum=0)
    if types is None and pattern is not None:
        known = {"F": "full", "S": "shared"}
        types = [known.get(str(x), str(x)) for x in pattern] if isinstance(pattern, str | list) else [pattern]
    if types is None:
        types = ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(num_layers)]
    if len(types) != num_layers or {str(kind) for kind in types} - {"full", "shared"} or types[0] != "full":
        c.refuse("indexer_types: not one of full and shared for each layer, full first")
        return None
    own = types.count("full")
    return None if own == num_layers else own


def _all_layers(c: ConfigKeys, key: str, *kinds: str) -> None:
    types = c.items(key)
    if types is not None and any(one not in kinds for one in types):
        c.refuse(f"{key}: others than {kinds[0]}")


def read_deepseek_v4(c: ConfigKeys) -> Model:
    """Keys that stand for 4 or 128 tokens by layer, hyper-connections, experts in all layers."""
    num_layers = c.count("num_hidden_layers", 43)
    c.default({
        "vocab_size": 129_280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
        "moe_intermediate_size": 2048,
    })  # fmt: skip
    strides, indexed = _strides(c, num_layers)
    c.pass_over("deepseek_v4")
    if c.count("hc_mult", 4) == 1:
        c.refuse("hc_mult: 1, hyper-connections of one stream")
    c.require("intermediate_size", c.value("moe_intermediate_size"))  # transformers' other name for it
    head_dim = c.count("head_dim", 512)
    indexer = Indexer(
        num_heads=c.count("index_n_heads", 64),
        head_dim=c.count("index_head_dim", 128),
        top_k=c.count("index_topk", 512),
        is_trained=False,
    )
    window = c.count("sliding_window", 128)
    share = c.number("partial_rotary_factor", 64 / 512)
    attention = Attention(
        kind=AttentionKind.SHARED,
        num_heads=c.count("num_attention_heads"),
        num_kv_heads=1,
        head_dim=head_dim,
        query_lora_rank=c.count("q_lora_rank", 1024),
        rope_head_dim=min(c.count("qk_rope_head_dim", max(int(head_dim * share), 1)), head_dim),
        window=window,
        num_windowed_layers=num_layers,
        sinks=True,
        output_lora_rank=c.count("o_lora_rank", 1024),
        output_groups=c.count("o_groups", 8),
        indexer=indexer if indexed in strides else None,
        compression=Compression(strides=strides, indexed_stride=indexed),
    )
    model = decoder(c, attention, experts=_experts(c, num_layers), rope=Rope())
    return replace(
        model, num_mtp_layers=c.count("num_nextn_predict_layers", 1, minimum=0), residual_streams=c.count("hc_mult", 4)
    )


def _strides(c: ConfigKeys, num_layers: int) -> tuple[tuple[int, ...], int]:
    """(tokens of a compressed key of each layer, tokens in layers with an indexer).

    `layer_types` has priority over `compress_ratios`, which may go on with prediction modules; without either the
    first two layers are heavily compressed and the others alternate.
    """
    rates = c.section("compress_rates")
    short = rates.count("compressed_sparse_attention", c.count("compress_rate_csa", 4))
    long = rates.count("heavily_compressed_attention", c.count("compress_rate_hca", 128))
    of_type = {"sliding_attention": 0, "compressed_sparse_attention": short, "heavily_compressed_attention": long}
    types, ratios = c.items("layer_types"), c.items("compress_ratios")
    if types is not None:
        found = [of_type.get(str(kind), -1) for kind in types]
    elif ratios is not None:
        found = [{0: 0, 4: short, 128: long}.get(r, -1) if _is_whole(r) else -1 for r in ratios]
    else:
        found = [long] * 2 + [short if i % 2 else long for i in range(num_layers)]
    if len(found) < num_layers or -1 in found:
        c.refuse("layer_types: not a known kind of attention for each layer")
        found = [stride for stride in found if stride >= 0] + [0] * num_layers
    return tuple(found[:num_layers]), short


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _experts(c: ConfigKeys, num_layers: int) -> Experts:
    types = c.items("mlp_layer_types")
    hashed = c.count("num_hash_layers", 3, minimum=0)
    if types is not None:
        hashed = types.count("hash_moe")
        if types != ["hash_moe"] * hashed + ["moe"] * (num_layers - hashed):
            c.refuse("mlp_layer_types: others than hash_moe first and moe")
    return Experts(
        num_experts=c.count("n_routed_experts", 256),
        top_k=c.count("num_experts_per_tok", 6),
        ffn_hidden=c.count("moe_intermediate_size"),
        num_shared=1,
        router=Router.SQRT_SOFTPLUS,
        routed_scale=c.number("routed_scaling_factor", 1.5),
        normalize_top_k=c.flag("norm_topk_prob", True),
        num_hashed_layers=min(hashed, num_layers),
    )
