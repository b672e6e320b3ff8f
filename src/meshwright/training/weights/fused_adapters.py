"""Adapters of matrices that a family's files hold as one: PEFT adapts the one, Meshwright each of its n parts.

    ours    y_i = W_i x + s B_i A_i x                             i = 1 .. n, A_i [r, in], B_i [out_i, r]
    PEFT    y = W x + s B A x,  A = A_1 over A_2 ..., B = diag(B_1, B_2 ...)    rank n r, alpha n times as large

So the written adapter computes exactly the trained function. An adapter of rank r that others trained on the
whole matrix is read as n adapters with one A; the adapter of query, key and value is our `qkv`, which is
written back as it was read.

If files hold query, key and value each by itself, `qkv` is written as three adapters with one A, which is the
same function, and three adapters with one A are read as `qkv`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.catalog.families import ModelFamily
from meshwright.errors import InputError
from meshwright.specs.model import QKV, Lora, Model
from meshwright.training.weights.fusing import FilePart, file_part, our_shapes

QKV_PARTS = ("query", "key", "value")


@dataclass(frozen=True, kw_only=True)
class AdapterPart:
    """The place of one of our adapter matrices, A or B, in the adapter of a fused matrix."""

    name: str  # of our tensor
    is_a: bool
    is_magnitude: bool  # of DoRA, which has a number for each row
    place: FilePart
    rank: int  # r

    @property
    def others(self) -> list[str]:
        """Our tensors that the file's tensor consists of, in order."""
        before, end = self.name.split(self.place.fused.parts[self.place.index].removesuffix(".weight"))
        return [f"{before}{part.removesuffix('.weight')}{end}" for part in self.place.fused.parts]

    def file_shape(self, *, is_shared: bool) -> tuple[int, ...]:
        """Shape in the file, of n adapters joined; `is_shared`: of one adapter of the whole matrix."""
        rank = self.rank * (1 if is_shared else len(self.place.shapes))
        width = self.place.shapes[0][1] if self.is_a else sum(shape[0] for shape in self.place.shapes)
        if self.is_magnitude:
            return (width,)
        return (rank, width) if self.is_a else (width, rank)

    def is_of_qkv(self, lora: Lora) -> bool:
        """True if the matrix has one adapter as a whole."""
        return QKV in lora.targets and ".attention.query." in self.others[0]

    def join(self, tensors: Sequence[Tensor], *, is_shared: bool) -> Tensor:
        """The tensor of the file."""
        if is_shared or self.is_magnitude:
            return tensors[0] if self.is_a else torch.cat(list(tensors))
        return torch.cat(list(tensors)) if self.is_a else torch.block_diag(*tensors)

    def is_block_diagonal(self, b: Tensor) -> bool:
        """True if the file's B is made of one adapter for each part."""
        num, sizes = len(self.place.shapes), [shape[0] for shape in self.place.shapes]
        blocks = (rows.chunk(num, dim=1)[i] for i, rows in enumerate(b.split(sizes)))
        return bool(b.count_nonzero() == sum(block.count_nonzero() for block in blocks))

    def split(self, whole: Tensor, *, is_shared: bool) -> Tensor:
        """Our tensor from the file's tensor. Raises InputError where that is not made of n adapters."""
        index, sizes = self.place.index, [shape[0] for shape in self.place.shapes]
        if is_shared or self.is_magnitude:
            return whole if self.is_a else whole.split(sizes)[index]
        if self.is_a:
            return whole.split(self.rank)[index]
        own = whole.split(sizes)[index].split(self.rank, dim=1)[index]
        if not self.is_block_diagonal(whole):
            raise InputError(
                f"{self.place.name} has one adapter of a larger rank, and not one for each of its parts",
                got=f"rank {whole.shape[1]}", allowed=f"rank {self.rank}, as the other matrices",
            )  # fmt: skip
        return own


def of_parts(adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`adapters` with the tensors of `qkv` under the names of three adapters, which have its A in common."""
    found: dict[str, Tensor] = {}
    for name, tensor in adapters.items():
        before, is_qkv, end = name.partition(f".{QKV}.lora_")
        if not is_qkv:
            found[name] = tensor
        elif end == "a.weight":
            found |= {f"{before}.{part}.lora_a.weight": tensor for part in QKV_PARTS}
        else:
            found[f"{before}.{end.split('.')[1]}.lora_b.weight"] = tensor
    return found


def adapter_part(name: str, *, model: Model, family: ModelFamily, rank: int) -> AdapterPart | None:
    """The place of our adapter tensor `name`; None: its matrix is one in the files too."""
    matrix, is_adapter, kind = name.partition(".lora_")
    if not is_adapter:
        return None
    place = file_part(f"{matrix}.weight", shapes=our_shapes(model), family=family)
    is_a, is_magnitude = kind.startswith("a."), kind == "magnitude"
    return place and AdapterPart(name=name, is_a=is_a, is_magnitude=is_magnitude, place=place, rank=rank)


def require_all_parts(tensors: Mapping[str, object], part: AdapterPart) -> None:
    """Raise InputError where only some parts of a fused matrix have adapters."""
    if absent := [name for name in part.others if name not in tensors]:
        raise InputError(
            f"files hold {part.place.name} as one matrix, of which only some parts have adapters",
            got=f"none of {absent[0]}",
            hint="name all of its parts as lora.targets, or none",
        )
