"""Checked access to the keys of a Hugging Face config, and the keys that Llama-like decoders share.

Source of the keys and their defaults: the configuration classes of Hugging Face transformers
(https://github.com/huggingface/transformers, src/transformers/models).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from meshwright.errors import InputError
from meshwright.specs.model import Attention, Experts, Model, Rope, RopeScaling

WITHOUT_EFFECT = frozenset(
    (
        "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "attn_implementation",
        "auto_map", "aux_loss_alpha", "bos_token_id", "dtype", "eos_token_id", "ep_size", "finetuning_task", "id2label",
        "initializer_range", "label2id", "max_position_embeddings", "model_type", "output_attentions",
        "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type",
        "quantization_config", "return_dict",
        "router_aux_loss_coef", "sep_token_id", "seq_aux", "task_specific_params", "tokenizer_class", "torch_dtype",
        "torchscript", "transformers_version", "unk_token_id", "use_cache",
    )
)  # fmt: skip
"""Keys that do not change the model: bookkeeping, tokens, initialization, losses that a run file sets itself, and the
format of weights in files (`training.weights` refuses quantized ones)."""

SAME_MEANING: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "chunk_size_feed_forward": (0,),
    "hidden_act": ("silu", "swish"),
    "is_decoder": (False, True),  # of encoder-decoder models alone
    "is_encoder_decoder": (False,),
    "layer_types": (),
    "mlp_bias": (False,),
    "num_nextn_predict_layers": (0,),
    "partial_rotary_factor": (1,),
    "router_jitter_noise": (0,),
    "use_sliding_window": (False,),
}
"""Values with which a key that no reader asks for means what Meshwright computes; null means it everywhere."""

MAX_COUNT = 10_000_000
"""Larger sizes are no model's and overflow what is computed from them."""


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

    def refuse(self, text: str) -> None:
        """Note that the config asks for something that Meshwright does not compute."""
        self._unsupported.append(text)

    def require(self, key: str, *allowed: Any) -> None:
        """Note `key` as unsupported unless it is absent, null or one of `allowed`."""
        value = self.value(key)
        if value is not None and not any(_is_same(value, other) for other in allowed):
            self.refuse(f"{key}: {value!r}")

    def unsupported(self, same: Mapping[str, tuple[Any, ...]] = SAME_MEANING) -> tuple[str, ...]:
        """Return what the config requests and no reader supports, each as `key: value`.

        A key counts unless it was read, has no effect, is null, or has one of its values in `same`.
        """
        found = list(self._unsupported)
        for key, value in self.values.items():
            unread = key not in self._read and key not in WITHOUT_EFFECT and value is not None
            if unread and not any(_is_same(value, other) for other in same.get(key, ())):
                found.append(f"{key}: {_short(value)}")
        for key, section in self._sections.items():
            found += (f"{key}.{text}" for text in section.unsupported({"partial_rotary_factor": (1,)}))
        return tuple(dict.fromkeys(found))

    def count(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; `default` where the key is absent or null."""
        value = self.value(key)
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
    "llama3": RopeScaling.LLAMA3,
    "yarn": RopeScaling.YARN,
}


def rope_of(c: ConfigKeys, *, theta: float) -> Rope:
    """From `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (before)."""
    given = c.section("rope_parameters")
    theta = given.number("rope_theta", c.number("rope_theta", theta, minimum=1), minimum=1)
    scaled = given if given.values else c.section("rope_scaling")
    if given.values and c.section("rope_scaling").values:
        c.refuse("rope_scaling: beside rope_parameters")
    kind = scaled.value("rope_type", scaled.value("type")) or "default"
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
        rope=rope_of(c, theta=theta),
    )


WindowOrder = Literal["last", "alternating", "interleaved"]


def windowed_attention(
    attention: Attention, c: ConfigKeys, *, num_layers: int, order: WindowOrder = "last"
) -> Attention:
    """`attention` with a sliding window in `num_layers` layers, or in those that `layer_types` lists."""
    types = c.items("layer_types")
    if types is not None:
        num_layers = types.count("sliding_attention")
        expected = layers_in_order(c.count("num_hidden_layers"), num_layers, order)
        if types != ["sliding_attention" if windowed else "full_attention" for windowed in expected]:
            c.refuse(f"layer_types: sliding layers that are not the {order} ones")
    if c.value("sliding_window") is None or num_layers == 0:
        return attention
    return replace(attention, window=c.count("sliding_window"), num_windowed_layers=num_layers)


def layers_in_order(num_layers: int, num_windowed: int, order: WindowOrder) -> list[bool]:
    """True for each layer with a sliding window, by the habit of a family."""
    match order:
        case "last":
            return [index >= num_layers - num_windowed for index in range(num_layers)]
        case "alternating":  # sliding first
            return [index % 2 == 0 for index in range(num_layers)]
        case "interleaved":  # all but every n-th
            full = num_layers - num_windowed
            period = num_layers // full if full else num_layers + 1
            return [(index + 1) % period != 0 for index in range(num_layers)]
