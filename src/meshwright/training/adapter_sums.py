"""Adapters combined to one update of each matrix, as PEFT's `add_weighted_adapter` combines them.

With w the factor of an adapter times its scale, A [rank, in], B [out, rank] and sums over the adapters of a matrix:

    cat      Σ w B_i A_i
    linear   B A of A = Σ sign(w) √|w| A_i and B = Σ √|w| B_i
    ties     the same, where each A_i and B_i keeps the share `density` of its values, the largest; of these only
             the ones with the sign of their sum are added, and divided by their number (Yadav et al. 2023)
    magnitude_prune, dare_linear     linear, of pruned values
    dare_ties                        ties, of pruned values
    svd      the sum of cat with the largest singular values alone, as many as the largest rank

DARE (Yu et al. 2024) keeps each value with the probability `density` and divides what it keeps by that. The values are
drawn matrix by matrix in the order of the model, A's of all adapters before B's, as PEFT draws them: from one state of
PyTorch's generator both draw the same. (PEFT begins the new adapter from the same generator before it draws.)
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

Combination = Literal["cat", "linear", "svd", "ties", "dare_linear", "dare_ties", "magnitude_prune"]


class _Part(NamedTuple):
    a: Tensor
    b: Tensor
    weight: float  # w


@torch.no_grad()
def add_combined(
    named: NamedAdapters, adapters: Mapping[Path, float], how: Combination, *, density: float | None, seed: int
) -> None:
    """Add the combination of the adapters in these folders, each times a number, to the weights, which are fp32.

    `seed`: of the values that DARE keeps.

    Raises InputError for a DoRA adapter, and for one that trained embedding or head whole; but for `cat` also where
    the files of the family hold an adapted matrix fused with others, which PEFT combines as one, and for adapters that
    begin in their base; for all but `cat` and `svd` also where the adapters of a matrix have different ranks.
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
    generator, is_product = torch.Generator().manual_seed(seed), how not in ("cat", "svd")
    for matrix in (name for name, _ in named.built.named_modules() if name in parts):
        of = parts[matrix]
        if how != "cat" and adapter_part(f"{matrix}.lora_a.weight", model=model, family=family_of(model), rank=1):
            raise InputError(f"{how} is of whole matrices, and files hold this one with others", got=matrix)
        if is_product and len(sizes := {part.a.shape[0] for part in of}) > 1:
            raise InputError(f"{how} adds adapters of one rank", got=f"{sorted(sizes)} of {matrix}", hint="svd or cat")
        if is_product:
            update = _product(of, how, density=density, generator=generator)
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


def _product(parts: list[_Part], how: Combination, *, density: float | None, generator: torch.Generator) -> Tensor:
    roots = torch.tensor([part.weight for part in parts]).abs().sqrt()[:, None, None]
    signs = torch.tensor([1.0 if part.weight >= 0 else -1.0 for part in parts])[:, None, None]
    each_a, each_b = torch.stack([part.a.float() for part in parts]), torch.stack([part.b.float() for part in parts])
    if density is not None and density < 1:
        each_a, each_b = (_pruned(each, how, density, generator) for each in (each_a, each_b))
    a, b = _sum(each_a, roots * signs, how), _sum(each_b, roots, how)
    return b @ a


def _pruned(each: Tensor, how: Combination, density: float, generator: torch.Generator) -> Tensor:
    if how.startswith("dare"):
        kept = [torch.bernoulli(torch.full_like(values, density), generator=generator) for values in each]
        return each * torch.stack(kept) / density
    flat = each.flatten(1)
    kept = torch.zeros_like(flat).scatter_(1, flat.abs().topk(int(density * flat.shape[1])).indices, 1.0)
    return (flat * kept).view_as(each)


def _sum(each: Tensor, weights: Tensor, how: Combination) -> Tensor:
    """The weighted sum over the first dimension; TIES elects signs first."""
    if not how.endswith("ties"):
        return (each * weights).sum(0)
    agrees = each.sign() == torch.where(each.sum(0) >= 0, 1, -1)
    return (each * weights * agrees).sum(0) / agrees.sum(0).clamp(min=1)
