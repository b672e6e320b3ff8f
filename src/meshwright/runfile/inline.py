"""A model whose shapes stand in the run file itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from meshwright.catalog import lookup as catalog
from meshwright.errors import MeshwrightError
from meshwright.runfile import model_schema
from meshwright.runfile.fields import RunFileSection
from meshwright.runfile.problems import BelowError
from meshwright.specs.model import (
    Attention,
    AttentionKind,
    Experts,
    FullLayers,
    LinearAttention,
    Model,
    Rope,
    RopeScaling,
    StateSpace,
)
from meshwright.specs.model_parts import full_layer_problems, linear_problems, pattern_problems, sparse_problems
from meshwright.specs.sparse_attention import Compression, Indexer

T = TypeVar("T")


def same_fields(kind: type[T], section: RunFileSection) -> T:
    """The dataclass whose fields are called like the section's keys; keys that it lacks are ignored."""
    return kind(**{f.name: getattr(section, f.name) for f in fields(kind)})  # pyright: ignore[reportArgumentType]


def inline_model(given: model_schema.InlineModel) -> Model:
    """The model; omitted keys follow from the others. Raises `BelowError` where they disagree."""
    a, x = given.attention, given.experts
    num_dense_layers = given.num_layers if x is None else x.num_dense_layers
    if num_dense_layers > given.num_layers:
        raise BelowError("experts.num_dense_layers", "is more than num_layers", got=num_dense_layers)
    if num_dense_layers and not given.ffn_hidden and not given.layer_pattern:
        raise BelowError("ffn_hidden", "is missing: the model has dense layers")
    if a.num_windowed_layers > given.num_layers:
        raise BelowError("attention.num_windowed_layers", "is more than num_layers", got=a.num_windowed_layers)
    model = Model(
        **_given(
            given,
            Model,
            "attention",
            "experts",
            "rope",
            "windowed_rope",
            "family",
            "unsupported",
            "state_space",
            "linear_attention",
        ),
        attention=_inline_attention(given),
        experts=None if x is None else _inline_experts(x),
        state_space=given.state_space and same_fields(StateSpace, given.state_space),
        linear_attention=given.linear_attention and same_fields(LinearAttention, given.linear_attention),
        rope=_inline_rope(given.rope, key="rope"),
        windowed_rope=given.windowed_rope and _inline_rope(given.windowed_rope, key="windowed_rope"),
        family=given.family or "",
    )
    if problems := list(pattern_problems(model)):
        raise BelowError("layer_pattern", "; ".join(problems), got=model.layer_pattern or None)
    if problems := list(sparse_problems(model)):
        raise BelowError("attention", "; ".join(problems), got=None)
    if problems := list(full_layer_problems(model)):
        raise BelowError("attention.full_layers", "; ".join(problems))
    if problems := list(linear_problems(model)):
        raise BelowError("linear_attention", "; ".join(problems))
    return model


def changed_model(base: Model, changes: model_schema.ModelVariant) -> Model:
    """`base` with the keys of `changes`. Raises `BelowError` where the two disagree."""
    given = changes.model_dump(exclude_unset=True, exclude={"base"})
    shapes = {key: value for key, value in asdict(base).items() if key != "unsupported"}
    shapes["family"] = base.family or None
    try:
        section = model_schema.InlineModel.model_validate(_merged(shapes, given))
    except ValidationError as errors:  # a section that the base does not have needs all of its keys
        key = ".".join(str(part) for part in errors.errors()[0]["loc"])
        raise BelowError(key, f"is missing: {base.name} does not have it") from None
    model = replace(inline_model(section), unsupported=base.unsupported)
    is_other = bool(given.keys() - {"name", "num_mtp_layers"})
    return replace(model, name=f"{base.name}-variant") if is_other and "name" not in given else model


def _merged(section: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`section` with `changes` laid over it, mapping by mapping."""
    merged = dict(section)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = _merged(below or {}, value) if isinstance(value, dict) else value
    return merged


def _inline_rope(given: model_schema.InlineRope, *, key: str) -> Rope:
    without_context = (RopeScaling.NONE, RopeScaling.LINEAR)
    if given.scaling not in without_context and not given.original_context:
        raise BelowError(f"{key}.original_context", f"is missing: scaling ({given.scaling}) needs it")
    for name in ("short_factors", "long_factors"):
        if (given.scaling is RopeScaling.LONGROPE) != bool(getattr(given, name)):
            raise BelowError(f"{key}.{name}", "goes with scaling longrope, which needs it")
    return same_fields(Rope, given)


def _inline_attention(given: model_schema.InlineModel) -> Attention:
    a = given.attention
    num_kv_heads = a.num_kv_heads or a.num_heads
    if a.num_heads % num_kv_heads:
        raise BelowError("attention.num_kv_heads", f"does not divide num_heads ({a.num_heads})", got=num_kv_heads)
    if a.head_dim is None and given.hidden % a.num_heads:
        raise BelowError("attention.head_dim", f"is missing: hidden ({given.hidden}) / num_heads is not whole")
    if a.window_pattern and a.num_windowed_layers:
        raise BelowError("attention.num_windowed_layers", "is given by window_pattern already: leave one of them out")
    if a.kind is AttentionKind.MLA and not a.kv_lora_rank:
        raise BelowError("attention.kv_lora_rank", "is missing: latent attention (mla) needs it")
    return Attention(
        **_given(a, Attention, "num_kv_heads", "head_dim", "full_layers", "indexer", "compression"),
        full_layers=a.full_layers and same_fields(FullLayers, a.full_layers),
        indexer=a.indexer and same_fields(Indexer, a.indexer),
        compression=a.compression and same_fields(Compression, a.compression),
        num_kv_heads=num_kv_heads,
        head_dim=a.head_dim or given.hidden // a.num_heads,
    )


def _inline_experts(given: model_schema.InlineExperts) -> Experts:
    if given.top_k > given.num_experts:
        raise BelowError("experts.top_k", f"is more than num_experts ({given.num_experts})", got=given.top_k)
    if given.num_groups and given.num_experts % given.num_groups:
        raise BelowError("experts.num_groups", f"does not divide num_experts ({given.num_experts})")
    if given.groups_per_token > given.num_groups:
        raise BelowError("experts.groups_per_token", "is more than num_groups", got=given.groups_per_token)
    if given.own_norms and given.num_dense_layers:
        raise BelowError("experts.own_norms", "needs experts in all layers", got=given.num_dense_layers)
    return same_fields(Experts, given)


def _given(section: RunFileSection, kind: type, *but: str) -> dict[str, Any]:
    return {f.name: getattr(section, f.name) for f in fields(kind) if f.name not in but}


def catalogue_name(section: dict[str, Any]) -> str | None:
    """The catalogue's name of the model that a run file's section describes; None: it is no such model, or wrong."""
    try:
        model = inline_model(model_schema.InlineModel.model_validate(section))
    except (ValidationError, MeshwrightError):  # which the run file says better, with its key
        return None
    known = ((name, catalog.model(name)) for name in catalog.model_names())
    return next((name for name, one in known if replace(one, name=model.name, family=model.family) == model), None)
