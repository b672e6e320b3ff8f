"""Models as MaxText's configuration keys, with every shape written out.

    block        Hugging Face's names                architecture
    qwen3        Llama, Mistral, Qwen3               grouped attention, gated feed-forward
    qwen3_moe    Mixtral, Qwen3Moe                   ... with experts that softmax scores choose
    deepseek     DeepseekV2, DeepseekV3              latent attention, shared and routed experts after dense layers
    gpt_oss      GptOss                              biases, sinks, a window in every other layer, clipped experts

MaxText's own block for Llama does not scale attention scores and folds 1 / sqrt(d) into the initial query weights, so
that Adam changes queries sqrt(d) times faster than elsewhere. Its block for Qwen3 scales the scores and, without
normalised queries and keys, computes exactly Llama. It is therefore used for Llama.

MaxText enables the routing of DeepSeek-V3 (sigmoid scores, a bias that follows the load, groups) by the name of the
model, not by a key: `ROUTED_AS_V3`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.engines import refusals
from meshwright.engines.base import Unsupported
from meshwright.specs import model_parts
from meshwright.specs.model import Attention, AttentionKind, Experts, Model, Rope, RopeScaling, Router

DENSE, MIXTURE, LATENT, SINKS = "qwen3", "qwen3_moe", "deepseek", "gpt_oss"
GPT_OSS = "GptOssForCausalLM"
NOT_DECAYED = ["scale", "bias", "sinks"]  # parts of names of parameters without weight decay
CLIPPED_AT = 7.0  # limit of the inputs of gpt-oss's activation, in its code and in all its config.json
SINK_KEYS = {
    "attention_sink": True, "inhomogeneous_layer_cycle_interval": 2, "mlp_activations": ["sigmoid", "linear"],
    "mlp_activations_limit": CLIPPED_AT, "mlp_bias": True, "routed_bias": True,
}  # fmt: skip
"""Keys of the block of GPT-OSS as it is published."""
LLAMA_31 = {"factor": 8.0, "original_context": 8192, "low_frequency": 1.0, "high_frequency": 4.0}
"""Parameters of MaxText's RoPE scaling under `rope_type: llama3.1`; the numbers are in its code."""
ROUTED_AS_V3 = "deepseek3-671b"
"""A name that selects the routing. An empty model file of this name prevents that it sets the shapes too."""
LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents in DeepSeek's code for all models; in MaxText it is the model's."""


def check_model(model: Model) -> Iterator[Unsupported]:
    """Reasons for which `model` is not supported with MaxText."""
    a = model.attention
    parts = {
        "sliding windows": model.num_windowed_layers and not is_gpt_oss(model),
        "biases in attention": a.bias and not is_gpt_oss(model),
        "norms with a bias": model.norm_bias,
        "feed-forward blocks without a gate": not model.gated_ffn,
        "learned positions": model.learned_positions,
    }
    hint = "lowered are Llama, Mistral and Mixtral without windows, Qwen3, Qwen3-MoE, DeepSeek, GPT-OSS"
    yield from _not_lowered(parts, model.name, hint=hint)
    yield from refusals.predictions(model)
    has = model_parts.GPT_OSS if is_gpt_oss(model) else {}
    yield from refusals.model_parts(model, has=has, reads_fused=is_gpt_oss(model))
    if is_gpt_oss(model):
        yield from _check_gpt_oss(model)
    if is_latent(model):
        yield from _check_latent(model)
    elif model.experts is not None:
        yield from _check_experts(model.experts, model.name)
    yield from _check_rope(model.rope, is_latent=is_latent(model))


def is_latent(model: Model) -> bool:
    """Return True for latent attention, as in DeepSeek's layers."""
    return model.attention.kind is AttentionKind.MLA


def is_gpt_oss(model: Model) -> bool:
    """Return True for attention sinks and clipped experts, which only the family determines."""
    return model.family == GPT_OSS


def is_routed_as_v3(model: Model) -> bool:
    """Return True if experts are chosen as in DeepSeek-V3."""
    return model.experts is not None and model.experts.router is Router.SIGMOID


def _check_latent(model: Model) -> Iterator[Unsupported]:
    x, a = model.experts, model.attention
    if x is None or not x.shared_hidden or not model.num_moe_layers:
        yield from _not_lowered({"latent attention without experts and shared ones": True}, model.name)
        return
    by_softmax = x.router is Router.SOFTMAX
    parts = {
        "normalised queries and keys in latent attention": a.qk_norm,
        "shared experts of another width than the routed ones": x.shared_hidden != x.num_shared * x.ffn_hidden,
        "groups of experts under softmax scores": by_softmax and x.num_groups,
        "normalised softmax scores with shared experts": by_softmax and x.normalize_top_k,
        "sigmoid scores that are not normalised": not by_softmax and not x.normalize_top_k,
        "groups of one expert": x.num_groups == x.num_experts,
    }
    yield from _not_lowered(parts, model.name)
    if model.norm_epsilon != LATENT_EPSILON:
        yield Unsupported(
            key="model",
            reason=f"MaxText normalises latents with the model's norm_epsilon, which must be {LATENT_EPSILON:g}",
        )


def _check_gpt_oss(model: Model) -> Iterator[Unsupported]:
    a = model.attention
    parts = {
        "the family GPT-OSS without experts": model.experts is None,
        "latents or normalised queries and keys under the family GPT-OSS": is_latent(model) or a.qk_norm,
        "the family GPT-OSS without biases": not a.bias,
        "an odd number of layers under the family GPT-OSS": model.num_layers % 2,
    }
    yield from _not_lowered(parts, model.name)


def _check_experts(x: Experts, name: str) -> Iterator[Unsupported]:
    parts = {
        "sigmoid scores": x.router is not Router.SOFTMAX,
        "shared experts": x.shared_hidden,
        "dense layers in models with experts": x.num_dense_layers,
        "groups of experts": x.num_groups,
        "a scale of the routed experts": x.routed_scale != 1,
        "expert weights that are not normalised": not x.normalize_top_k,
    }
    yield from _not_lowered({f"{what} without latent attention": has for what, has in parts.items()}, name)


def _not_lowered(parts: Mapping[str, object], name: str, *, hint: str | None = None) -> Iterator[Unsupported]:
    for what, has in parts.items():
        if has:
            yield Unsupported(key="model", reason=f"{what} of {name} is not lowered", hint=hint)


def _check_rope(rope: Rope, *, is_latent: bool) -> Iterator[Unsupported]:
    if rope.scaling is RopeScaling.LLAMA3 and not is_latent:
        given = {name: getattr(rope, name) for name in LLAMA_31}
        if given != LLAMA_31:
            yield Unsupported(key="model", reason=f"RoPE scaling llama3 must have {LLAMA_31}; here {given}")
    elif rope.scaling is RopeScaling.YARN:
        # MaxText scales rotated dimensions by the paper's temperature or not, and has whole numbers.
        for name in ("factor", "beta_fast", "beta_slow"):
            if (value := getattr(rope, name)) != int(value):
                yield Unsupported(key="model", reason=f"YARN's {name} must be a whole number, here {value:g}")
        if rope.mscale and rope.mscale_all_dims and rope.mscale != rope.mscale_all_dims:
            yield Unsupported(key="model", reason="YARN's mscale and mscale_all_dims must be equal, or one of them 0")
    elif rope.scaling is not RopeScaling.NONE:
        yield Unsupported(key="model", reason=f"RoPE scaling {rope.scaling.value} is not lowered")
    if rope.theta != int(rope.theta):
        yield Unsupported(key="model", reason="rope.theta must be a whole number")


def model_keys(model: Model, *, sequence_length: int) -> dict[str, Any]:
    """Return the keys of a configuration for `model` with sequences of `sequence_length` tokens."""
    a, x = model.attention, model.experts
    is_mixed = is_latent(model) and model.num_dense_layers > 0  # has dense layers and layers with experts
    keys: dict[str, Any] = {
        "decoder_block": _block(model),
        "base_emb_dim": model.hidden,
        "base_num_decoder_layers": model.num_layers,
        "base_num_query_heads": a.num_heads,
        "base_num_kv_heads": a.num_heads if is_latent(model) else a.num_kv_heads,
        "head_dim": a.head_dim,
        "base_mlp_dim": model.ffn_hidden if x is None or is_mixed else x.ffn_hidden,
        "vocab_size": model.vocab,
        "mlp_activations": ["silu", "linear"],
        "normalization_layer_epsilon": model.norm_epsilon,
        "use_qk_norm": a.qk_norm,
        "logits_via_embedding": model.tied_embeddings,
        "normalize_embedding_logits": False,
        **_rope_keys(model, sequence_length=sequence_length),
        "enable_dropout": False,
    }
    if x is not None:
        keys |= {
            "num_experts": x.num_experts,
            "num_experts_per_tok": x.top_k,
            "base_moe_mlp_dim": x.ffn_hidden,
            "norm_topk_prob": x.normalize_top_k,
        }
    if is_gpt_oss(model):
        keys |= _gpt_oss_keys(a)
    return keys | (_latent_keys(a, x) if is_latent(model) and x is not None else {})


def _block(model: Model) -> str:
    if is_latent(model):
        return LATENT
    return SINKS if is_gpt_oss(model) else DENSE if model.experts is None else MIXTURE


def _gpt_oss_keys(a: Attention) -> dict[str, Any]:
    return {"attention_bias": True, "attention_sink": True, "sliding_window_size": a.window} | SINK_KEYS


def _latent_keys(a: Attention, x: Experts) -> dict[str, Any]:
    """Return the keys that only the block of DeepSeek has."""
    routing: dict[str, Any] = {"routed_score_func": x.router.value, "routed_scaling_factor": x.routed_scale}
    if x.router is Router.SIGMOID:
        routing |= {"model_name": ROUTED_AS_V3, "routed_bias": True}
        if x.num_groups:
            routing |= {"n_routing_groups": x.num_groups, "topk_routing_group": x.groups_per_token}
    return {
        "attention_type": "mla",
        "q_lora_rank": a.query_lora_rank,
        "kv_lora_rank": a.kv_lora_rank,
        "qk_nope_head_dim": a.head_dim - a.rope_head_dim,
        "qk_rope_head_dim": a.rope_head_dim,
        "v_head_dim": a.v_dim,
        "first_num_dense_layers": x.num_dense_layers,
        "shared_experts": x.num_shared,
        "float32_gate_logits": True,  # bf16 scores would hide a bias update of 0.001
        **routing,
    }


def _rope_keys(model: Model, *, sequence_length: int) -> dict[str, Any]:
    """RoPE. MaxText rotates adjacent pairs, as DeepSeek does, only with YARN, whose factor 1 changes nothing."""
    rope = model.rope
    base = {"rope_max_timescale": int(rope.theta)}
    if rope.scaling is not RopeScaling.YARN and not is_latent(model):
        return {"rope_type": "llama3.1" if is_interleaved(model) else "default", **base}
    is_yarn = rope.scaling is RopeScaling.YARN
    context = rope.original_context if is_yarn else sequence_length
    factor = int(rope.factor) if is_yarn else 1
    return {
        "rope_type": "yarn",
        **base,
        "rope_factor": factor,
        "original_max_position_embeddings": context,
        "max_position_embeddings": max(context * factor, sequence_length),  # rows of the RoPE table
        "beta_fast": int(rope.beta_fast),
        "beta_slow": int(rope.beta_slow),
        "rope_truncate": rope.truncate,
        "rope_interleave": is_latent(model),
        "mscale": rope.mscale_all_dims,
        "rope_attention_scaling": is_yarn and not (rope.mscale and rope.mscale_all_dims),
    }


def is_interleaved(model: Model) -> bool:
    """Return True if MaxText rotates adjacent pairs of a head and Hugging Face pairs of the two halves."""
    return model.rope.scaling is RopeScaling.LLAMA3
