"""Presets of torchtitan up to 0.2.2 as models, and keys of versions before 0.1.0.

Source: torchtitan 0.2.2, models/*/__init__.py (`*_args`, `*_configs`), models/*/model/args.py and models/moe/moe.py;
0.1.0, experiments/deepseek_v3. Widths of feed-forward blocks that no preset states follow from the formula of its
models: 2/3 of 4 times the width, times `ffn_dim_multiplier`, among the experts of a token, rounded up to `multiple_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from meshwright.catalog import lookup as catalog
from meshwright.errors import InputError
from meshwright.specs.model import Model

WITHOUT_WINDOWS = MappingProxyType({"attention": {"window": 0, "window_pattern": ()}})
TOY: Mapping[str, Any] = MappingProxyType({"hidden": 256, "vocab": 2048})
PRESETS: Mapping[tuple[str, str], tuple[str, Mapping[str, Any]]] = {
    ("llama3", "8B"): ("llama3.1-8b", {}),
    ("llama3", "70B"): ("llama3.1-70b", {}),
    ("llama3", "405B"): ("llama3.1-405b", {}),
    **{(name, size): (f"llama2-{size.lower()}", {}) for name in ("llama", "llama2") for size in ("7B", "13B", "70B")},
    ("deepseek_v2", "deepseek-ai/DeepSeek-V2-Lite"): ("deepseek-v2-lite", {}),
    ("deepseek_v3", "16B"): ("deepseek-v2-lite", {}),
    ("deepseek_v3", "671B"): ("deepseek-v3", {}),
    ("gpt_oss", "20b"): ("gpt-oss-20b", {}),
    ("gpt_oss", "120b"): ("gpt-oss-120b", {}),
    **{("qwen3", size): (f"qwen3-{size.lower()}", {}) for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    ("qwen3", "30B-A3B"): ("qwen3-30b-a3b", {}),
    ("qwen3", "235B-A22B"): ("qwen3-235b-a22b", {}),
    ("llama4", "17bx16e"): ("llama4-scout", WITHOUT_WINDOWS),
    ("llama4", "17bx128e"): ("llama4-maverick", WITHOUT_WINDOWS),
    ("llama4", "17bx16e_irope"): ("llama4-scout", {}),
    ("llama4", "17bx128e_irope"): ("llama4-maverick", {}),
    ("llama3", "debugmodel"): (
        "llama3.1-8b",
        TOY | {"num_layers": 6, "ffn_hidden": 768,
               "attention": {"num_heads": 16, "num_kv_heads": 16, "head_dim": 16}},
    ),
    ("llama4", "debugmodel"): (
        "llama4-scout",
        TOY | {"num_layers": 6, "ffn_hidden": 768,
               "attention": {"num_heads": 16, "num_kv_heads": 16, "head_dim": 16, "window": 0, "window_pattern": ()},
               "experts": {"num_experts": 8, "ffn_hidden": 512, "num_dense_layers": 3}},
    ),
    ("deepseek_v3", "debugmodel"): (
        "deepseek-v2-lite",
        TOY | {"num_layers": 6, "ffn_hidden": 1024,
               "experts": {"num_experts": 8, "top_k": 3, "ffn_hidden": 256, "num_dense_layers": 1}},
    ),
    ("qwen3", "debugmodel"): (
        "qwen3-0.6b",
        TOY | {"num_layers": 8, "ffn_hidden": 3072, "attention": {"num_heads": 16, "num_kv_heads": 8}},
    ),
    ("qwen3", "debugmodel_moe"): (
        "qwen3-30b-a3b",
        TOY | {"num_layers": 8, "attention": {"num_heads": 16, "num_kv_heads": 8},
               "experts": {"num_experts": 64, "ffn_hidden": 768}},
    ),
    ("gpt_oss", "debugmodel"): (
        "gpt-oss-20b", {"hidden": 256, "num_layers": 4, "experts": {"num_experts": 8}}
    ),
}  # fmt: skip
"""Models of the catalogue by torchtitan's presets, with what they change."""

EARLIER: Mapping[str, tuple[Any, ...] | None] = {
    "checkpoint.interval_type": ("steps",),
    "experimental.torch_spmd": (False,),
    "float8.enable_float8_linear": (False,),
    "metrics.enable_color_printing": None,
    "metrics.use_for_integration_test": None,
    "model.attn_mask_type": ("causal",),
    "model.norm_type": ("rmsnorm", "fused_rmsnorm"),
    "model.use_flex_attn": (False,),
    "profiling.profile_every_x_iter": None,
    "profiling.run_profiler": None,
    "training.checkpoint_folder": None,
    "training.checkpoint_interval": None,
    "training.checkpoint_interval_type": None,
    "training.enable_float8_linear": (False,),
    "training.enable_fp8_linear": (False,),
    "training.fp8_linear": ("", False),
}
"""Keys before 0.1.0 with the values that change no step; None: no value does."""

OF_EXPERTS = (
    "float8.moe_fqns", "float8.moe_fqns_prototype", "quantize.moe.float8.fqns", "quantize.moe.mx.fqns",
)  # fmt: skip
"""Earlier keys with the experts that a converter quantises; without a converter they have no effect."""

OF_FLOAT8 = ("float8.enable_float8_linear", "training.enable_float8_linear", "training.enable_fp8_linear")
"""Keys of `EARLIER` that later became a converter, `float8`."""


def preset_model(name: str, flavor: str) -> Model:
    """Return the model of a preset. Raises InputError for one that is not known."""
    if (name, flavor) not in PRESETS:
        known = ", ".join(" ".join(names) for names in PRESETS)
        raise InputError("no model of the catalogue is this preset", got=f"{name} {flavor}", allowed=known)
    base, changes = PRESETS[name, flavor]
    model = replace(catalog.model(base), num_mtp_layers=0)  # torchtitan's have no multi-token prediction modules
    if not changes:
        return model
    parts = {key: replace(getattr(model, key), **changes[key]) for key in ("attention", "experts") if key in changes}
    return replace(model, name=f"{name}-{flavor}".lower(), **{**changes, **parts})


def without_earlier(given: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return settings without those keys before 0.1.0 that change no step. Raises InputError for their other values."""
    kept, converters = [], []
    converts = any(key == "model.converters" and value for key, value in given)
    for key, value in given:
        if key in OF_FLOAT8 and value is True:
            converters = ["float8"]
        elif key not in EARLIER and (key not in OF_EXPERTS or converts):
            kept.append((key, value))
        elif (same := EARLIER.get(key)) is not None and value not in same:
            raise InputError(
                f"{key}, of torchtitan before 0.1.0, is not carried over", got=value,
                allowed=", ".join(map(repr, same)),
            )  # fmt: skip
    return kept + [("model.converters", converters)] * bool(converters)
