"""Presets of torchtitan up to 0.2.2 as models, and keys of versions before 0.1.0, as `presets.toml` has them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.catalog import lookup as catalog
from meshwright.errors import InputError
from meshwright.specs.model import Model

_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PRESETS: Mapping[str, str | Mapping[str, Any]] = _FILE["models"] | _FILE["changed"]
"""Models of the catalogue by torchtitan's presets, or such a `base` with what a preset changes."""
EARLIER: Mapping[str, list[Any] | None] = dict.fromkeys(_FILE["without_effect"]["keys"]) | _FILE["same"]
"""Keys before 0.1.0 with the values that change no step; None: no value does."""
OF_FORKS: dict[str, Any] = _FILE["forks"]
"""Keys that forks have added, with their defaults."""
OLDER: dict[str, str] = _FILE["older"]
"""Keys by their names before 0.1.0."""

OF_EXPERTS = (
    "float8.moe_fqns", "float8.moe_fqns_prototype", "quantize.moe.float8.fqns", "quantize.moe.mx.fqns",
)  # fmt: skip
"""Earlier keys with the experts that a converter quantises; without a converter they have no effect."""

OF_FLOAT8 = ("float8.enable_float8_linear", "training.enable_float8_linear", "training.enable_fp8_linear")
"""Keys of `EARLIER` that later became a converter, `float8`."""


def preset_model(name: str, flavor: str) -> Model:
    """Return the model of a preset. Raises InputError for one that is not known."""
    found = PRESETS.get(f"{name} {flavor}")
    if found is None:
        raise InputError("no model of the catalogue is this preset", got=f"{name} {flavor}", allowed=", ".join(PRESETS))
    changes: dict[str, Any] = {"base": found} if isinstance(found, str) else dict(found)
    # Torchtitan's models have no multi-token prediction modules.
    model = replace(catalog.model(changes.pop("base")), num_mtp_layers=0)
    if not changes:
        return model
    for key in ("attention", "experts"):
        if key in changes:
            own = {field: tuple(value) if isinstance(value, list) else value for field, value in changes[key].items()}
            changes[key] = replace(getattr(model, key), **own)
    return replace(model, name=f"{name}-{flavor}".lower(), **changes)


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
