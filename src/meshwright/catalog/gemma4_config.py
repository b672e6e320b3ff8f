"""config.json of Gemma 4's language part to shapes.

Layers with full attention have wider heads, and fewer of them for keys and values, which one projection may make both.
Mixtures have experts beside the dense block of each layer. The norm of values, which has no weights, is left out.
Embeddings of each layer and keys and values of other layers have no formula: models with them are refused.

Source of the keys and their defaults: transformers, models/gemma4/configuration_gemma4.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.catalog.config_keys import ConfigKeys, grouped_attention, in_layers
from meshwright.catalog.planned_configs import normalized, planned
from meshwright.errors import InputError
from meshwright.specs.model import Attention, Experts, FullLayers, Model, NormPlacement

_KINDS = {"sliding_attention": True, "full_attention": False}


def read_gemma4(c: ConfigKeys) -> Model:
    """The dense model of 31 billion parameters and the mixture of 26; the smaller ones are refused."""
    for key, usual in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 0)):
        if c.count(key, usual, minimum=0):
            raise InputError(f"{c.name}: {key} is not costed", got=c.value(key, usual), allowed="0")
    for key in ("vocab_size_per_layer_input", "use_double_wide_mlp"):  # of those two
        c.value(key)
    c.default({"hidden_act": c.value("hidden_activation", "gelu_pytorch_tanh")})
    return replace(
        planned(c, _attention(c), tied=True, experts=_experts(c)),
        norm_placement=NormPlacement.BOTH,
        scaled_embeddings=True,
        logit_cap=c.limit("final_logit_softcapping", 0.0),
    )


def _windowed(c: ConfigKeys) -> list[bool]:
    """For each layer True if it has a window. The last has none; its entry in `layer_types` has no effect."""
    num_layers, types = c.count("num_hidden_layers"), c.items("layer_types")
    if types is None:
        types = [list(_KINDS)[(index + 1) % 6 == 0] for index in range(num_layers)]
    if len(types) != num_layers or any(kind not in list(_KINDS) for kind in types):
        allowed = f"{num_layers} of {', '.join(_KINDS)}"
        raise InputError(f"{c.name}: layer_types", got=f"{len(types)} entries", allowed=allowed)
    return [*(_KINDS[kind] for kind in types[:-1]), False]


def _attention(c: ConfigKeys) -> Attention:
    windowed = _windowed(c)
    attention = grouped_attention(c, bias=c.flag("attention_bias", False), head_dim=256, kv_heads=4)
    attention, window = normalized(attention), c.count("sliding_window", 512)
    full = _full_layers(c, attention, windowed)
    if any(windowed):
        return in_layers(replace(attention, window=window, full_layers=full), windowed)
    if full.shares_values:
        c.refuse("attention_k_eq_v: in all layers")
    return replace(attention, head_dim=full.head_dim, num_kv_heads=full.num_kv_heads)


def _full_layers(c: ConfigKeys, attention: Attention, windowed: Sequence[bool]) -> FullLayers:
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


def _experts(c: ConfigKeys) -> Experts | None:
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
