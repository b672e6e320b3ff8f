"""Checked access to the keys of a Hugging Face config, and the keys that Llama-like decoders share.

Source of the keys and their defaults: the configuration classes of Hugging Face transformers
(https://github.com/huggingface/transformers, src/transformers/models).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.errors import InputError
from meshwright.specs.model import Attention, Experts, Model, Rope, RopeScaling

MAX_COUNT = 10_000_000
"""Larger sizes are no model's and overflow what is computed from them."""


class ConfigKeys:
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

    def section(self, key: str) -> ConfigKeys:
        """A mapping; empty where the key is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise InputError(f"{self.name}: {key}", got=value, allowed="a mapping")
        return ConfigKeys(value or {}, name=f"{self.name}: {key}")

    def items(self, key: str) -> list[Any] | None:
        """A list, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise InputError(f"{self.name}: {key}", got=value, allowed="a list")
        return value


def grouped_attention(c: ConfigKeys, *, bias: bool = False, head_dim: int | None = None) -> Attention:
    """Grouped query attention. `head_dim` is the default of a config without that key."""
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


def rope_of(c: ConfigKeys, *, theta: float) -> Rope:
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


def decoder(
    c: ConfigKeys,
    attention: Attention,
    *,
    tied: bool = False,
    experts: Experts | None = None,
    theta: float = 10_000.0,
    epsilon: float = 1e-6,
) -> Model:
    """A Llama-like decoder. A dense width that no layer uses is read as 0."""
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
        rope=rope_of(c, theta=theta),
    )


def windowed_attention(attention: Attention, c: ConfigKeys, *, num_layers: int) -> Attention:
    """`attention` with a sliding window in `num_layers` layers, or in those that `layer_types` lists."""
    types = c.items("layer_types")
    num_layers = num_layers if types is None else types.count("sliding_attention")
    if c.values.get("sliding_window") is None or num_layers == 0:
        return attention
    return replace(attention, window=c.count("sliding_window"), num_windowed_layers=num_layers)
