"""Models as MaxText's configuration keys, with every shape written out.

    block        Hugging Face's names                what it holds
    qwen3        Llama, Mistral, Qwen3               grouped attention, gated feed-forward
    qwen3_moe    Mixtral, Qwen3Moe                   ... with experts that softmax scores choose

MaxText's own block for Llama leaves out the scale of attention scores and folds 1 / sqrt(d) into the first query
weights; under Adam queries then move sqrt(d) times further than they do elsewhere. Its block for Qwen3 scales the
scores, and is Llama's to the last operation when queries and keys are not normalised. So that one is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.engines.base import Unsupported
from meshwright.specs.model import AttentionKind, Experts, Model, Rope, RopeScaling, Router

DENSE, MIXTURE = "qwen3", "qwen3_moe"
LLAMA_31 = {"factor": 8.0, "original_context": 8192, "low_frequency": 1.0, "high_frequency": 4.0}
"""How MaxText stretches rotary frequencies under `rope_type: llama3.1`; the numbers are in its code."""


def check_model(model: Model) -> Iterator[Unsupported]:
    """Why MaxText, as it is used here, cannot hold `model`."""
    a = model.attention
    for wrong, what in (
        (a.kind is AttentionKind.MLA, "latent attention"),
        (a.num_windowed_layers > 0, "sliding windows"),
        (a.bias, "biases in attention"),
        (model.norm_bias, "norms with a bias"),
        (not model.gated_ffn, "feed-forward blocks without a gate"),
        (model.learned_positions > 0, "learned positions"),
        (model.num_mtp_layers > 0, "multi-token prediction"),
    ):
        if wrong:
            yield Unsupported(
                key="model", reason=f"{what} of {model.name} is not lowered",
                hint="lowered are Llama, Mistral and Mixtral without windows, Qwen3 and Qwen3-MoE",
            )  # fmt: skip
    if model.experts is not None:
        yield from _check_experts(model.experts, model.name)
    yield from _check_rope(model.rope)


def _check_experts(x: Experts, name: str) -> Iterator[Unsupported]:
    for wrong, what in (
        (x.router is not Router.SOFTMAX, "sigmoid scores"),
        (x.shared_hidden > 0, "shared experts"),
        (x.num_dense_layers > 0, "dense layers beside experts"),
        (x.num_groups > 0, "groups of experts"),
        (x.routed_scale != 1, "a scale of the routed experts"),
        (not x.normalize_top_k, "expert weights that do not add up to 1"),
    ):
        if wrong:
            yield Unsupported(key="model", reason=f"{what} of {name} is not lowered")


def _check_rope(rope: Rope) -> Iterator[Unsupported]:
    if rope.scaling is RopeScaling.LLAMA3:
        given = {name: getattr(rope, name) for name in LLAMA_31}
        if given != LLAMA_31:
            yield Unsupported(
                key="model",
                reason=f"rotary frequencies are stretched as Llama 3.1 does, with {LLAMA_31}; here {given}",
            )
    elif rope.scaling is not RopeScaling.NONE:
        yield Unsupported(
            key="model", reason=f"rotary frequencies stretched by {rope.scaling.value} are not lowered"
        )
    if rope.theta != int(rope.theta):
        yield Unsupported(key="model", reason="the base of the rotary wavelengths must be a whole number")


def model_keys(model: Model) -> dict[str, Any]:
    """The part of a configuration that says what `model` is."""
    a, x = model.attention, model.experts
    keys: dict[str, Any] = {
        "decoder_block": DENSE if x is None else MIXTURE,
        "base_emb_dim": model.hidden,
        "base_num_decoder_layers": model.num_layers,
        "base_num_query_heads": a.num_heads,
        "base_num_kv_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "base_mlp_dim": model.ffn_hidden if x is None else x.ffn_hidden,
        "vocab_size": model.vocab,
        "mlp_activations": ["silu", "linear"],
        "normalization_layer_epsilon": model.norm_epsilon,
        "use_qk_norm": a.qk_norm,
        "logits_via_embedding": model.tied_embeddings,
        "normalize_embedding_logits": False,
        "rope_type": "llama3.1" if is_interleaved(model) else "default",
        "rope_max_timescale": int(model.rope.theta),
        "enable_dropout": False,
    }
    if x is not None:
        keys |= {
            "num_experts": x.num_experts,
            "num_experts_per_tok": x.top_k,
            "base_moe_mlp_dim": x.ffn_hidden,
            "norm_topk_prob": True,
        }
    return keys


def is_interleaved(model: Model) -> bool:
    """Whether MaxText turns neighbouring pairs of a head, where Hugging Face turns halves."""
    return model.rope.scaling is RopeScaling.LLAMA3
