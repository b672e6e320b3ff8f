"""Model families: one record for each architecture of Hugging Face transformers, from data/families.toml.

A record says how the architecture's `config.json` is read and written, which models the config can express, what
its tensors are called in files, and why Meshwright does not train it where it does not. The catalogue, the training
code and the weights ask it; docs/guides/adding-a-model-family.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.catalog import family_configs, family_shapes, linear_configs, planned_configs, sparse_configs
from meshwright.catalog.config_keys import ConfigKeys
from meshwright.catalog.family_tensors import FusedTensor
from meshwright.files import record_of, toml_table
from meshwright.specs.model import Experts, Model


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """An architecture of Hugging Face transformers.

    `trains` families also need `tensors` and `fits`. Dense layers of a mixture come first.
    """

    architecture: str
    model_type: str  # in config.json
    read: Callable[[ConfigKeys], Model]
    not_trained: str = ""  # the reason why Meshwright does not train it; empty: it does
    shapes_only: bool = False  # its reader leaves out what changes numbers and not cost: no engine may build it
    tensors: Mapping[str, str] = field(default_factory=dict)  # our names within a layer -> names in files
    fused: Mapping[str, FusedTensor] = field(default_factory=dict)  # names in files -> ours in them
    fits: Callable[[Model], bool] = lambda model: False  # True if its config can express the model
    keys: Callable[[Model], dict[str, Any]] = lambda model: {}  # of its config.json alone
    expert_keys: Callable[[Experts], dict[str, Any]] = lambda experts: {}
    has_predictions: bool = False  # multi-token prediction modules
    knows_dense_layers: bool = True  # of a mixture: which layers are dense

    @property
    def trains(self) -> bool:
        return not self.not_trained


_TABLES = toml_table(Path(__file__).parent / "data" / "families.toml")
_READERS = {
    name: reader
    for module in (family_configs, linear_configs, planned_configs, sparse_configs)
    for name, reader in vars(module).items()
    if name.startswith("read_")
}


def _reader(model_type: str) -> Callable[[ConfigKeys], Model]:
    return _READERS[f"read_{model_type.removesuffix('_text')}"]


def _trained(architecture: str, row: Mapping[str, Any]) -> ModelFamily:
    """The family of a row of `families`; `read`, `fits`, `keys` and `expert_keys` are functions by name."""
    model_type, tables = row["model_type"], _TABLES["tensors"]
    names = {key: f"{row[key]}_keys" for key in ("keys", "expert_keys") if key in row}
    fused = _TABLES["fused"][row["fused"]] if "fused" in row else {}
    return ModelFamily(
        architecture=architecture,
        model_type=model_type,
        read=_reader(model_type),
        fits=getattr(family_shapes, f"fits_{model_type.removesuffix('_text')}"),
        tensors={ours: theirs for name in row["tensors"] for ours, theirs in tables[name].items()},
        fused={theirs: record_of(FusedTensor, tensor) for theirs, tensor in fused.items()},
        **{key: getattr(family_shapes, name) for key, name in names.items()},
        **{key: row[key] for key in ("has_predictions", "knows_dense_layers") if key in row},
    )


FAMILIES: dict[str, ModelFamily] = {name: _trained(name, row) for name, row in _TABLES["families"].items()} | {
    name: ModelFamily(
        architecture=name,
        model_type=model_type,
        read=_reader(model_type),
        not_trained=group["reason"],
        shapes_only=group.get("shapes_only", False),
    )
    for group in _TABLES["not_trained"]
    for name, model_type in group["architectures"].items()
}
"""Every known family, by architecture. A model that names no family gets the first that fits."""

NOT_READ: dict[str, str] = _TABLES["not_read"]
"""Architectures that are refused by name, and what of them has no formula here."""


def family_that_fits(model: Model) -> ModelFamily | None:
    """The family whose files hold this model: the one it names, or the first that can express its shapes.

    All of them have a class that scores texts.
    """
    model = replace(model, num_labels=0)
    for family in trained_families():
        is_named = family.architecture == (model.family or family.architecture)
        if is_named and family.fits(model) and (family.has_predictions or not model.num_mtp_layers):
            return family
    return None


def trained_families() -> tuple[ModelFamily, ...]:
    """The families that Meshwright trains: their logits and gradients equal transformers'."""
    return tuple(family for family in FAMILIES.values() if family.trains)
