"""Parts that only some models have: what an engine, or a family's config, must support by name or refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from operator import attrgetter
from types import MappingProxyType
from typing import Any

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
)

_PATHS = """
    activation norm_placement parallel_norms head_bias num_labels zero_centered_norms scaled_embeddings logit_cap
    windowed_rope rope.rotated_share rope.attention_factor rope.short_factors rope.long_factors attention.window_pattern
    attention.output_bias attention.qk_norm_across_heads attention.score_divisor attention.score_cap attention.sinks
    attention.indexer attention.compression attention.output_groups residual_streams attention.output_gate
    attention.full_layers ffn_bias experts.bias experts.shared_gate experts.latent experts.own_norms
    experts.num_hashed_layers state_space layer_pattern mtp_pattern mtp_shared linear_attention
"""
_DEFAULTS = {
    f"{section}{f.name}": f.default
    for section, kind in (("", Model), ("rope.", Rope), ("attention.", Attention), ("experts.", Experts))
    for f in fields(kind)
}
ABSENT: Mapping[str, Any] = MappingProxyType({path: _DEFAULTS[path] for path in _PATHS.split()})
"""The parts, with the value of a model that lacks them: the field's default."""

_NOT_BUILT = """
    parallel_norms head_bias ffn_bias experts.shared_gate experts.latent experts.own_norms mtp_shared
    attention.output_gate attention.full_layers
"""
NOT_BUILT = frozenset(_NOT_BUILT.split())
"""Those that the native engine has no modules for."""

GPT_OSS: Mapping[str, Any] = MappingProxyType(
    {
        "activation": Activation.CLAMPED_SWIGLU,
        "attention.window_pattern": (True, False),
        "attention.sinks": True,
        "experts.bias": True,
    }
)
"""Parts that gpt-oss has."""


def parts_of(model: Model) -> dict[str, Any]:
    """The parts that `model` has, without those that say what holds anyway."""
    a = model.attention
    is_without_effect = {
        "attention.output_bias": a.has_output_bias == a.bias,
        "attention.score_divisor": a.score_divisor == a.head_dim,
        "attention.window_pattern": not model.num_windowed_layers,
        "attention.qk_norm_across_heads": not a.qk_norm,
        "windowed_rope": model.windowed_rope == model.rope or not model.num_windowed_layers,
    }
    paths = [path for path in ABSENT if model.experts is not None or not path.startswith("experts.")]
    values = {path: attrgetter(path)(model) for path in paths}
    return {
        path: value
        for path, value in values.items()
        if value != ABSENT[path] and not is_without_effect.get(path, False)
    }


def contradictions(model: Model) -> Iterator[str]:
    """Parts that the rest of the model has no place for, as sentences: to build the model would drop them."""
    a = model.attention
    if a.kind is AttentionKind.MLA:
        has = {
            "sliding windows": model.num_windowed_layers,
            "sinks": a.sinks,
            "score_cap": a.score_cap,
            "score_divisor": a.score_divisor,
            "qk_norm": a.qk_norm,
            "windowed_rope": model.windowed_rope,
            "output_gate": a.output_gate,
        }
        yield from (f"latent attention has no {name}" for name, value in has.items() if value)
    yield from pattern_problems(model)
    yield from sparse_problems(model)
    yield from linear_problems(model)
    yield from full_layer_problems(model)
    yield from parallel_problems(model)
    yield from _group_problems(model.experts)
    if model.experts is not None and model.experts.own_norms and model.experts.num_dense_layers:
        yield "experts.own_norms needs experts in all layers"
    if a.qk_norm_across_heads and not a.qk_norm:
        yield "qk_norm_across_heads needs qk_norm"
    if model.num_windowed_layers and not a.window:
        yield "layers with a sliding window need attention.window"
    head_dim = a.rope_head_dim if a.kind is AttentionKind.MLA else a.head_dim
    for name, rope in (("rope", model.rope), ("windowed_rope", model.windowed_rope)):
        if rope is not None:
            yield from (f"{name}: {problem}" for problem in _problems(rope, head_dim, kind=a.kind))


def _group_problems(x: Experts | None) -> Iterator[str]:
    """Groups of experts that a token cannot choose from."""
    if x is None or not x.num_groups:
        return
    if x.num_experts % x.num_groups:
        yield f"{x.num_experts} experts are not divisible into {x.num_groups} groups"
    elif not 1 <= x.groups_per_token <= x.num_groups:
        yield f"a token uses 1 to {x.num_groups} groups of experts, here groups_per_token is {x.groups_per_token}"
    elif x.top_k > (chosen := x.num_experts // x.num_groups * x.groups_per_token):
        yield f"a token's groups have {chosen} experts, top_k is {x.top_k}"


def uncalibrated(model: Model) -> tuple[str, ...]:
    """Sentences on parts whose rates no published step has calibrated."""
    if model.residual_streams > 1:
        return (
            "compressed attention and hyper-connections are counted from the code of AMD's Primus with fused kernels, "
            "and not calibrated: 32 MI355X took 1.3 to 1.5 times as long with them, and longer without",
        )
    if model.attention.indexer is not None:
        return ("the indexer and attention to selected keys are not calibrated: no published step has them",)
    return ()


def full_layer_problems(model: Model) -> Iterator[str]:
    """Full layers of another shape that are none, or that their heads do not fit."""
    full = model.attention.full_layers
    if full is None:
        return
    if not 0 < model.num_windowed_layers < model.num_layers:
        yield "attention.full_layers needs layers with a sliding window and layers without one"
    if model.attention.kind is not AttentionKind.GQA:
        yield "attention.full_layers is of attention with heads of keys and values (kind gqa)"
    if model.attention.qk_norm_across_heads or model.attention.value_head_dim is not None:
        yield "attention.full_layers have keys as wide as values, and norms of each head"
    if model.attention.num_heads % full.num_kv_heads:
        heads = model.attention.num_heads
        yield f"attention.full_layers: {full.num_kv_heads} key/value heads do not divide {heads} heads"


def parallel_problems(model: Model) -> Iterator[str]:
    """Parts without a formula beside attention and feed-forward in parallel."""
    absent = {
        "experts": model.experts,
        "layer_pattern": model.layer_pattern,
        "linear_attention": model.linear_attention,
        "residual_streams": model.residual_streams > 1,
        "prediction modules": model.num_mtp_layers,
        "norms of outputs": model.norm_placement is not NormPlacement.BEFORE,
    }
    if model.parallel_norms:
        yield from (f"a model with parallel_norms has no {name}" for name, value in absent.items() if value)


def sparse_problems(model: Model) -> Iterator[str]:
    """Indexers, compressed keys and residual streams that lack what they build on."""
    a, x, c = model.attention, model.attention.indexer, model.attention.compression
    shared = a.kind is AttentionKind.SHARED
    if x is not None and a.kind is AttentionKind.GQA:
        yield "attention.indexer needs latent attention (kind mla) or compressed keys (kind shared)"
    if x is not None and not a.query_lora_rank:
        yield "attention.indexer needs query_lora_rank: its queries come from the low-rank query"
    if x is not None and x.num_layers is not None and x.num_layers > model.num_layers:
        yield f"attention.indexer.num_layers is {x.num_layers}, more than num_layers ({model.num_layers})"
    if (c is not None or a.output_groups or a.output_lora_rank) and not shared:
        yield "attention.compression and grouped outputs need attention.kind shared"
    if shared:
        yield from _shared_problems(model)
    if model.residual_streams > 1 and model.layer_pattern:
        yield "a hybrid by layer_pattern has no residual_streams"
    if model.experts is not None and model.experts.num_hashed_layers > model.num_moe_layers:
        yield f"experts.num_hashed_layers is more than the {model.num_moe_layers} layers with experts"


def _shared_problems(model: Model) -> Iterator[str]:
    """Needs of DeepSeek-V4's attention that are not met."""
    a, c = model.attention, model.attention.compression
    for name in ("query_lora_rank", "output_lora_rank", "output_groups", "window"):
        if not getattr(a, name):
            yield f"attention.kind shared needs attention.{name}"
    if a.num_kv_heads != 1 or a.v_dim != a.head_dim:
        yield "attention.kind shared has one key/value head, whose key is its value"
    if a.output_groups and a.num_heads % a.output_groups:
        yield f"attention.output_groups ({a.output_groups}) does not divide num_heads ({a.num_heads})"
    if model.num_windowed_layers != model.num_layers:
        yield "attention.kind shared has a window in every layer: num_windowed_layers must be num_layers"
    if c is None:
        if a.indexer is not None:
            yield "attention.indexer with kind shared needs attention.compression"
        return
    if len(c.strides) != model.num_layers:
        yield f"attention.compression.strides has {len(c.strides)} layers, num_layers says {model.num_layers}"
    if len({s for s in c.strides if s and s != c.indexed_stride}) > 1:
        yield "attention.compression.strides has several strides besides indexed_stride: one is costed"
    if bool(c.num_layers(indexed=True)) != (a.indexer is not None):
        yield f"layers of stride {c.indexed_stride} and attention.indexer need each other"


def pattern_problems(model: Model) -> Iterator[str]:
    """A hybrid has a kind for each layer, all it names, and none of what the cost model has no formula for there."""
    pattern, kinds = model.layer_pattern, {str(kind) for kind in BlockKind}
    if not pattern:
        if model.state_space is not None:
            yield "state_space needs layer_pattern, which says where its layers are"
        if model.mtp_pattern:
            yield "mtp_pattern is of hybrids: modules of other models are as their layers"
        return
    if len(pattern) != model.num_layers:
        yield f"layer_pattern has {len(pattern)} layers, num_layers says {model.num_layers}"
    if unknown := sorted(set(pattern) - kinds):
        yield f"layer_pattern names {', '.join(map(repr, unknown))}, known are {', '.join(sorted(kinds))}"
    if (BlockKind.STATE_SPACE in pattern) != (model.state_space is not None):
        yield "layers M of layer_pattern and state_space need each other"
    if BlockKind.FEED_FORWARD in pattern and not model.ffn_hidden:
        yield "layers - of layer_pattern need ffn_hidden"
    if (BlockKind.MIXTURE in pattern) != (model.experts is not None):
        yield "layers E of layer_pattern and experts need each other"
    absent = {
        "experts.num_dense_layers, for layers - say it": model.experts and model.experts.num_dense_layers,
        "windows": model.num_windowed_layers,
    }
    if model.num_mtp_layers and not model.mtp_pattern:
        yield "num_mtp_layers of a hybrid needs mtp_pattern, which says what a prediction module holds"
    if other := sorted(set(model.mtp_pattern) - set(model.layer_pattern)):
        yield f"mtp_pattern names {', '.join(map(repr, other))}, which layer_pattern does not have"
    yield from (f"a hybrid by layer_pattern has no {name}" for name, value in absent.items() if value)


def linear_problems(model: Model) -> Iterator[str]:
    """Layers of linear attention that are none, and what the cost model has no formula for beside them."""
    linear = model.linear_attention
    if linear is None:
        return
    if not any(linear.pattern):
        yield "linear_attention.pattern names no layer"
    if linear.num_value_heads % linear.num_key_heads:
        heads = f"{linear.num_value_heads} and {linear.num_key_heads}"
        yield f"value heads of linear attention are a multiple of its key heads, here {heads}"
    absent = {"sliding windows": model.num_windowed_layers, "layer_pattern": model.layer_pattern}
    yield from (f"a model with linear_attention has no {name}" for name, value in absent.items() if value)


def _problems(rope: Rope, head_dim: int, *, kind: AttentionKind) -> Iterator[str]:
    width = rope.rotary_width(head_dim)
    if width < 2 or width % 2:
        yield f"positions rotate pairs, here {width} dimensions of a head"
    if kind is AttentionKind.MLA and rope.rotated_share != 1:
        yield "rope_head_dim is the rotated share of latent attention: rotated_share must be 1"
    factors = (rope.short_factors, rope.long_factors)
    expected = width // 2 if rope.scaling is RopeScaling.LONGROPE else 0
    if {len(given) for given in factors} != {expected}:
        yield f"short_factors and long_factors must be {expected}, here {len(factors[0])} and {len(factors[1])}"
