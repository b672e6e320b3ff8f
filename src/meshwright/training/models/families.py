"""Models that this engine builds. Dense layers of a mixture come first, as in DeepSeek."""

from __future__ import annotations

from meshwright.catalog import families as catalogue
from meshwright.errors import InputError
from meshwright.specs.model import Attention, AttentionKind, Model, RopeScaling
from meshwright.specs.model_parts import NOT_BUILT, contradictions, parts_of

FAMILIES = tuple(family.architecture for family in catalogue.trained_families())
"""Architectures of Hugging Face transformers with equal logits and gradients."""


def check_model(model: Model) -> None:
    """Raise InputError for a model that this engine cannot build exactly."""
    family = catalogue.FAMILIES.get(model.family)
    if model.family and (family is None or not family.trains):
        why = f" ({family.not_trained})" if family else ""
        raise InputError(
            f"{model.name}: the native engine cannot build this architecture{why}",
            got=model.family,
            allowed=", ".join(f.architecture for f in catalogue.trained_families()),
        )
    if model.unsupported:
        raise InputError(
            f"{model.name}: Meshwright does not compute all that its config sets", got="; ".join(model.unsupported)
        )
    for wrong, what, got in (
        (model.learned_positions > 0, "learned positions", model.learned_positions),
        (
            model.attention.indexer is not None or model.attention.kind is AttentionKind.SHARED,
            "sparse attention (an indexer, compressed keys)",
            "attention.indexer",
        ),
        (model.residual_streams > 1, "hyper-connections", f"residual_streams: {model.residual_streams}"),
        (bool(model.layer_pattern), "state-space or single-block layers", "layer_pattern"),
        (model.linear_attention is not None, "layers of linear attention", "linear_attention"),
        (not model.gated_ffn, "feed-forward blocks without a gate", "gated_ffn: false"),
        (model.norm_bias, "norms with a bias", "norm_bias: true"),
        (model.rope.scaling is RopeScaling.OTHER, "this RoPE scaling", "rope.scaling: other"),
    ):
        if wrong:
            raise InputError(f"{model.name}: the native engine has no {what}", got=got)
    if missing := NOT_BUILT & parts_of(model).keys():
        raise InputError(f"{model.name}: the native engine does not build", got=", ".join(sorted(missing)))
    if found := list(contradictions(model)):
        raise InputError(f"{model.name}: {'; '.join(found)}")
    _check_attention(model.name, model.attention)
    _check_layers(model)


def _check_attention(name: str, a: Attention) -> None:
    if a.kind is AttentionKind.MLA and (a.kv_lora_rank < 1 or a.rope_head_dim >= a.head_dim):
        raise InputError(
            f"{name}: latent attention needs kv_lora_rank and a rotary part narrower than head_dim",
            got=f"kv_lora_rank: {a.kv_lora_rank}, rope_head_dim: {a.rope_head_dim}, head_dim: {a.head_dim}",
        )


def _check_layers(model: Model) -> None:
    if model.num_dense_layers and not model.ffn_hidden:
        raise InputError(f"{model.name}: dense layers need ffn_hidden", got=model.ffn_hidden)
    family = catalogue.FAMILIES.get(model.family)
    known = family is None or family.knows_dense_layers
    if not known and model.experts is not None and model.experts.num_dense_layers:
        raise InputError(
            f"{model.name}: which layers of a mixture are dense is not known for {model.family}",
            got=f"num_dense_layers: {model.experts.num_dense_layers}",
            allowed=0,
        )


def is_dense(model: Model, index: int) -> bool:
    """Return True if layer `index` has a dense feed-forward: the first ones have."""
    return index < model.num_dense_layers
