"""What our tensors are called in the files of each family, as tables.

A name of ours is a place in the model (`layers.3.attention.query.weight`); the tables give the part after the number
of the layer. A stack of experts [E, ...] is E tensors in a file: `{expert}` stands for their number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.errors import InputError
from meshwright.specs.model import AttentionKind, Model, Router

OUTSIDE_LAYERS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}

NORMS = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}

GROUPED_ATTENTION = {
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.query.bias": "self_attn.q_proj.bias",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.key.bias": "self_attn.k_proj.bias",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.value.bias": "self_attn.v_proj.bias",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.output.bias": "self_attn.o_proj.bias",
}

LATENT_ATTENTION = {
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.query_down.weight": "self_attn.q_a_proj.weight",
    "attention.query_down.bias": "self_attn.q_a_proj.bias",
    "attention.query_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.query_up.weight": "self_attn.q_b_proj.weight",
    "attention.kv_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_down.bias": "self_attn.kv_a_proj_with_mqa.bias",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up.weight": "self_attn.kv_b_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.output.bias": "self_attn.o_proj.bias",
}

DENSE = {
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
}

MIXTRAL_EXPERTS = {
    "ffn.router.weight": "block_sparse_moe.gate.weight",
    "ffn.experts.gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "ffn.experts.up": "block_sparse_moe.experts.{expert}.w3.weight",
    "ffn.experts.down": "block_sparse_moe.experts.{expert}.w2.weight",
}

EXPERTS = {
    "ffn.router.weight": "mlp.gate.weight",
    "ffn.router.bias_E": "mlp.gate.e_score_correction_bias",
    "ffn.experts.gate": "mlp.experts.{expert}.gate_proj.weight",
    "ffn.experts.up": "mlp.experts.{expert}.up_proj.weight",
    "ffn.experts.down": "mlp.experts.{expert}.down_proj.weight",
    "ffn.shared.gate.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared.up.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared.down.weight": "mlp.shared_experts.down_proj.weight",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture of Hugging Face transformers."""

    architecture: str
    model_type: str
    in_layer: dict[str, str]
    fits: Callable[[Model], bool]  # whether its config can express a model


def _is_grouped(model: Model, *, qk_norm: bool) -> bool:
    return model.attention.kind is AttentionKind.GQA and model.attention.qk_norm is qk_norm


def _is_llama(model: Model) -> bool:
    return _is_grouped(model, qk_norm=False) and not model.experts and not model.attention.num_windowed_layers


def _is_mistral(model: Model) -> bool:
    windowed = model.attention.num_windowed_layers in (0, model.num_layers)
    return _is_grouped(model, qk_norm=False) and not model.experts and not model.attention.bias and windowed


def _is_mixtral(model: Model) -> bool:
    windowed = model.attention.num_windowed_layers in (0, model.num_layers)
    plain = _is_grouped(model, qk_norm=False) and not model.attention.bias and windowed
    x = model.experts
    return plain and x is not None and x.normalize_top_k and _is_plain_mixture(model)


def _is_qwen3(model: Model) -> bool:
    return _is_grouped(model, qk_norm=True) and not model.experts


def _is_qwen3_moe(model: Model) -> bool:
    plain = _is_grouped(model, qk_norm=True) and not model.attention.num_windowed_layers
    return plain and model.experts is not None and _is_plain_mixture(model)


def _is_plain_mixture(model: Model) -> bool:
    """Softmax scores, an expert layer everywhere, nothing shared."""
    x = model.experts
    return (
        x is not None
        and x.router is Router.SOFTMAX
        and not (x.num_groups or x.num_dense_layers or x.shared_hidden)
        and x.routed_scale == 1
    )


def _is_deepseek(model: Model, *, router: Router, normalized: tuple[bool, ...]) -> bool:
    x = model.experts
    return (
        model.attention.kind is AttentionKind.MLA
        and x is not None
        and x.router is router
        and x.normalize_top_k in normalized
        and x.num_shared > 0
        and x.shared_hidden == x.num_shared * x.ffn_hidden
    )


def _is_deepseek_v2(model: Model) -> bool:
    return _is_deepseek(model, router=Router.SOFTMAX, normalized=(False,))


def _is_deepseek_v3(model: Model) -> bool:
    return _is_deepseek(model, router=Router.SIGMOID, normalized=(False, True))


_LATENT_LAYER = NORMS | LATENT_ATTENTION | DENSE | EXPERTS
_FAMILIES = (  # where a model names no family, the first that fits
    Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        in_layer=NORMS | GROUPED_ATTENTION | DENSE,
        fits=_is_llama,
    ),
    Family(
        architecture="MistralForCausalLM",
        model_type="mistral",
        in_layer=NORMS | GROUPED_ATTENTION | DENSE,
        fits=_is_mistral,
    ),
    Family(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        in_layer=NORMS | GROUPED_ATTENTION | MIXTRAL_EXPERTS,
        fits=_is_mixtral,
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        in_layer=NORMS | GROUPED_ATTENTION | DENSE,
        fits=_is_qwen3,
    ),
    Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        in_layer=NORMS | GROUPED_ATTENTION | EXPERTS,
        fits=_is_qwen3_moe,
    ),
    Family(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        in_layer=_LATENT_LAYER,
        fits=_is_deepseek_v2,
    ),
    Family(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        in_layer=_LATENT_LAYER,
        fits=_is_deepseek_v3,
    ),
)


def family_of(model: Model) -> Family:
    """The family whose files hold this model: the one it names, or the first that can express its shapes.

    Raises InputError when there is none.
    """
    for family in _FAMILIES:
        if family.architecture == (model.family or family.architecture) and family.fits(model):
            return family
    raise InputError(
        f"{model.name}: no architecture of Hugging Face transformers has these shapes"
        + (f" under the name {model.family}" if model.family else ""),
        allowed=", ".join(f.architecture for f in _FAMILIES),
        hint="such a model trains here; its weights stay in Meshwright's own checkpoints",
    )


def file_names(model: Model, name: str, *, family: Family) -> tuple[str, ...]:
    """Names in files of our tensor `name`: one, or one for each expert of a stack.

    >>> from meshwright.catalog import model
    >>> mixtral = model("mixtral-8x7b")
    >>> file_names(mixtral, "layers.3.ffn.experts.up", family=family_of(mixtral))[:2]
    ('model.layers.3.block_sparse_moe.experts.0.w3.weight', 'model.layers.3.block_sparse_moe.experts.1.w3.weight')
    """
    if name == "head.weight" and model.tied_embeddings:  # of the last stage, which has its own
        name = "embedding.weight"
    if name in OUTSIDE_LAYERS:
        return (OUTSIDE_LAYERS[name],)
    _, index, place = name.split(".", 2)
    pattern = f"model.layers.{index}.{family.in_layer[place]}"
    if "{expert}" not in pattern:
        return (pattern,)
    assert model.experts is not None
    return tuple(pattern.format(expert=e) for e in range(model.experts.num_experts))


_NOT_READ = (
    re.compile(r"\.rotary_emb\.inv_freq$"),  # old Llama files: follows from the config
    re.compile(r"\.self_attn\.rotary_emb\."),
)


def without_ignored(names: Iterator[str] | set[str], *, model: Model) -> set[str]:
    """`names` of a file without those that no model reads: old buffers, prediction modules, a tied head."""
    kept = {n for n in names if not any(pattern.search(n) for pattern in _NOT_READ)}
    kept = {n for n in kept if _layer(n) < model.num_layers}  # DeepSeek-V3: multi-token prediction is layer L
    return kept - {OUTSIDE_LAYERS["head.weight"]} if model.tied_embeddings else kept


def _layer(name: str) -> int:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match.group(1)) if match else -1
