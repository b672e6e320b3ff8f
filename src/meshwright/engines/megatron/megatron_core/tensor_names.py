"""Names of a model's tensors in Megatron's checkpoints, as tables. Imports no torch.

A `TensorName` is the native engine's name of a tensor (`layers.3.attention.query.weight`), with the number of the
expert where it is one of a stack. Most of Megatron's tensors hold one of these. Its queries, keys and values are one
tensor, a group of heads after the other:

    group g:  the queries of its H / G heads, its key, its value          rows of [G (H / G + 2) K, D]

Their biases, where the model has them, are one vector in the same order.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_NAMES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
OUTSIDE_LAYERS: dict[str, str] = _NAMES["outside_layers"]
FUSED: dict[str, str] = _NAMES["fused"]
IN_LAYER: dict[str, str] = FUSED | _NAMES["in_layer"]


@dataclass(frozen=True, kw_only=True)
class TensorName:
    """A tensor of the native engine: a whole one, or one expert of a stack."""

    name: str
    expert: int | None = None


@cache
def _of_megatron() -> dict[str, str]:
    """Native names within a layer by Megatron's; of fused ones the first."""
    return {theirs: ours for ours, theirs in reversed(IN_LAYER.items())}


def native_name(key: str) -> TensorName | None:
    """Return the native tensor that Megatron's tensor `key` holds, the first of fused ones; None: it is not known.

    >>> native_name("decoder.layers.3.mlp.experts.experts.7.linear_fc2.weight")
    TensorName(name='layers.3.ffn.experts.down', expert=7)
    """
    if outside := next((ours for ours, theirs in OUTSIDE_LAYERS.items() if theirs == key), None):
        return TensorName(name=outside)
    if not (found := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*?)(?:(?<=\.experts\.)(\d+)(\..*))?", key)):
        return None
    layer, inside, expert, rest = found.groups()
    ours = _of_megatron().get(inside if expert is None else f"{inside}{{expert}}{rest}")
    number = None if expert is None else int(expert)
    return None if ours is None else TensorName(name=f"layers.{layer}.{ours}", expert=number)


def is_fused(tensor: TensorName) -> bool:
    """Return True if Megatron holds `tensor` with two others in one tensor."""
    return tensor.name.endswith(tuple(FUSED))


def fused_with(tensor: TensorName) -> list[TensorName]:
    """Return the tensors that Megatron holds in one with `tensor`, in its order: query, key and value.

    >>> [fused.name for fused in fused_with(TensorName(name="layers.3.attention.key.bias"))][0]
    'layers.3.attention.query.bias'
    """
    if not is_fused(tensor):
        return [tensor]
    layer, kind = tensor.name.partition("attention.")[0], tensor.name.rpartition(".")[2]
    return [TensorName(name=layer + name) for name in FUSED if name.endswith(kind)]


def has_padded_rows(tensor: TensorName) -> bool:
    """Return True if Megatron pads the rows of `tensor`, which are those of the vocabulary."""
    return tensor.name in ("embedding.weight", "head.weight")
