"""Adapters that begin in their base (PiSSA, OLoRA), as plain ones of twice the rank: [A; A0] and [B, -B0].

s (B A - B0 A0) is then the change of the base as its files have it. PEFT converts adapters in the same way
(`path_initial_model_for_weight_conversion`). Formulas: `training.models.lora`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.specs.model import Lora
from meshwright.training.models import Transformer
from meshwright.training.models.lora import beginning
from meshwright.training.weights.adapter_config import CONFIG, IN_THE_BASE, PREFIX, AdapterSize, read_config, size_of
from meshwright.training.weights.safetensors_format import Folder, TensorEntry, write_file

WEIGHTS = "adapter_model.safetensors"
_ENDS = (".initial_a", ".initial_b")


def initial_adapters(built: Transformer) -> dict[str, Tensor]:
    """A and B that the base of `built` has lost, by name; empty for adapters that begin at zero."""
    return {name: buffer for name, buffer in built.named_buffers() if name.endswith(_ENDS)}


def as_plain(whole: Mapping[str, Tensor], lora: Lora) -> tuple[dict[str, Tensor], Lora]:
    """Return plain adapters with the function of `whole`, which has `initial_adapters` too, and their sizes."""
    found = dict(whole)
    for name in filter(lambda name: name.endswith(_ENDS), whole):
        matrix, _, kind = name.rpartition(".initial_")
        trained = f"{matrix}.lora_{kind}.weight"
        found[trained] = _joined(found[trained], found.pop(name), is_a=kind == "a")
    ranks, alphas = ({key: 2 * value for key, value in of.items()} for of in (lora.ranks, lora.alphas))
    return found, replace(lora, rank=2 * lora.rank, alpha=2 * lora.alpha, ranks=ranks, alphas=alphas)


def _joined(trained: Tensor, initial: Tensor, *, is_a: bool) -> Tensor:
    return torch.cat([trained, initial]) if is_a else torch.cat([trained, -initial], dim=1)


@contextmanager
def plain_adapters(folder: Path, *, base: Path | None, scores: bool = False) -> Iterator[Path]:
    """Yield `folder`, or for PEFT's PiSSA and OLoRA a folder of plain adapters with their function.

    A0 and B0 are computed from the weights in `base`, as PEFT computes them when it loads the adapter. `scores`: of a
    reward model. Raises InputError where a matrix is not in `base`.
    """
    config = read_config(folder / CONFIG, scores=scores, is_plain=False)
    init = config.get("init_lora_weights")
    if init not in IN_THE_BASE or base is None:
        yield folder
        return
    adapters, weights, sizes, entries = Folder(folder, single=WEIGHTS), Folder(base), {}, []
    for name in adapters.files:
        tensor = adapters.read(name)
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            other = f"{PREFIX}{module}.lora_B.weight"
            if f"{module}.weight" not in weights.files or other not in adapters.files:
                raise InputError(f"{folder}: {init} needs the matrix in the base", got=module, allowed=str(base))
            size = size_of(config, module)
            initial = beginning(
                weights.read(f"{module}.weight"), str(init), rank=size.rank, scale=size.alpha / size.rank
            )
            pair = {name: (tensor, initial[0], True), other: (adapters.read(other), initial[1], False)}
            entries += [_entry(key, _joined(t, i, is_a=is_a)) for key, (t, i, is_a) in pair.items()]
            sizes[module] = AdapterSize(2 * size.rank, 2 * size.alpha)
        elif not name.endswith(".lora_B.weight"):
            entries.append(_entry(name, tensor))
    changes = {
        "init_lora_weights": True,
        "use_rslora": False,  # the sizes have it
        "r": 2 * config["r"],
        "rank_pattern": {module: size.rank for module, size in sizes.items()},
        "alpha_pattern": {module: size.alpha for module, size in sizes.items()},
    }
    with TemporaryDirectory() as made:
        write_file(Path(made) / WEIGHTS, entries)
        (Path(made) / CONFIG).write_text(json.dumps(config | changes), encoding="utf-8")
        yield Path(made)


def _entry(name: str, tensor: Tensor) -> TensorEntry:
    return TensorEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, make=partial(Tensor.clone, tensor))
