"""What Megatron's checkpoints call the tensors of a model, as tables. Imports no torch.

A place of ours is a name of the native engine's (`layers.3.attention.query.weight`), with the number of the expert
where it is one of a stack. Most of Megatron's tensors are one of ours; its queries, keys and values are one tensor, a
group of heads after the other:

    group g:  the queries of its H / G heads, its key, its value          rows of [G (H / G + 2) K, D]
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.specs.model import Model

OUTSIDE_LAYERS = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "head.weight": "output_layer.weight",
}

NORMS = {
    "attention_norm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "ffn_norm.weight": "mlp.linear_fc1.layer_norm_weight",
}

ATTENTION = {
    "attention.query.weight": "self_attention.linear_qkv.weight",
    "attention.key.weight": "self_attention.linear_qkv.weight",
    "attention.value.weight": "self_attention.linear_qkv.weight",
    "attention.output.weight": "self_attention.linear_proj.weight",
    "attention.query_norm.weight": "self_attention.q_layernorm.weight",
    "attention.key_norm.weight": "self_attention.k_layernorm.weight",
}
FUSED = ("attention.query.weight", "attention.key.weight", "attention.value.weight")

DENSE = {
    "ffn.gate.weight": "mlp.linear_fc1.weight_w",
    "ffn.up.weight": "mlp.linear_fc1.weight_v",
    "ffn.down.weight": "mlp.linear_fc2.weight",
}

EXPERTS = {
    "ffn.router.weight": "mlp.router.weight",
    "ffn.router.bias_E": "mlp.router.expert_bias",
    "ffn.experts.gate": "mlp.experts.experts.{expert}.linear_fc1.weight_w",
    "ffn.experts.up": "mlp.experts.experts.{expert}.linear_fc1.weight_v",
    "ffn.experts.down": "mlp.experts.experts.{expert}.linear_fc2.weight",
    "ffn.shared.gate.weight": "mlp.shared_experts.linear_fc1.weight_w",
    "ffn.shared.up.weight": "mlp.shared_experts.linear_fc1.weight_v",
    "ffn.shared.down.weight": "mlp.shared_experts.linear_fc2.weight",
}

IN_LAYER = NORMS | ATTENTION | DENSE | EXPERTS


@dataclass(frozen=True, kw_only=True)
class Place:
    """One tensor of ours: a whole one, or one expert of a stack."""

    name: str
    expert: int | None = None


def key_of(place: Place) -> str:
    """Megatron's name of the tensor that holds `place`.

    >>> key_of(Place(name="layers.3.attention.key.weight"))
    'decoder.layers.3.self_attention.linear_qkv.weight'
    """
    if place.name in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[place.name]
    _, index, inside = place.name.split(".", 2)
    return f"decoder.layers.{index}." + IN_LAYER[inside].format(expert=place.expert)


def is_fused(place: Place) -> bool:
    """Whether Megatron holds `place` with two others in one tensor."""
    return place.name.endswith(FUSED)


def is_vocabulary(place: Place) -> bool:
    """Whether Megatron pads the rows of `place`."""
    return place.name in ("embedding.weight", "head.weight")


def places_of(model: Model, shapes: dict[str, tuple[int, ...]]) -> dict[Place, tuple[int, ...]]:
    """Every tensor of ours with its shape, in the order of the model. `shapes` are the native engine's by name."""
    x, places = model.experts, {}
    for name, shape in shapes.items():
        if ".experts." not in name:
            places[Place(name=name)] = shape
            continue
        assert x is not None
        places |= {Place(name=name, expert=e): shape[1:] for e in range(x.num_experts)}
    return places
