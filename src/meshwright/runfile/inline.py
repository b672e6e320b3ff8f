"""A model whose shapes stand in the run file itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from meshwright.catalog import lookup as catalog
from meshwright.errors import MeshwrightError
from meshwright.runfile.problems import BelowError
from meshwright.runfile.schema import InlineModel, ModelVariant
from meshwright.runfile.validate import validated
from meshwright.specs import model_parts
from meshwright.specs.model import Attention, AttentionKind, Model, Rope, RopeScaling

T = TypeVar("T")


def same_fields(kind: type[T], section: object) -> T:
    """The dataclass whose fields are called like the section's; fields that it lacks are ignored."""
    return kind(**{f.name: getattr(section, f.name) for f in fields(kind)})  # pyright: ignore[reportArgumentType]


def inline_model(given: InlineModel) -> Model:
    """The model; omitted keys follow from the others. Raises `BelowError` where they disagree."""
    a, x = given.attention, given.experts
    num_dense_layers = given.num_layers if x is None else x.num_dense_layers
    if num_dense_layers > given.num_layers:
        raise BelowError("experts.num_dense_layers", "is more than num_layers", got=num_dense_layers)
    if num_dense_layers and not given.ffn_hidden and not given.layer_pattern:
        raise BelowError("ffn_hidden", "is missing: the model has dense layers")
    if a.num_windowed_layers > given.num_layers:
        raise BelowError("attention.num_windowed_layers", "is more than num_layers", got=a.num_windowed_layers)
    for key in ("rope", "windowed_rope"):
        _refuse_rope(getattr(given, key), key=key)
    model = replace(same_fields(Model, given), attention=_inline_attention(given))
    if x is not None:
        if x.top_k > x.num_experts:
            raise BelowError("experts.top_k", f"is more than num_experts ({x.num_experts})", got=x.top_k)
        if x.num_groups and x.num_experts % x.num_groups:
            raise BelowError("experts.num_groups", f"does not divide num_experts ({x.num_experts})")
        if x.groups_per_token > x.num_groups:
            raise BelowError("experts.groups_per_token", "is more than num_groups", got=x.groups_per_token)
        if x.own_norms and x.num_dense_layers:
            raise BelowError("experts.own_norms", "needs experts in all layers", got=x.num_dense_layers)
    for key, problems, got in (
        ("layer_pattern", model_parts.pattern_problems, model.layer_pattern or None),
        ("attention", model_parts.sparse_problems, None),
        ("attention.full_layers", model_parts.full_layer_problems, None),
        ("linear_attention", model_parts.linear_problems, None),
        ("parallel_norms", model_parts.parallel_problems, model.parallel_norms),
    ):
        if found := "; ".join(problems(model)):
            raise BelowError(key, found, got=got)
    return model


def changed_model(base: Model, changes: ModelVariant) -> Model:
    """`base` with the keys of `changes`. Raises `BelowError` where the two disagree."""
    given = changes.model_dump(exclude_unset=True, exclude={"base"})
    shapes = asdict(base) | {"family": base.family or None}
    num_labels = shapes.pop("num_labels")  # no key
    section = validated(InlineModel, _merged(shapes, given))
    if isinstance(section, list):  # a section that the base does not have needs all of its keys
        raise BelowError(".".join(map(str, section[0].path)), f"is missing: {base.name} does not have it")
    model = replace(inline_model(section), num_labels=num_labels)
    is_other = bool(given.keys() - {"name", "num_mtp_layers"})
    return replace(model, name=f"{base.name}-variant") if is_other and "name" not in given else model


def _merged(section: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`section` with `changes` laid over it, mapping by mapping."""
    merged = dict(section)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = _merged(below or {}, value) if isinstance(value, dict) else value
    return merged


def _refuse_rope(given: Rope | None, *, key: str) -> None:
    if given is None:
        return
    without_context = (RopeScaling.NONE, RopeScaling.LINEAR)
    if given.scaling not in without_context and not given.original_context:
        raise BelowError(f"{key}.original_context", f"is missing: scaling ({given.scaling}) needs it")
    for name in ("short_factors", "long_factors"):
        if (given.scaling is RopeScaling.LONGROPE) != bool(getattr(given, name)):
            raise BelowError(f"{key}.{name}", "goes with scaling longrope, which needs it")


def _inline_attention(given: InlineModel) -> Attention:
    a = given.attention
    num_kv_heads = a.num_kv_heads or a.num_heads
    if a.num_heads % num_kv_heads:
        raise BelowError("attention.num_kv_heads", f"does not divide num_heads ({a.num_heads})", got=num_kv_heads)
    if not a.head_dim and given.hidden % a.num_heads:
        raise BelowError("attention.head_dim", f"is missing: hidden ({given.hidden}) / num_heads is not whole")
    if a.window_pattern and a.num_windowed_layers:
        raise BelowError("attention.num_windowed_layers", "is given by window_pattern already: leave one of them out")
    if a.kind is AttentionKind.MLA and not a.kv_lora_rank:
        raise BelowError("attention.kv_lora_rank", "is missing: latent attention (mla) needs it")
    head_dim = a.head_dim or given.hidden // a.num_heads
    return replace(same_fields(Attention, a), num_kv_heads=num_kv_heads, head_dim=head_dim)


def catalogue_name(section: dict[str, Any]) -> str | None:
    """The catalogue's name of the model that a run file's section describes; None: it is no such model, or wrong."""
    given = validated(InlineModel, section)
    if isinstance(given, list):  # the run file says better what is wrong, with its key
        return None
    try:
        model = inline_model(given)
    except MeshwrightError:
        return None
    known = ((name, catalog.model(name)) for name in catalog.model_names())
    return next((name for name, one in known if _shapes(one) == _shapes(model)), None)


def _shapes(model: Model) -> Model:
    """The model without its names, its shared experts by their width together."""
    if (x := model.experts) is not None:
        x = replace(x, num_shared=0, shared_ffn_hidden=x.shared_hidden)
    return replace(model, name="", family="", experts=x)
