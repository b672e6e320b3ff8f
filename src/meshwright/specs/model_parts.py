"""Parts that only some models have: what an engine, or a family's config, must support by name or refuse."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from meshwright.specs.model import Activation, Model, NormPlacement

ABSENT: Mapping[str, Any] = MappingProxyType(
    {
        "activation": Activation.SILU,
        "norm_placement": NormPlacement.BEFORE,
        "zero_centered_norms": False,
        "scaled_embeddings": False,
        "logit_cap": 0.0,
        "windowed_rope": None,
        "rope.rotated_share": 1.0,
        "rope.attention_factor": 0.0,
        "rope.short_factors": (),
        "rope.long_factors": (),
        "attention.window_pattern": (),
        "attention.output_bias": None,
        "attention.qk_norm_across_heads": False,
        "attention.score_divisor": 0,
        "attention.score_cap": 0.0,
        "attention.sinks": False,
        "experts.bias": False,
    }
)
"""The parts, with the value of a model that lacks them."""

GPT_OSS: Mapping[str, Any] = MappingProxyType(
    {
        "activation": Activation.CLAMPED_SWIGLU,
        "attention.window_pattern": (True, False),
        "attention.sinks": True,
        "experts.bias": True,
    }
)
"""Parts that gpt-oss has."""


def parts_of(model: Model) -> dict[str, Any]:
    """The parts that `model` has, without those that say what holds anyway."""
    a = model.attention
    is_without_effect = {
        "attention.output_bias": a.has_output_bias == a.bias,
        "attention.score_divisor": a.score_divisor == a.head_dim,
        "attention.window_pattern": not model.num_windowed_layers,
        "attention.qk_norm_across_heads": not a.qk_norm,
        "windowed_rope": model.windowed_rope == model.rope or not model.num_windowed_layers,
    }
    paths = [path for path in ABSENT if model.experts is not None or not path.startswith("experts.")]
    values = {path: attrgetter(path)(model) for path in paths}
    return {
        path: value
        for path, value in values.items()
        if value != ABSENT[path] and not is_without_effect.get(path, False)
    }
