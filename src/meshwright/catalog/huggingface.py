"""Models from a Hugging Face `config.json`.

One small function per family of architectures turns the file's keys into shapes; a table names which
architecture is read by which. Source of the keys and their defaults: the configuration classes of Hugging
Face transformers (https://github.com/huggingface/transformers, src/transformers/models).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.specs.model import Attention, AttentionKind, Experts, Model, Rope, RopeScaling, Router

MAX_COUNT = 10_000_000
"""Larger sizes are no model's and overflow what is computed from them."""


class _Config:
    """Checked access to the keys of one config: a missing or ill-typed key is an error that names the key."""

    def __init__(self, values: Mapping[str, Any], *, name: str) -> None:
        self.values = values
        self.name = name

    def count(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; `default` where the key is absent or null."""
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise InputError(
                f"{self.name}: key {key!r} is missing", hint="is this the config.json of the whole model?"
            )
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= MAX_COUNT:
            allowed = f"a whole number from {minimum} to {MAX_COUNT:,}"
            raise InputError(f"{self.name}: {key}", got=value, allowed=allowed)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false; `default` where the key is absent or null."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise InputError(f"{self.name}: {key}", got=value, allowed="true or false")
        return value

    def number(self, key: str, default: float, *, minimum: float = 0.0) -> float:
        """A number of at least `minimum`; `default` where the key is absent or null."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value < math.inf:
            raise InputError(f"{self.name}: {key}", got=value, allowed=f"a number, {minimum:g} or more")
        return float(value)

    def section(self, key: str) -> _Config:
        """A mapping; empty where the key is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise InputError(f"{self.name}: {key}", got=value, allowed="a mapping")
        return _Config(value or {}, name=f"{self.name}: {key}")

    def items(self, key: str) -> list[Any] | None:
        """A list, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise InputError(f"{self.name}: {key}", got=value, allowed="a list")
        return value


def model_from_path(path: str | Path) -> Model:
    """The model of a `config.json`, or of the folder that holds one; it is named after the folder.

    Raises InputError when there is no such file, it is not JSON, or `model_from_config` refuses it.
    """
    import json

    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot read the model's config: {error.strerror or error}", got=str(file)
        ) from error
    except (ValueError, RecursionError) as error:  # undecodable text, malformed or endlessly nested JSON
        raise InputError(f"the model's config is not JSON: {error}", got=str(file)) from error
    return model_from_config(config, name=file.resolve().parent.name)


def model_from_config(config: Mapping[str, Any], *, name: str) -> Model:
    """The model that a Hugging Face config describes.

    Raises InputError for an architecture without a reader (it lists those with one) and for a missing or
    impossible key (it names the key).
    """
    if not isinstance(config, Mapping):
        raise InputError(f"{name}: a config is a JSON object", got=type(config).__name__)
    architectures = config.get("architectures") or []
    family = architectures[0] if isinstance(architectures, list) and architectures else None
    reader = _READERS.get(family) if isinstance(family, str) else None
    if reader is None:
        raise InputError(f"{name}: unknown architecture", got=family, allowed=", ".join(sorted(_READERS)))
    model = reader(_Config(config, name=name))
    _check(model)
    return replace(model, name=name, family=family)


def architectures() -> tuple[str, ...]:
    """Architectures that have a reader."""
    return tuple(sorted(_READERS))


def _check(model: Model) -> None:
    a, x = model.attention, model.experts
    if a.head_dim < 1:
        raise InputError("more heads than the hidden size", got=a.num_heads, allowed=f"1 to {model.hidden}")
    if a.num_heads % a.num_kv_heads:
        raise InputError(
            "query heads are not a multiple of key/value heads", got=f"{a.num_heads} and {a.num_kv_heads}"
        )
    if x is not None and x.top_k > x.num_experts:
        raise InputError("experts per token exceed the experts", got=x.top_k, allowed=f"1 to {x.num_experts}")
    if x is not None and x.num_dense_layers > model.num_layers:
        raise InputError(
            "more dense layers than layers", got=x.num_dense_layers, allowed=f"0 to {model.num_layers}"
        )


def _grouped_attention(c: _Config, *, bias: bool = False, head_dim: int | None = None) -> Attention:
    num_heads = c.count("num_attention_heads")
    return Attention(
        num_heads=num_heads,
        num_kv_heads=c.count("num_key_value_heads", num_heads),
        head_dim=c.count("head_dim", head_dim or c.count("hidden_size") // num_heads),
        bias=bias,
    )


_ROPE_TYPES = {
    "default": RopeScaling.NONE,
    "llama3": RopeScaling.LLAMA3,
    "yarn": RopeScaling.YARN,
}


def _rope(c: _Config, *, theta: float) -> Rope:
    """From `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (before)."""
    given = c.section("rope_parameters")
    theta = given.number("rope_theta", c.number("rope_theta", theta, minimum=1), minimum=1)
    scaled = given if given.values else c.section("rope_scaling")
    kind = scaled.values.get("rope_type", scaled.values.get("type")) or "default"
    scaling = _ROPE_TYPES.get(kind, RopeScaling.OTHER) if isinstance(kind, str) else RopeScaling.OTHER
    if scaling in (RopeScaling.NONE, RopeScaling.OTHER):
        return Rope(theta=theta, scaling=scaling)
    usual = Rope()
    return Rope(
        theta=theta,
        scaling=scaling,
        factor=scaled.number("factor", usual.factor, minimum=1),
        original_context=scaled.count(
            "original_max_position_embeddings", c.count("max_position_embeddings", 0, minimum=0)
        ),
        low_frequency=scaled.number("low_freq_factor", usual.low_frequency),
        high_frequency=scaled.number("high_freq_factor", usual.high_frequency),
        beta_fast=scaled.number("beta_fast", usual.beta_fast),
        beta_slow=scaled.number("beta_slow", usual.beta_slow),
        mscale=scaled.number("mscale", usual.mscale),
        mscale_all_dims=scaled.number("mscale_all_dim", usual.mscale_all_dims),
        truncate=scaled.flag("truncate", usual.truncate),
    )


def _decoder(
    c: _Config,
    attention: Attention,
    *,
    tied: bool = False,
    experts: Experts | None = None,
    theta: float = 10_000.0,
    epsilon: float = 1e-6,
) -> Model:
    """The keys that all Llama-like decoders share. A dense width that no layer uses is read as 0."""
    num_layers = c.count("num_hidden_layers")
    has_dense = experts is None or experts.num_dense_layers > 0
    return Model(
        name=c.name,
        hidden=c.count("hidden_size"),
        num_layers=num_layers,
        vocab=c.count("vocab_size"),
        attention=attention,
        ffn_hidden=c.count("intermediate_size") if has_dense else 0,
        experts=experts,
        tied_embeddings=c.flag("tie_word_embeddings", tied),
        norm_epsilon=c.number("rms_norm_eps", epsilon),
        rope=_rope(c, theta=theta),
    )


def _windowed(attention: Attention, c: _Config, *, num_layers: int) -> Attention:
    """`attention` with a sliding window in `num_layers` layers, or in those that `layer_types` lists."""
    types = c.items("layer_types")
    num_layers = num_layers if types is None else types.count("sliding_attention")
    if c.values.get("sliding_window") is None or num_layers == 0:
        return attention
    return replace(attention, window=c.count("sliding_window"), num_windowed_layers=num_layers)


def _llama(c: _Config) -> Model:
    return _decoder(c, _grouped_attention(c, bias=c.flag("attention_bias", False)))


def _mistral(c: _Config) -> Model:
    return _decoder(c, _mistral_attention(c))


def _mistral_attention(c: _Config) -> Attention:
    return _windowed(_grouped_attention(c), c, num_layers=c.count("num_hidden_layers"))


def _mixtral(c: _Config) -> Model:
    experts = Experts(
        num_experts=c.count("num_local_experts"),
        top_k=c.count("num_experts_per_tok"),
        ffn_hidden=c.count("intermediate_size"),
    )
    return _decoder(c, _mistral_attention(c), experts=experts, theta=1e6, epsilon=1e-5)


def _qwen2_attention(c: _Config) -> Attention:
    return _qwen_windows(_grouped_attention(c, bias=True), c)


def _qwen_windows(attention: Attention, c: _Config) -> Attention:
    if not c.flag("use_sliding_window", False):
        return attention
    num_layers = c.count("num_hidden_layers")
    full = c.count("max_window_layers", num_layers, minimum=0)  # the first layers keep full attention
    return _windowed(attention, c, num_layers=max(0, num_layers - full))


def _qwen2(c: _Config) -> Model:
    return _decoder(c, _qwen2_attention(c))


def _qwen_experts(c: _Config) -> Experts:
    """Every `decoder_sparse_step`-th layer is a mixture of experts, but not those in `mlp_only_layers`."""
    num_layers, step = c.count("num_hidden_layers"), c.count("decoder_sparse_step", 1)
    dense_only = c.items("mlp_only_layers") or []
    num_moe = sum(i not in dense_only and (i + 1) % step == 0 for i in range(num_layers))
    shared = c.count("shared_expert_intermediate_size", 0, minimum=0)
    renamed = "num_local_experts" if "num_local_experts" in c.values else "num_experts"  # transformers 5
    return Experts(
        num_experts=c.count(renamed),
        top_k=c.count("num_experts_per_tok"),
        ffn_hidden=c.count("moe_intermediate_size"),
        num_shared=int(shared > 0),
        shared_ffn_hidden=shared or None,
        num_dense_layers=num_layers - num_moe,
        normalize_top_k=c.flag("norm_topk_prob", False),
    )


def _qwen2_moe(c: _Config) -> Model:
    return _decoder(c, _qwen2_attention(c), experts=_qwen_experts(c))


def _qwen3(c: _Config) -> Model:
    return _decoder(c, _qwen3_attention(c))


def _qwen3_moe(c: _Config) -> Model:
    return _decoder(c, _qwen3_attention(c), experts=_qwen_experts(c))


def _qwen3_attention(c: _Config) -> Attention:
    attention = _grouped_attention(c, bias=c.flag("attention_bias", False), head_dim=128)
    return _qwen_windows(replace(attention, qk_norm=True), c)


def _deepseek(c: _Config) -> Model:
    rope = c.count("qk_rope_head_dim")
    attention = Attention(
        kind=AttentionKind.MLA,
        num_heads=c.count("num_attention_heads"),
        num_kv_heads=c.count("num_attention_heads"),
        head_dim=c.count("qk_nope_head_dim") + rope,
        value_head_dim=c.count("v_head_dim"),
        query_lora_rank=c.count("q_lora_rank", 0, minimum=0),
        kv_lora_rank=c.count("kv_lora_rank"),
        rope_head_dim=rope,
    )
    return _decoder(c, attention, experts=_deepseek_experts(c))


def _deepseek_experts(c: _Config) -> Experts:
    """The first `first_k_dense_replace` layers are dense. One routing group is no limit."""
    num_groups = c.count("n_group", 1)
    limited = num_groups > 1
    sigmoid = c.values.get("scoring_func", "softmax") == "sigmoid"
    return Experts(
        num_experts=c.count("n_routed_experts"),
        top_k=c.count("num_experts_per_tok"),
        ffn_hidden=c.count("moe_intermediate_size"),
        num_shared=c.count("n_shared_experts", 0, minimum=0),
        num_dense_layers=c.count("first_k_dense_replace", 0, minimum=0),
        router=Router.SIGMOID if sigmoid else Router.SOFTMAX,
        num_groups=num_groups if limited else 0,
        groups_per_token=c.count("topk_group") if limited else 0,
        normalize_top_k=c.flag("norm_topk_prob", sigmoid),
        routed_scale=c.number("routed_scaling_factor", 1.0),
    )


def _deepseek_v3(c: _Config) -> Model:
    return replace(_deepseek(c), num_mtp_layers=c.count("num_nextn_predict_layers", 0, minimum=0))


def _gpt_oss(c: _Config) -> Model:
    """Sliding and full attention alternate, sliding first, unless `layer_types` says otherwise."""
    attention = _grouped_attention(c, bias=c.flag("attention_bias", True), head_dim=64)
    experts = Experts(
        num_experts=c.count("num_local_experts"),
        top_k=c.count("num_experts_per_tok"),
        ffn_hidden=c.count("intermediate_size"),
    )
    windowed = _windowed(attention, c, num_layers=(c.count("num_hidden_layers") + 1) // 2)
    return _decoder(c, windowed, experts=experts, theta=150_000.0, epsilon=1e-5)


def _gemma2(c: _Config) -> Model:
    """Sliding and full attention alternate, sliding first."""
    attention = _grouped_attention(c, head_dim=256)
    return _decoder(c, _windowed(attention, c, num_layers=(c.count("num_hidden_layers") + 1) // 2), tied=True)


def _gemma3(c: _Config) -> Model:
    """Every `sliding_window_pattern`-th layer has full attention (the sixth, by default)."""
    num_layers, pattern = c.count("num_hidden_layers"), c.count("sliding_window_pattern", 6)
    attention = _grouped_attention(c, head_dim=256)
    return _decoder(c, _windowed(attention, c, num_layers=num_layers - num_layers // pattern), tied=True)


def _gpt2(c: _Config) -> Model:
    hidden, num_heads = c.count("n_embd"), c.count("n_head")
    return Model(
        name=c.name,
        hidden=hidden,
        num_layers=c.count("n_layer"),
        vocab=c.count("vocab_size"),
        attention=Attention(
            num_heads=num_heads, num_kv_heads=num_heads, head_dim=hidden // num_heads, bias=True
        ),
        ffn_hidden=c.count("n_inner", 4 * hidden),
        gated_ffn=False,
        tied_embeddings=c.flag("tie_word_embeddings", True),
        learned_positions=c.count("n_positions"),
        norm_bias=True,
        norm_epsilon=c.number("layer_norm_epsilon", 1e-5),
    )


_READERS: dict[str, Callable[[_Config], Model]] = {
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "GPT2LMHeadModel": _gpt2,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "GptOssForCausalLM": _gpt_oss,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
