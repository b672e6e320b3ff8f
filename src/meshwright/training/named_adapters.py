"""Several adapters of one base: each is loaded once, and one of them, or none, computes.

An adapter is a set of modules that share the base's matrices, and switching puts them in the places of the base's own
modules: the base is in memory once. PEFT does the same with `load_adapter` and `set_adapter`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from meshwright.errors import InputError
from meshwright.specs.model import Lora, Model
from meshwright.training.models import Transformer, add_adapters, build_model
from meshwright.training.models.lora import LoraLinear, QkvAdapter, saved_modules
from meshwright.training.weights import adapters_of, load_adapters, plain_adapters, read_lora


class NamedAdapters:
    """Adapters of `built`, whose weights are those of the folder `base`."""

    def __init__(self, built: Transformer, *, base: Path) -> None:
        self.built, self.base = built, base
        self.used: str | None = None
        self._named: dict[str, dict[str, nn.Module]] = {}
        self._plain: dict[str, nn.Module | None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order in which they were added."""
        return tuple(self._named)

    def add(self, name: str, folder: Path) -> Lora:
        """Read the adapter of a PEFT folder. Raises InputError where it is none of this base."""
        self.use(None)
        model, weight = self.built.model, self.built.get_parameter("norm.weight")
        with plain_adapters(folder, base=self.base, scores=model.num_labels > 0) as plain:
            other = with_empty_adapters(model, lora := read_lora(plain, model=model))
            load_adapters(other, plain)
        own: dict[str, nn.Module] = {}
        for path, module in other.named_modules():
            if isinstance(module, LoraLinear | QkvAdapter):
                own[path] = module
                self._plain.setdefault(path, _child(self.built, path))
            if isinstance(module, LoraLinear):
                base = self.built.get_submodule(path)
                module.weight = base.get_parameter("weight")
                module.register_parameter("bias", getattr(base, "bias", None))
        for path, module in saved_modules(other).items():
            own[path] = module.to(weight.dtype)
            self._plain.setdefault(path, _child(self.built, path))
        self._named[name] = {
            path: module.to(weight.device).eval().requires_grad_(False) for path, module in own.items()
        }
        return lora

    def modules(self, name: str) -> Iterable[tuple[str, nn.Module]]:
        """Modules of the adapter of this name, by their place in the model."""
        return self._named[name].items()

    def use(self, name: str | None) -> None:
        """Compute with the adapter of this name from now on; None: with the base. Raises InputError for others."""
        if name is not None and name not in self._named:
            raise InputError("no adapter has this name", got=name, allowed=", ".join(self._named))
        for path, module in (self._plain | (self._named[name] if name else {})).items():
            owner, _, last = path.rpartition(".")
            setattr(self.built.get_submodule(owner), last, module)
        self.used = name


def _child(built: Transformer, path: str) -> nn.Module | None:
    owner, _, last = path.rpartition(".")
    return getattr(built.get_submodule(owner), last)


def with_empty_adapters(model: Model, lora: Lora) -> Transformer:
    """A model on the meta device, with adapters on the host."""
    module = build_model(model)
    add_adapters(module, lora)
    for name, tensor in adapters_of(module).items():
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner).register_parameter(last, nn.Parameter(torch.empty(tensor.shape)))
    module.tie()
    return module
