"""Decoder blocks of MaxText that Meshwright plans and does not train with it, as sections of a run file.

Each function adds to `model`, the section with the sizes that all blocks have, what its block has of its own. The
section has the width of dense blocks, which a mixture without them drops.
Source: MaxText 0.2.5, maxtext/models/{gemma,gemma2,gemma3,gemma4,gpt3,llama4,olmo3,qwen2,qwen3,qwen3_5}.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.engines.maxtext.config.keys import MaxTextKeys

GEMMA = {"activation": "gelu_tanh", "scaled_embeddings": True}
FIVE_OF_SIX, THREE_OF_FOUR = [True] * 5 + [False], [True] * 3 + [False]
WIDTH_PER_HEAD = "gemma3-27b"
"""The model whose scores are divided by the root of its width per head; others have the width of a head."""


def _require(settings: MaxTextKeys, key: str, *allowed: Any) -> None:
    """Raise InputError unless `key` has one of the values that its block is read with."""
    if (value := settings.take(key)) not in allowed:
        raise InputError(f"a model that is not supported: {key}", got=value, allowed=", ".join(map(str, allowed)))


def _gemma(model: dict[str, Any], settings: MaxTextKeys) -> None:
    _require(settings, "mlp_activations", ["gelu", "linear"])
    model |= GEMMA | {"zero_centered_norms": True}


def _gemma2(model: dict[str, Any], settings: MaxTextKeys) -> None:
    _gemma(model, settings)
    _norms_on_both_sides(model, settings)
    model["num_layers"] *= 2  # a layer of MaxText is one with a window and one without
    model["logit_cap"] = float(settings.take("final_logits_soft_cap"))
    model["attention"] |= {
        "window": settings.take("sliding_window_size"), "window_pattern": [True, False],
        "score_cap": float(settings.take("attn_logits_soft_cap")), "score_divisor": model["attention"]["head_dim"],
    }  # fmt: skip


def _norms_on_both_sides(model: dict[str, Any], settings: MaxTextKeys) -> None:
    for key in ("use_post_attn_norm", "use_post_ffw_norm"):
        _require(settings, key, True)
    model["norm_placement"] = "both"


def _gemma3(model: dict[str, Any], settings: MaxTextKeys) -> None:
    _gemma(model, settings)
    _norms_on_both_sides(model, settings)
    a = model["attention"]
    width = model["hidden"] // a["num_heads"] if model["name"].startswith(WIDTH_PER_HEAD) else a["head_dim"]
    a |= {
        "window": settings.take("sliding_window_size"), "window_pattern": FIVE_OF_SIX, "qk_norm": True,
        "score_divisor": width,
    }  # fmt: skip
    _windowed_rope(model, settings)
    if (factor := float(settings.take("rope_linear_scaling_factor"))) != 1:
        model["rope"] |= {"scaling": "linear", "factor": factor}


def _windowed_rope(model: dict[str, Any], settings: MaxTextKeys) -> None:
    if (theta := float(settings.take("local_rope_max_timescale"))) > 0:  # -1: as the others
        model["windowed_rope"] = {"theta": theta}


def _gemma4(model: dict[str, Any], settings: MaxTextKeys) -> None:
    _require(settings, "mlp_activations", ["gelu", "linear"])
    _norms_on_both_sides(model, settings)
    take = settings.take
    model |= GEMMA | {"logit_cap": float(take("final_logits_soft_cap"))}
    for key in ("v_norm_with_scale", "global_rope_proportion", "local_rope_proportion"):  # without weights and cost
        take(key)
    take("global_rope_max_timescale")
    _windowed_rope(model, settings)
    model["attention"] |= {
        "window": take("sliding_window_size"), "window_pattern": FIVE_OF_SIX, "qk_norm": True,
        "full_layers": {
            "head_dim": take("global_head_dim"), "num_kv_heads": take("global_num_kv_heads"),
            "shares_values": take("share_kv_projections"),
        },
    }  # fmt: skip
    if "experts" in model:
        _require(settings, "shared_experts", 1)
        model["experts"] |= {"num_shared": 1, "shared_ffn_hidden": model.pop("ffn_hidden"), "own_norms": True}


def _gpt3(model: dict[str, Any], settings: MaxTextKeys) -> None:
    _require(settings, "mlp_activations", ["gelu"])
    model |= {
        "gated_ffn": False, "norm_bias": True, "ffn_bias": True,
        "learned_positions": settings.take("trainable_position_size"),
    }  # fmt: skip
    model["attention"]["bias"] = True
    del model["rope"]


def _llama4(model: dict[str, Any], settings: MaxTextKeys) -> None:
    """Chunks are windows as long as a chunk, as in the catalogue; norms of queries and keys have no weights."""
    _require(settings, "nope_layer_interval", 4)
    _require(settings, "shared_experts", 1)
    step = settings.count("interleave_moe_layer_step")
    model["attention"] |= {
        "window": settings.take("chunk_attn_window_size"), "window_pattern": THREE_OF_FOUR, "qk_norm": False,
    }  # fmt: skip
    dense = model["num_layers"] - model["num_layers"] // step
    model["experts"] |= {"num_shared": 1, "num_dense_layers": dense, "router": "sigmoid"}


def _olmo3(model: dict[str, Any], settings: MaxTextKeys) -> None:
    _require(settings, "inhomogeneous_layer_cycle_interval", 4)
    model["norm_placement"] = "after"
    model["attention"] |= {
        "window": settings.take("sliding_window_size"), "window_pattern": THREE_OF_FOUR, "qk_norm_across_heads": True,
    }  # fmt: skip


def _qwen2(model: dict[str, Any], settings: MaxTextKeys) -> None:
    model["attention"]["output_bias"] = False


def _gated_delta_net(model: dict[str, Any], settings: MaxTextKeys) -> None:
    _require(settings, "inhomogeneous_layer_cycle_interval", 4)
    _require(settings, "shared_experts", 1)
    take = settings.take
    take("use_mrope")  # of images; text has the same position on every axis
    width = model["experts"]["ffn_hidden"]
    model["experts"] |= {"num_shared": 1, "shared_ffn_hidden": width, "shared_gate": True}
    model["zero_centered_norms"] = True
    model["attention"] |= {"qk_norm": True, "output_gate": True}
    model["rope"]["rotated_share"] = take("partial_rotary_factor")
    model["linear_attention"] = {
        "num_key_heads": take("gdn_num_key_heads"), "num_value_heads": take("gdn_num_value_heads"),
        "key_head_dim": take("gdn_key_head_dim"), "value_head_dim": take("gdn_value_head_dim"),
        "conv_kernel": take("gdn_conv_kernel_dim"), "chunk_size": take("gdn_chunk_size"), "pattern": THREE_OF_FOUR,
    }  # fmt: skip


PLANNED: dict[str, tuple[str | None, Callable[[dict[str, Any], MaxTextKeys], None]]] = {
    "gemma": ("GemmaForCausalLM", _gemma),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "gemma4": ("Gemma4ForCausalLM", _gemma4),
    "gpt3": (None, _gpt3),
    "llama4": ("Llama4ForCausalLM", _llama4),
    "olmo3": ("Olmo3ForCausalLM", _olmo3),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3_next": ("Qwen3NextForCausalLM", _gated_delta_net),
    "qwen3_5": ("Qwen3_5MoeForCausalLM", _gated_delta_net),
}
"""Blocks with Hugging Face's names and what they add to a section."""
WITH_EXPERTS = ("llama4", "qwen3_next", "qwen3_5")


def complete(block: str, model: dict[str, Any], settings: MaxTextKeys) -> None:
    """Add what only `block` has. Raises InputError for a variant of it that no run file can express."""
    if ("experts" in model) != (block in WITH_EXPERTS) and block != "gemma4":
        got = f"{model.get('experts', {}).get('num_experts', 1)} experts"
        raise InputError(f"a model of the block {block} that is not supported", got=got)
    PLANNED[block][1](model, settings)
    if "experts" in model and not model["experts"].get("num_dense_layers"):
        model.pop("ffn_hidden", None)
