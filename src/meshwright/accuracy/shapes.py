"""Model of a published row, from its own dimensions, the catalogue and the published-model list.

The row's own dimensions take precedence. Missing ones come from the model that it names, then from that model's family,
each with a note. Truncated models ("16 layers", "-L4") keep the named model's layer shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from meshwright.accuracy.csvfile import CsvRow
from meshwright.accuracy.reasons import CannotPredictError, Reason
from meshwright.accuracy.shipped import measured_model_names, published_models
from meshwright.accuracy.wording import shape_name
from meshwright.catalog import lookup as catalog
from meshwright.catalog.models import model_like
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.files import record_of
from meshwright.specs.model import Attention, AttentionKind, Experts, Model

_TRUNCATED = re.compile(r"[-_\s(,]*(?:proxy,?\s*)?(?:\bL(\d+)|\b(\d+)\s?L\b|\b(\d+) layers)\)?\s*$", re.IGNORECASE)
_FEWER_LAYERS = re.compile(r"-\d+-layers$")
"""The end that `_adapt` adds to the name of a model with fewer layers."""
SAME_COUNT = 0.005
"""Relative error of a model's parameter count that agrees with the printed one."""
SIZE_DIFFERS = 0.1
"""Relative error of a model's parameter count against the rounded size in its name."""
_POINT_OF_A_SIZE = re.compile(r"(?<=\d)\.(?=\d+ ?[bm]\b)")
_LIKE = re.compile(r"[- ]like\b", re.IGNORECASE)
_PREDICTIONS = re.compile(r"\d ?MTP", re.IGNORECASE)
_DENSE_LAYERS = re.compile(r"dense_layers=(\d+)")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A model and the assumptions behind it."""

    model: Model
    assumed: tuple[str, ...] = ()


def read_model(row: CsvRow) -> Reading:
    """The model of `row`. Raises CannotPredictError when its architecture or its dimensions are unknown."""
    names = [row.text(c) for c in ("model_canonical", "model") if row.text(c)]
    if size := row.text("model_size"):  # a family and a size in columns of their own
        names = [f"{row.text('model')} {size}", *names]
    if not names:
        raise CannotPredictError(Reason.NO_DIMENSIONS, "no model name")
    found = next((m for m in (_named_model(_stem(name)[0]) for name in names) if m), None)
    if found is None:
        for name in names:
            for entry in published_models()["unsupported"]:
                if re.search(entry["match"], name, re.IGNORECASE):
                    raise CannotPredictError(Reason.UNKNOWN_ARCHITECTURE, entry["why"])
        if row.text("arch").startswith("hybrid"):
            raise CannotPredictError(Reason.UNKNOWN_ARCHITECTURE, "state-space or linear-attention layers")
        return _from_dimensions(row, names[0])
    base, assumed = found
    reading = _adapt(row, base, assumed, num_layers=_num_layers(row, names))
    truncated = any(_stem(name)[1] for name in names)
    others = []
    for column, of in _SHAPES.items():
        ours, named = row.count(column), of(base)
        skipped = (column == "layers" and truncated) or (column == "ffn" and base.experts is not None)
        if ours and named and ours != named and not skipped:
            others.append(f"{column} {ours}, {named} in {base.name}: {of(reading.model)} used")
    return replace(reading, assumed=(*reading.assumed, *others))


_SHAPES: dict[str, Callable[[Model], int]] = {
    "layers": lambda m: m.num_layers,
    "hidden": lambda m: m.hidden,
    "ffn": lambda m: m.ffn_hidden,
    "heads": lambda m: m.attention.num_heads,
}


def may_be_published(name: str) -> bool:
    """Tell whether a shipped measured run may have a model of this name; False is certain.

    It reads no row, which takes milliseconds where reading all of them takes seconds.
    """
    whole = _FEWER_LAYERS.sub("", name)
    return whole in measured_model_names() or whole in published_models()["model"] or whole in catalog.model_names()


def _num_layers(row: CsvRow, names: list[str]) -> int | None:
    """Number of layers: the row's column, else the count in its name; None when both are missing."""
    return row.count("layers") or next((n for n in (_stem(name)[1] for name in names) if n), None)


def _stem(name: str) -> tuple[str, int | None]:
    """A model name without its truncation mark, and the layer count that the mark gives.

    >>> _stem("Grok-1 314B (proxy, 16 layers)"), _stem("deepseekv3-L4"), _stem("DeepSeek-V3-4L")
    (('Grok-1 314B', 16), ('deepseekv3', 4), ('DeepSeek-V3', 4))
    """
    match = _TRUNCATED.search(name)
    if match is None:
        return name, None
    return name[: match.start()], int(next(g for g in match.groups() if g))


def _key(name: str) -> str:
    """Letters and digits of a name, lower case: different spellings of one model agree in these.

    The point of a size becomes a letter, as OPT has 1.3 and 13 billion parameters.

    >>> _key("Llama 3.1 8B"), _key("OPT-1.3B")
    ('llama318b', 'opt1p3b')
    """
    return re.sub(r"[^a-z0-9]", "", _POINT_OF_A_SIZE.sub("p", name.lower()))


@cache
def _known_names() -> dict[str, str]:
    """Letters and digits of a name or alias -> the name of a catalogue model or of a published-model entry."""
    data, names = published_models(), catalog.model_names()
    listed = [catalog.entry(catalog.CatalogKind.MODEL, name) for name in names]
    aliases = {_key(alias): one.name for one in listed for alias in (*one.hub_names, *one.aliases)}
    known = {_key(name): name for name in (*data["model"], *names)}
    return aliases | known | data["names"] | data["ambiguous_names"]


@cache
def _named_model(name: str) -> tuple[Model, tuple[str, ...]] | None:
    """The model with a published name, with a note if the name is ambiguous; None for an unknown name."""
    data, key = published_models(), _key(name)
    if key not in _known_names():
        key = _key(shape_name(name))
    if key not in _known_names() and (like := _LIKE.search(name)):
        found = _named_model(name[: like.start()])
        return found and (found[0], (*found[1], f"{name} read as {found[0].name} but for what the row states"))
    known = _known_names().get(key) or model_like("-".join(name.split()))
    if known is None:
        return _with_size_behind(shape_name(name))
    note = (f"{name} read as {known}",) if key in data["ambiguous_names"] else ()
    if known in data["model"]:
        return _from_entry(known, data["model"][known]), note
    return catalog.model(known), note


_SIZE = re.compile(r"[-_ (]+(\d+(?:\.\d+)?) ?([bt])(?:[-_, ]+a\d+(?:\.\d+)?b)?\)?$", re.IGNORECASE)


def _with_size_behind(name: str) -> tuple[Model, tuple[str, ...]] | None:
    """The model of a name with its size behind it, where it has that many parameters: "MiniMax-M2 230B-A10B"."""
    size = _SIZE.search(name)
    found = _named_model(name[: size.start()]) if size else None
    if size is None or found is None:
        return None
    printed = float(size[1]) * (1e9 if size[2].lower() == "b" else 1e12)
    return found if abs(total_parameters(found[0]) / printed - 1) < SIZE_DIFFERS else None


def _from_entry(name: str, entry: dict[str, Any]) -> Model:
    return record_of(Model, {"name": name} | {key: value for key, value in entry.items() if key != "source"})


def _adapt(row: CsvRow, base: Model, assumed: tuple[str, ...], *, num_layers: int | None) -> Reading:
    """`base` with the row's own dimensions in place of its own."""
    num_layers = num_layers or base.num_layers
    truncated = num_layers < base.num_layers
    model = replace(
        base,
        name=base.name if not truncated else f"{base.name}-{num_layers}-layers",
        num_layers=num_layers,
        vocab=row.count("vocab") or base.vocab,
        attention=_adapt_attention(row, base, num_layers),
    )
    if base.experts is None:
        model = replace(
            model, hidden=row.count("hidden") or base.hidden, ffn_hidden=row.count("ffn") or base.ffn_hidden
        )
    else:
        model = replace(model, experts=_adapt_experts(row, base, base.experts, num_layers))
        if truncated and base.experts.num_dense_layers:
            assumed += (f"{model.num_dense_layers} of {num_layers} layers dense",)
    if truncated and base.num_mtp_layers and not _PREDICTIONS.search(row.text("model")):
        model = replace(model, num_mtp_layers=0)
        assumed += ("no multi-token prediction in a truncated model",)
    return Reading(model=model, assumed=assumed)


def _adapt_attention(row: CsvRow, base: Model, num_layers: int) -> Attention:
    """Heads from the row, except for latent attention, where listed key/value heads have no meaning."""
    attention = base.attention
    if base.experts is None and attention.kind is AttentionKind.GQA:
        hidden, heads = row.count("hidden") or base.hidden, row.count("heads") or attention.num_heads
        same = (hidden, heads) == (base.hidden, attention.num_heads)
        attention = replace(
            attention,
            num_heads=heads,
            num_kv_heads=row.count("kv_heads") or (attention.num_kv_heads if same else heads),
            head_dim=attention.head_dim if same else _head_dim(hidden, heads),
        )
    if attention.compression is not None:
        strides = attention.compression.strides[:num_layers]
        attention = replace(attention, compression=replace(attention.compression, strides=strides))
    if attention.num_windowed_layers:  # a pattern repeats over any number of layers
        windowed = round(attention.num_windowed_layers * num_layers / base.num_layers)
        attention = replace(attention, num_windowed_layers=windowed)
    return attention


def _adapt_experts(row: CsvRow, base: Model, experts: Experts, num_layers: int) -> Experts:
    dense = experts.num_dense_layers
    if num_layers < base.num_layers:
        stated = _DENSE_LAYERS.search(row.text("notes"))
        leading = dense if 2 * dense < base.num_layers else dense * num_layers // base.num_layers
        dense = int(stated[1]) if stated else min(leading, num_layers)
    return replace(
        experts,
        num_experts=row.count("experts") or experts.num_experts,
        top_k=row.count("topk") or experts.top_k,
        num_dense_layers=dense,
    )


def _head_dim(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise CannotPredictError(Reason.NO_DIMENSIONS, f"hidden {hidden} is not divisible by {heads} heads")
    return hidden // heads


def _from_dimensions(row: CsvRow, name: str) -> Reading:
    """Build a model from its dimensions; its family gives the rest."""
    hidden, heads = row.count("hidden"), row.count("heads")
    num_layers = _num_layers(row, [name])
    if not (hidden and heads and num_layers):
        missing = [w for w, v in (("layers", num_layers), ("hidden", hidden), ("heads", heads)) if not v]
        raise CannotPredictError(Reason.NO_DIMENSIONS, ", ".join(missing))
    family, assumed = _family(row, name), list[str]()
    experts = _own_experts(row, name, num_layers, assumed)
    ffn, vocab, kv_heads = row.count("ffn"), row.count("vocab"), row.count("kv_heads")
    if experts is not None and not experts.num_dense_layers:
        ffn = 0
    if ffn is None:
        if family["gated"]:
            raise CannotPredictError(Reason.NO_DIMENSIONS, "ffn")
        ffn = 4 * hidden
        assumed.append("feed-forward 4 x hidden")
    if vocab is None:
        vocab = family["vocab"]
        if not vocab:
            raise CannotPredictError(Reason.NO_DIMENSIONS, "vocab")
        assumed.append(f"vocabulary {vocab}")
    if kv_heads is None:
        kv_heads = heads
        assumed.append("as many key/value heads as query heads")
    if "note" in family:
        assumed.append(family["note"])
    seq_len = row.count("seq_len") or 0
    model = Model(
        name=name,
        hidden=hidden,
        num_layers=num_layers,
        vocab=vocab,
        ffn_hidden=ffn,
        gated_ffn=family["gated"],
        tied_embeddings=family["tied"],
        experts=experts,
        learned_positions=seq_len if family.get("learned_positions") else 0,
        norm_bias=family.get("norm_bias", False),
        attention=Attention(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=family.get("head_dim") or _head_dim(hidden, heads),
            bias=family.get("bias", False),
        ),
    )
    return _settle_embeddings(row, model, tuple(assumed))


def _own_experts(row: CsvRow, name: str, num_layers: int, assumed: list[str]) -> Experts | None:
    """The mixture that a row's dimensions describe; None for a dense model.

    Raises CannotPredictError for a mixture whose number or width of experts it leaves out.
    """
    num_experts, top_k, width = row.count("experts"), row.count("topk"), row.count("moe_ffn") or row.count("ffn")
    if row.text("arch") != "moe" and (num_experts or 0) <= 1:
        return None
    needed = (("experts", num_experts), ("topk", top_k), ("moe_ffn", width))
    if missing := [column for column, value in needed if not value]:
        detail = f"mixture of experts {name} is not listed, and its row has no {', '.join(missing)}"
        raise CannotPredictError(Reason.UNKNOWN_ARCHITECTURE, detail)
    if not row.count("moe_ffn"):
        assumed.append(f"experts {width} wide, as ffn says")
    dense = _DENSE_LAYERS.search(row.text("notes"))
    if dense is None:
        assumed.append("experts in every layer")
    if not row.text("shared_experts"):
        assumed.append("no shared experts")
    return Experts(
        num_experts=num_experts or 1,
        top_k=min(top_k or 1, num_experts or 1),
        ffn_hidden=width or 1,
        num_shared=row.count("shared_experts") or 0,
        num_dense_layers=min(int(dense[1]), num_layers) if dense else 0,
    )


def _family(row: CsvRow, name: str) -> dict[str, Any]:
    """The family entry of a name; without one the feed-forward width decides if it is gated."""
    for entry in published_models()["family"]:
        if re.search(entry["match"], name, re.IGNORECASE):
            return entry
    hidden, ffn = row.count("hidden") or 1, row.count("ffn")
    gated = (ffn is not None and ffn != 4 * hidden) or row.count("experts") is not None
    note = f"unknown family: feed-forward {'' if gated else 'not '}gated, embeddings untied"
    return {"gated": gated, "tied": False, "vocab": 0, "note": note}


@lru_cache(maxsize=1024)
def total_parameters(model: Model) -> float:
    """All parameters of `model`, which most rows of a sweep share."""
    return float(count_parameters(model_row(model)).total)


def _settle_embeddings(row: CsvRow, model: Model, assumed: tuple[str, ...]) -> Reading:
    """Tie the embeddings or not, by the printed parameter count if it is conclusive (within 0.5 %)."""
    printed = row.number("params_b")
    if not printed or len(row.text("params_b").replace(".", "").strip("0")) < 3:
        return Reading(model=model, assumed=assumed)
    other = replace(model, tied_embeddings=not model.tied_embeddings)
    miss, other_miss = (abs(total_parameters(m) / (printed * 1e9) - 1) for m in (model, other))
    if other_miss < SAME_COUNT < miss:
        tied = "tied" if other.tied_embeddings else "untied"
        return Reading(model=other, assumed=(*assumed, f"embeddings {tied}, as the parameter count says"))
    return Reading(model=model, assumed=assumed)
