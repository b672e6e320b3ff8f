"""The keys of a MaxText configuration, and the model that they describe."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.engines import refusals
from meshwright.engines.base import not_estimated
from meshwright.engines.key_classes import key_classes
from meshwright.engines.maxtext import VERSION
from meshwright.engines.maxtext.config.models import GPT_OSS, LATENT, LLAMA_31, NOT_DECAYED, SINK_KEYS, SINKS
from meshwright.engines.maxtext.config.planned_blocks import PLANNED, complete
from meshwright.errors import InputError
from meshwright.runfile.inline import catalogue_name

KEYS = key_classes("maxtext")
BLOCKS = {
    "llama2": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    LATENT: "DeepseekV2ForCausalLM",
    SINKS: GPT_OSS,
    **{block: family for block, (family, _) in PLANNED.items()},
}
"""Blocks that run files can express, with Hugging Face's names."""

WITHOUT_NORMS = {"qwen3": "LlamaForCausalLM", "qwen3_moe": "MixtralForCausalLM"}
"""Hugging Face's names for the blocks of Qwen3 without normalised queries and keys."""

NAMES_ROUTED_AS_V3 = ("deepseek3", "kimi-k2")
"""Prefixes of model names for which MaxText uses the routing of DeepSeek-V3."""

ALTERNATIVE_DEFAULTS = {
    "logical_axis_rules": [["norm", "fsdp"]],  # of MaxText's own models
    "adamw_mask": ["scale"],  # of Meshwright's exports: no weight decay of vectors
}
OLDER = KEYS.older
"""Names of earlier versions."""

OF_BASE = object()
"""In place of a default: the one of MaxText's base.yml."""

TYPES = {bool: "a boolean", int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "a mapping"}


@cache
def known_keys() -> dict[str, Any]:
    """Return the keys of MaxText with the defaults of its base.yml, and those that only other versions have."""
    read = json.loads(Path(__file__).with_name("keys.json").read_text(encoding="utf-8"))
    return read["other_versions"] | read["keys"]


@cache
def own_models() -> dict[str, dict[str, Any]]:
    """Return the keys of MaxText's own models, by their `model_name`."""
    return json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))["models"]


class MaxTextKeys:
    """Keys of a configuration; unread ones become notes. Raises InputError for a key that MaxText does not have."""

    def __init__(self, values: dict[str, Any], *, ignore: Collection[str] = ()) -> None:
        self.values = {OLDER.get(key, key): value for key, value in values.items()}
        self._unestimated: list[str] = []
        ignored = refusals.unknown_keys(self.values, known_keys(), program=f"MaxText {VERSION}", ignore=ignore)
        self._notes = refusals.ignored_note(ignored)
        for key in ignored:
            del self.values[key]
        self._scale()

    def _scale(self) -> None:
        """Multiply the sizes by the powers of two that `global_parameter_scale` stands for (types.py)."""
        if (scale := self.take("global_parameter_scale")) == 1:
            return
        if scale < 1 or scale & (scale - 1):
            raise InputError("global_parameter_scale is not a power of two", got=scale, allowed="1, 2, 4, 8, ...")
        layers, rest = divmod(scale.bit_length() - 1, 3)
        for key in ("base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "base_moe_mlp_dim"):
            self.values[key] = self.peek(key) << layers + (rest > 0) if self.peek(key) > 0 else self.peek(key)
        self.values["base_emb_dim"] = self.peek("base_emb_dim") << layers + (rest > 1)
        self.values["base_num_decoder_layers"] = self.peek("base_num_decoder_layers") << layers

    def take(self, key: str, default: Any = OF_BASE) -> Any:
        """Return the value of `key` and mark it as read. Raises InputError for another type than the default's."""
        found = self.peek(key, default)
        self.values.pop(key, None)
        return found

    def peek(self, key: str, default: Any = OF_BASE) -> Any:
        """Return the value of `key` without marking it as read."""
        return _checked(self.values.get(key), known_keys()[key] if default is OF_BASE else default, key=key)

    def count(self, key: str, *, allows_auto: bool = False) -> int:
        """Return a positive number, or -1 if `allows_auto`, which MaxText replaces by a computed value."""
        number = self.take(key)
        if number < 1 and not (allows_auto and number == -1):
            raise InputError(f"{key} is not a count", got=number, allowed=f"> 0{', or -1' * allows_auto}")
        return number

    def note(self, text: str) -> None:
        """Add a note on a key that is not carried over."""
        self._notes.append(text)

    def leave_out(self, key: str, value: Any) -> None:
        """Name a setting in the note on all that the estimate does not include."""
        self._unestimated.append(f"{key} = {value!r}")

    def notes(self) -> list[str]:
        """Return all notes, and notes on the unread keys that are not at their defaults."""
        notes = list(self._notes)
        for key, value in self.values.items():
            is_default = value in (None, known_keys()[key], ALTERNATIVE_DEFAULTS.get(key))
            if is_default or KEYS.is_harmless(key) or key in SHARED_KEYS or key.endswith("_for_vit"):
                continue
            if key in KEYS.unestimated:
                self.leave_out(key, value)
            else:
                notes.append(f"{key} = {value!r} is not carried over")
        return [*notes, *not_estimated(self._unestimated)]


def _checked(value: Any, default: Any, *, key: str) -> Any:
    """Return `value` in the type of `default`, or `default` for None. A default of None allows any type."""
    kind = type(default)
    if value is None or default is None or (type(value) is kind and kind is not float):
        return default if value is None else value
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number) and (kind is float or number == int(number)):
            return kind(number)
    raise InputError(f"{key} is not {TYPES[kind]}", got=value)


UNSUPPORTED = """
    attention_type mlp_activations sliding_window_size shared_experts first_num_dense_layers
    routed_bias routed_score_func mtp_num_layers mlp_bias use_indexer use_multimodal use_dpo attn_logits_soft_cap
    final_logits_soft_cap enable_diloco engram_layers mhc_expansion_rate moba num_kv_shared_layers partial_rotary_factor
    share_kv_projections training_objective use_mrope
"""
"""Keys of features that no run file has: base.yml is without them. `use_dpo` is another loss."""
ALLOWED_TOO = {"attention_type": "full"}
EARLIER_YARN = "original_seq_len"
"""Key of versions whose YARN scales nothing where the sequences of the run are no longer than it."""

SHARED_KEYS = frozenset(("base_num_decoder_layers", "num_experts"))  # read with `peek` by several sections


def model_section(settings: MaxTextKeys, *, name: str) -> dict[str, Any] | str:
    """Return the catalogue's name of a model with the same shapes, else the shapes.

    Raises InputError for a block that run files cannot express.
    """
    take = settings.take
    block, qk_norm = take("decoder_block"), take("use_qk_norm")
    if block not in BLOCKS:
        raise InputError("a decoder block that is not supported", got=block, allowed=", ".join(BLOCKS))
    num_experts = settings.peek("num_experts")
    is_latent = block == LATENT
    has_pairs = settings.peek("rope_type") == "yarn" and settings.peek("rope_interleave") and not is_latent
    model: dict[str, Any] = {
        "name": name,
        "family": BLOCKS[block] if qk_norm else WITHOUT_NORMS.get(block, BLOCKS[block]),
        "hidden": take("base_emb_dim"),
        "num_layers": settings.peek("base_num_decoder_layers"),
        "vocab": take("vocab_size"),
        "attention": {
            "num_heads": take("base_num_query_heads"),
            "num_kv_heads": take("base_num_kv_heads"),
            "head_dim": take("head_dim"),
            "qk_norm": qk_norm,
            "bias": take("attention_bias"),
        },
        "tied_embeddings": take("logits_via_embedding"),
        "norm_epsilon": float(take("normalization_layer_epsilon")),
        "rope": _rope(settings, name=name, is_latent=is_latent),
    }
    if take("normalize_embedding_logits") and model["tied_embeddings"]:
        settings.note("normalize_embedding_logits = True of tied embeddings is not carried over")
    width, expert_width = take("base_mlp_dim"), take("base_moe_mlp_dim")
    if num_experts > 1:
        is_normalised = take("norm_topk_prob")
        model["experts"] = {
            "num_experts": num_experts,
            "top_k": take("num_experts_per_tok"),
            "ffn_hidden": width if expert_width == -1 else expert_width,
        }
        if not is_normalised and block == "qwen3_moe":
            settings.note("norm_topk_prob = False is not carried over: MaxText's scores are normalised anyway")
    if is_latent:
        _add_latents(model, settings, name=name)
    if block == SINKS:
        _add_sinks(model, settings)
    if num_experts == 1 or model["experts"].get("num_dense_layers"):
        model["ffn_hidden"] = width
    if block not in (LATENT, *PLANNED):
        settings.values.pop("shared_experts", None)  # other blocks have none, whatever the key says
    if block in PLANNED:
        model["ffn_hidden"] = width
        complete(block, model, settings)
    if model["family"] is None:
        del model["family"]
    if has_pairs:
        model["unsupported"] = ["rotations of neighbouring dimensions"]
    _refuse_others(settings)
    return catalogue_name(model) or model


def _add_latents(model: dict[str, Any], settings: MaxTextKeys, *, name: str) -> None:
    """Add what only the block of DeepSeek has. Raises InputError for a routing that no run file can express."""
    take = settings.take
    as_v3 = name.startswith(NAMES_ROUTED_AS_V3)
    routing = (take("routed_score_func"), take("routed_bias"))
    expected = ("sigmoid", True) if as_v3 else ("softmax", False)
    if "experts" not in model or routing != expected or take("attention_type") != "mla":
        raise InputError(
            "latent attention is supported only with experts, "
            f"routed_score_func: {expected[0]}, routed_bias: {expected[1]}",
            got=f"{model.get('experts', {}).get('num_experts', 1)} experts, {routing[0] or 'none'}, {routing[1]}",
            hint=f"models whose names begin with {' or '.join(NAMES_ROUTED_AS_V3)} have the routing of DeepSeek-V3",
        )
    if not take("float32_gate_logits"):  # our exports have scores of latent models in fp32
        settings.leave_out("float32_gate_logits", False)
    rotary = take("qk_rope_head_dim")
    model["attention"] |= {
        "kind": "mla",
        "head_dim": take("qk_nope_head_dim") + rotary,
        "value_head_dim": take("v_head_dim"),
        "query_lora_rank": take("q_lora_rank"),
        "kv_lora_rank": take("kv_lora_rank"),
        "rope_head_dim": rotary,
    }
    model["experts"] |= {
        "num_shared": take("shared_experts"),
        "num_dense_layers": take("first_num_dense_layers"),
        "router": routing[0],
        "normalize_top_k": as_v3,
        "routed_scale": float(take("routed_scaling_factor")),
    }
    if take("use_indexer"):
        sizes = {"num_heads": "indexer_n_heads", "head_dim": "indexer_head_dim", "top_k": "indexer_topk"}
        model["attention"]["indexer"] = {ours: take(theirs) for ours, theirs in sizes.items()}
    if as_v3:
        has_indexer = "indexer" in model["attention"]
        model["family"] = "DeepseekV32ForCausalLM" if has_indexer else "DeepseekV3ForCausalLM"
        groups, chosen = take("n_routing_groups"), take("topk_routing_group")
        model["experts"] |= {"num_groups": groups, "groups_per_token": chosen} if groups != -1 else {}


def _add_sinks(model: dict[str, Any], settings: MaxTextKeys) -> None:
    """Add what only the block of GPT-OSS has. Raises InputError if it differs from the published block."""
    if "experts" not in model:
        raise InputError(f"the block {SINKS} is supported only with experts", got="num_experts = 1")
    for key, known in SINK_KEYS.items():
        if (value := settings.take(key, None)) != known:
            raise InputError(f"a model of the block {SINKS} that is not supported: {key}", got=value, allowed=known)
    if settings.peek("adamw_mask", None) == NOT_DECAYED:
        settings.take("adamw_mask")
    window = settings.take("sliding_window_size")
    model["attention"] |= {"window": window, "window_pattern": [True, False], "sinks": True}
    model["activation"] = "clamped_swiglu"
    model["experts"]["bias"] = True
    del model["attention"]["qk_norm"]


def _rope(settings: MaxTextKeys, *, name: str, is_latent: bool) -> dict[str, Any]:
    kind, theta = settings.take("rope_type"), float(settings.take("rope_max_timescale"))
    is_llama_31 = kind.startswith("llama3.1") or name.startswith("llama3.1")  # MaxText checks both
    scaled = settings.take("rope_use_scale")
    if kind == "yarn":
        theta = float(settings.take("rope_theta")) if EARLIER_YARN in settings.values else theta
        return {"theta": theta, **_yarn(settings, is_latent=is_latent)}
    if is_llama_31 and scaled and not is_latent:
        return {"theta": theta, "scaling": "llama3", **LLAMA_31}
    if kind not in ("default", "llama3.1") or is_latent:
        raise InputError("RoPE scaling that is not supported", got=f"rope_type = {kind!r}")
    return {"theta": theta}


def _yarn(settings: MaxTextKeys, *, is_latent: bool) -> dict[str, Any]:
    """Return YARN's scaling; none for factor 1. Raises InputError for temperatures that run files cannot express."""
    take, is_earlier = settings.take, EARLIER_YARN in settings.values
    factor, context = take("rope_factor"), take(EARLIER_YARN if is_earlier else "original_max_position_embeddings")
    is_beyond = (settings.peek("max_target_length") if is_earlier else take("max_position_embeddings")) > context
    slopes = {"beta_fast": float(take("beta_fast")), "beta_slow": float(take("beta_slow"))}
    truncate, pairs = take("rope_truncate"), take("rope_interleave")
    mscale, is_rotation_scaled = float(take("mscale")), take("rope_attention_scaling")
    if is_latent and not pairs:
        raise InputError("rotary pairs that are not supported", got="rope_interleave = False", allowed=True)
    if factor <= 1 or (is_earlier and not is_beyond):
        return {}
    of_scores = (mscale if is_beyond else 0.0) if is_latent else float(not (is_rotation_scaled or is_earlier))
    if not is_rotation_scaled and not of_scores:
        raise InputError("YARN without a temperature", got=f"mscale = {mscale:g}, rope_attention_scaling = False")
    return {
        "scaling": "yarn",
        "factor": float(factor),
        "original_context": context,
        "truncate": truncate,
        "mscale": 0.0 if is_rotation_scaled else of_scores,
        "mscale_all_dims": of_scores,
        **slopes,
    }


def _refuse_others(settings: MaxTextKeys) -> None:
    """Raise InputError for features that no run file has."""
    for key in UNSUPPORTED.split():
        default = known_keys()[key]
        if (value := settings.take(key)) not in (default, ALLOWED_TOO.get(key)):
            raise InputError(f"a model or a task that is not supported: {key}", got=value, allowed=default)
