"""Checked access to the keys of a Hugging Face config, and the keys that Llama-like decoders share.

Source of the keys and their defaults: the configuration classes of Hugging Face transformers
(https://github.com/huggingface/transformers, src/transformers/models).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import toml_table
from meshwright.specs.model import Activation, Attention, Experts, Model, Rope, RopeScaling

_KEYS = toml_table(Path(__file__).parent / "data" / "config_keys.toml")

MAX_COUNT = 10_000_000
"""Larger sizes are no model's, and computing with them overflows."""


class ConfigKeys:
    """Checked access to the keys of one config: a missing or ill-typed key is an error that names the key."""

    def __init__(self, values: Mapping[str, Any], *, name: str) -> None:
        self.values = values
        self.name = name
        self._read: set[str] = set()
        self._sections: dict[str, ConfigKeys] = {}
        self._unsupported: list[str] = []

    def value(self, key: str, default: Any = None) -> Any:
        """The value as it stands, `default` where the key is absent."""
        self._read.add(key)
        return self.values.get(key, default)

    def named(self, *keys: str) -> str:
        """The one of `keys` under which the file has a value, else the first."""
        return next((key for key in keys if key in self.values), keys[0])

    def default(self, usual: Mapping[str, Any]) -> None:
        """Take absent keys from `usual`, the defaults of the architecture's configuration class."""
        self.values = {**usual, **self.values}

    def refuse(self, text: str) -> None:
        """Note that the config asks for something that Meshwright does not compute."""
        self._unsupported.append(text)

    def require(self, key: str, *allowed: Any) -> None:
        """Note `key` as unsupported unless it is absent, null or one of `allowed`."""
        value = self.value(key)
        if value is not None and not any(_is_same(value, other) for other in allowed):
            self.refuse(f"{key}: {value!r}")

    def pass_over(self, name: str) -> None:
        """Read the keys of a table of config_keys.toml; those that must mean the same are noted if they do not."""
        for key, same in _KEYS[name]["same_meaning"].items():
            self.require(key, *same)
        self._read.update(_KEYS[name]["without_effect"])

    def unsupported(self, same: Mapping[str, Sequence[Any]] = _KEYS["any"]["same_meaning"]) -> tuple[str, ...]:
        """Return the values that the config requests and no reader supports, each as `key: value`.

        A key counts unless it was read, has no effect, is null, or has one of its values in `same`.
        """
        found = list(self._unsupported)
        for key, value in self.values.items():
            unread = key not in self._read and key not in _KEYS["any"]["without_effect"] and value is not None
            if unread and not any(_is_same(value, other) for other in same.get(key, ())):
                found.append(f"{key}: {_short(value)}")
        for key, section in self._sections.items():
            found += (f"{key}.{text}" for text in section.unsupported({"partial_rotary_factor": (1,)}))
        return tuple(dict.fromkeys(found))

    def count(self, key: str, default: int | None = None, *, minimum: int = 1, null: int | None = None) -> int:
        """A whole number of at least `minimum`; `default` where the key is absent, `null` or `default` where null."""
        value = self.value(key)
        if value is None:
            value = default if null is None or key not in self.values else null
        if value is None:
            raise InputError(f"{self.name}: key {key!r} is missing", hint="is this the config.json of the whole model?")
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= MAX_COUNT:
            allowed = f"a whole number from {minimum} to {MAX_COUNT:,}"
            raise InputError(f"{self.name}: {key}", got=value, allowed=allowed)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false; `default` where the key is absent or null."""
        value = self.value(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise InputError(f"{self.name}: {key}", got=value, allowed="true or false")
        return value

    def number(self, key: str, default: float, *, minimum: float = 0.0) -> float:
        """A number of at least `minimum`; `default` where the key is absent or null."""
        value = self.value(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value < math.inf:
            raise InputError(f"{self.name}: {key}", got=value, allowed=f"a number, {minimum:g} or more")
        return float(value)

    def limit(self, key: str, default: float) -> float:
        """A positive number, 0 where the key is null; `default` where it is absent."""
        if self.value(key, default) is None:
            return 0.0
        found = self.number(key, default)
        if not found and self.value(key, default) is not default:
            self.refuse(f"{key}: {self.value(key)!r}")
        return found

    def section(self, key: str) -> ConfigKeys:
        """A mapping; empty where the key is absent or null."""
        if key in self._sections:
            return self._sections[key]
        value = self.value(key)
        if value is not None and not isinstance(value, Mapping):
            raise InputError(f"{self.name}: {key}", got=value, allowed="a mapping")
        self._sections[key] = ConfigKeys(value or {}, name=f"{self.name}: {key}")
        return self._sections[key]

    def items(self, key: str) -> list[Any] | None:
        """A list, or None where the key is absent or null."""
        value = self.value(key)
        if value is not None and not isinstance(value, list):
            raise InputError(f"{self.name}: {key}", got=value, allowed="a list")
        return value


def _is_same(value: Any, other: Any) -> bool:
    """Equal, and not a boolean beside a number."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def grouped_attention(
    c: ConfigKeys, *, bias: bool = False, head_dim: int | None = None, kv_heads: int | None = None
) -> Attention:
    """Grouped query attention. `head_dim` and `kv_heads` are the defaults of a config without these keys."""
    num_heads = c.count("num_attention_heads")
    absent = num_heads if kv_heads is None or "num_key_value_heads" in c.values else kv_heads
    return Attention(
        num_heads=num_heads,
        num_kv_heads=c.count("num_key_value_heads", absent),
        head_dim=c.count("head_dim", head_dim or c.count("hidden_size") // num_heads),
        bias=bias,
    )


_ROPE_TYPES = {
    "default": RopeScaling.NONE,
    "linear": RopeScaling.LINEAR,
    "llama3": RopeScaling.LLAMA3,
    "yarn": RopeScaling.YARN,
}


def rope_of(c: ConfigKeys, *, theta: float) -> Rope:
    """From `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (before)."""
    given = c.section("rope_parameters")
    theta = given.number("rope_theta", c.number("rope_theta", theta, minimum=1), minimum=1)
    return scaled_rope(c, _scaled_section(c), theta=theta)


def partial_rope(c: ConfigKeys, *, theta: float, share: float) -> Rope:
    """RoPE of the first dimensions of each head; a config without the key has `share`."""
    share = _scaled_section(c).number("partial_rotary_factor", c.number("partial_rotary_factor", share))
    if not 0 < share <= 1:
        c.refuse(f"partial_rotary_factor: {share!r}")
        share = 1.0
    return replace(rope_of(c, theta=theta), rotated_share=share)


def _scaled_section(c: ConfigKeys) -> ConfigKeys:
    """The section with the RoPE scaling. Two of them are refused."""
    given, older = c.section("rope_parameters"), c.section("rope_scaling")
    if given.values and older.values:
        c.refuse("rope_scaling: beside rope_parameters")
    return given if given.values else older


def rope_per_layer_type(c: ConfigKeys, *, theta: float, windowed_theta: float) -> tuple[Rope, Rope]:
    """RoPE of layers with full attention, and of those with a window (Gemma 3)."""
    given, older = c.section("rope_parameters"), c.section("rope_scaling")
    full, windowed = given.section("full_attention"), given.section("sliding_attention")
    if full.values and older.values:
        c.refuse("rope_scaling: beside rope_parameters")
    bases = [
        section.number("rope_theta", c.number(key, usual, minimum=1), minimum=1)
        for section, key, usual in ((full, "rope_theta", theta), (windowed, "rope_local_base_freq", windowed_theta))
    ]
    scaled = full if full.values else older
    return scaled_rope(c, scaled, theta=bases[0]), scaled_rope(c, windowed, theta=bases[1])


def longrope(c: ConfigKeys, *, theta: float, context: int) -> Rope:
    """RoPE of Phi-3 and Phi-4: a share of each head, and LongRoPE, which it once called `su` or `yarn`."""
    scaled = _scaled_section(c)
    given = c.section("rope_parameters")
    theta = given.number("rope_theta", c.number("rope_theta", theta, minimum=1), minimum=1)
    share = scaled.number("partial_rotary_factor", c.number("partial_rotary_factor", 1.0))
    if not 0 < share <= 1:
        c.refuse(f"partial_rotary_factor: {share!r}")
    original = c.count("original_max_position_embeddings", context)
    scaled.value("original_max_position_embeddings")  # the one of the whole config has priority
    kind = scaled.value("rope_type", scaled.value("type")) or "default"
    if kind not in ("default", "longrope", "su", "yarn"):
        return Rope(theta=theta, scaling=RopeScaling.OTHER)
    if kind == "default":
        return Rope(theta=theta, rotated_share=share)
    ratio = c.count("max_position_embeddings", context) / original
    divisors = {name: scaled.items(name) or [] for name in ("short_factor", "long_factor")}
    if not all(isinstance(x, int | float) and x > 0 for factors in divisors.values() for x in factors):
        c.refuse("rope_scaling: factors that are not numbers above 0")
        return Rope(theta=theta, scaling=RopeScaling.OTHER)
    return Rope(
        theta=theta,
        scaling=RopeScaling.LONGROPE,
        rotated_share=share,
        factor=scaled.number("factor", ratio),
        original_context=original,
        attention_factor=_attention_factor(scaled),
        short_factors=tuple(map(float, divisors["short_factor"])),
        long_factors=tuple(map(float, divisors["long_factor"])),
    )


def _attention_factor(scaled: ConfigKeys) -> float:
    return 0.0 if scaled.value("attention_factor") is None else scaled.limit("attention_factor", 0.0)


def scaled_rope(c: ConfigKeys, scaled: ConfigKeys, *, theta: float) -> Rope:
    """RoPE with the scaling of the section `scaled`."""
    kind = scaled.value("rope_type", scaled.value("type")) or "default"
    scaling = _ROPE_TYPES.get(kind, RopeScaling.OTHER) if isinstance(kind, str) else RopeScaling.OTHER
    if scaling in (RopeScaling.NONE, RopeScaling.OTHER):
        return Rope(theta=theta, scaling=scaling)
    usual = Rope()
    factor = scaled.number("factor", usual.factor, minimum=1)
    if scaling is RopeScaling.LINEAR:
        return Rope(theta=theta, scaling=scaling, factor=factor)
    return Rope(
        theta=theta,
        scaling=scaling,
        factor=factor,
        attention_factor=_attention_factor(scaled) if scaling is RopeScaling.YARN else 0.0,
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
    rope: Rope | None = None,
    activation: Activation | None = None,
) -> Model:
    """A Llama-like decoder. A dense width that no layer uses is read as 0.

    `rope` and `activation` are read from the usual keys unless given.
    """
    num_layers = c.count("num_hidden_layers")
    has_dense = experts is None or experts.num_dense_layers > 0
    c.value("intermediate_size")  # of dense layers alone
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
        rope=rope_of(c, theta=theta) if rope is None else rope,
        activation=activation_of(c, "hidden_act") if activation is None else activation,
    )


_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def activation_of(c: ConfigKeys, key: str, usual: str = "silu") -> Activation:
    """The function of the gate. Others than these are refused."""
    name = c.value(key, usual)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        c.refuse(f"{key}: {name!r}")
        return Activation.SILU
    return _ACTIVATIONS[name]


def windowed_attention(
    attention: Attention, c: ConfigKeys, *, usual: Sequence[bool], window: int | None = None
) -> Attention:
    """`attention` with a sliding window in the layers that `layer_types` lists, or in the `usual` ones.

    A config without the key has `window`.
    """
    types, layers = c.items("layer_types"), tuple(usual)
    if types is not None:
        if len(types) != len(layers) or not set(types) <= {"sliding_attention", "full_attention"}:
            c.refuse(f"layer_types: {_short(types)}")
        else:
            layers = tuple(kind == "sliding_attention" for kind in types)
    if c.value("sliding_window", window) is None or not any(layers):
        return attention
    return in_layers(replace(attention, window=c.count("sliding_window", window)), layers)


def in_layers(attention: Attention, layers: Sequence[bool]) -> Attention:
    """`attention` with its window in these layers: the last ones by their number, others by their shortest pattern."""
    num = sum(layers)
    if all(layers[len(layers) - num :]):
        return replace(attention, num_windowed_layers=num, window_pattern=())
    return replace(attention, num_windowed_layers=0, window_pattern=shortest_pattern(layers))


def shortest_pattern(layers: Sequence[bool]) -> tuple[bool, ...]:
    """The shortest pattern that, repeated, gives `layers`.

    >>> shortest_pattern([True, False, True, False, True])
    (True, False)
    """
    lengths = range(1, len(layers) + 1)
    period = next(n for n in lengths if all(layers[i] == layers[i % n] for i in range(len(layers))))
    return tuple(layers[:period])
