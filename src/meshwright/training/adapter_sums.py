"""Adapters combined to one update of each matrix, as PEFT's `add_weighted_adapter` combines them.

With w the factor of an adapter times its scale, A [rank, in], B [out, rank] and sums over the adapters of a matrix:

    cat      Σ w B_i A_i
    linear   B A of A = Σ sign(w) √|w| A_i and B = Σ √|w| B_i
    ties     the same, where each A_i and B_i keeps the share `density` of its values, the largest; of these only
             the ones with the sign of their sum are added, and divided by their number (Yadav et al. 2023)
    svd      the sum of cat with the largest singular values alone, as many as the largest rank
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.training.models.lora import LoraLinear, QkvAdapter
from meshwright.training.named_adapters import NamedAdapters
from meshwright.training.weights import read_lora
from meshwright.training.weights.fused_adapters import adapter_part
from meshwright.training.weights.names import family_of

Combination = Literal["cat", "linear", "svd", "ties"]


class _Part(NamedTuple):
    a: Tensor
    b: Tensor
    weight: float  # w


@torch.no_grad()
def add_combined(
    named: NamedAdapters, adapters: Mapping[Path, float], how: Combination, *, density: float | None
) -> None:
    """Add the combination of the adapters in these folders, each times a number, to the weights, which are fp32.

    Raises InputError for a DoRA adapter, and for one that trained embedding or head whole; but for `cat` also where
    the files of the family hold an adapted matrix fused with others, which PEFT combines as one, and for adapters that
    begin in their base; for `linear` and `ties` also where the adapters of a matrix have different ranks.
    """
    parts, ranks, model = defaultdict(list), [], named.built.model
    for folder, factor in adapters.items():
        if how != "cat":
            read_lora(folder, model=model)  # refuses adapters that begin in their base
        lora = named.add(str(folder), folder)
        if lora.use_dora or lora.modules_to_save:
            raise InputError("DoRA, and embedding or head trained whole, are in no sum of adapters", got=str(folder))
        ranks += [lora.rank, *lora.ranks.values()]
        for name, module in named.modules(str(folder)):
            for matrix, a, b, scale in _matrices(name, module):
                parts[matrix].append(_Part(a=a, b=b, weight=factor * scale))
    named.use(None)
    for matrix, of in parts.items():
        if how != "cat" and adapter_part(f"{matrix}.lora_a.weight", model=model, family=family_of(model), rank=1):
            raise InputError(f"{how} is of whole matrices, and files hold this one with others", got=matrix)
        if how in ("linear", "ties") and len(sizes := {part.a.shape[0] for part in of}) > 1:
            raise InputError(f"{how} adds adapters of one rank", got=f"{sorted(sizes)} of {matrix}", hint="svd or cat")
        if how in ("linear", "ties"):
            update = _product(of, density=density)
        else:
            update = torch.stack([part.weight * part.b.float() @ part.a.float() for part in of]).sum(0)
        if how == "svd":
            u, s, v = torch.linalg.svd(update, full_matrices=False)
            update = u[:, : max(ranks)] * s[: max(ranks)] @ v[: max(ranks)]
        named.built.get_parameter(f"{matrix}.weight").add_(update)


def _matrices(name: str, module: nn.Module) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Matrix, A, B and scale of an adapter. One of query, key and value together has three matrices, B and one A."""
    if isinstance(module, QkvAdapter):
        for part, b in module.lora_b.items():
            yield f"{name.rpartition('.')[0]}.{part}", module.lora_a.weight, b.get_parameter("weight"), module.scale
    elif isinstance(module, LoraLinear):
        yield name, module.lora_a.weight, module.lora_b.weight, module.scale


def _product(parts: list[_Part], *, density: float | None) -> Tensor:
    roots = torch.tensor([part.weight for part in parts]).abs().sqrt()[:, None, None]
    signs = torch.tensor([1.0 if part.weight >= 0 else -1.0 for part in parts])[:, None, None]
    a = _sum(torch.stack([part.a.float() for part in parts]), roots * signs, density=density)
    return _sum(torch.stack([part.b.float() for part in parts]), roots, density=density) @ a


def _sum(each: Tensor, weights: Tensor, *, density: float | None) -> Tensor:
    """The weighted sum over the first dimension. With a density, TIES trims the values and elects their signs first."""
    if density is None:
        return (each * weights).sum(0)
    flat = each.flatten(1)
    kept = torch.zeros_like(flat).scatter_(1, flat.abs().topk(int(density * flat.shape[1])).indices, 1.0)
    each = (flat * kept).view_as(each)
    agrees = each.sign() == torch.where(each.sum(0) >= 0, 1, -1)
    return (each * weights * agrees).sum(0) / agrees.sum(0).clamp(min=1)
