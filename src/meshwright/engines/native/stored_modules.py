"""Modules of a layer that keep their activations for the backward pass in 8 bits (`kernels.stored_activations`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from meshwright.kernels.stored_activations import StoredFormat, store_activations
from meshwright.training.models import Block
from meshwright.training.models.experts import MixtureOfExperts


def store_modules(blocks: Iterable[nn.Module], formats: Mapping[str, str]) -> None:
    """Make the modules that `formats` names keep their activations so, in place."""
    for block in blocks:
        for name, kind in formats.items():
            for module in _modules(block, name):
                store_activations(module, format=StoredFormat(kind))


def _modules(block: nn.Module, name: str) -> Iterator[nn.Module]:
    assert isinstance(block, Block)
    if name == "norm":
        yield from (block.attention_norm, block.ffn_norm)
    elif isinstance(block.ffn, MixtureOfExperts):  # its router keeps fp32
        yield block.ffn.experts
        if block.ffn.shared is not None:
            yield block.ffn.shared
    else:
        yield block.ffn
