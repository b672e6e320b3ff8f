"""Tensors of files that hold several of ours, or one in another memory layout: Phi's queries, keys and values in one,
gpt-oss's gates and ups in one stack.

    one after another    file [o_1 + o_2, in] = rows of part 1, rows of part 2
    alternating          file [2 o, in]       = row 1 of part 1, row 1 of part 2, row 2 of part 1 ...
    transposed           file [in, outputs]

Stacks of experts have one more dimension in front. A sharded part reads only its slice of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from meshwright.catalog.families import ModelFamily
from meshwright.catalog.family_tensors import FusedTensor
from meshwright.specs.model import Model
from meshwright.training.models import build_model
from meshwright.training.weights.safetensors_format import Folder

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """The place of one of our tensors in a tensor of a file."""

    name: str  # of the tensor in the file
    fused: FusedTensor
    index: int  # of ours among the parts
    shapes: tuple[Shape, ...]  # of all parts, in our layout

    @property
    def dim(self) -> int:
        """Dimension of our layout along which the parts are joined: the outputs."""
        return 1 if ".experts." in self.fused.parts[0] else 0

    @property
    def file_shape(self) -> Shape:
        """Shape of the tensor in the file."""
        shape = list(self.shapes[0])
        shape[self.dim] = sum(part[self.dim] for part in self.shapes)
        return (*shape[:-2], shape[-1], shape[-2]) if self.fused.is_transposed else tuple(shape)

    def read(self, files: Folder, *, where: Sequence[slice] | None = None) -> Tensor:
        """Our tensor, or the part of it at `where`."""
        num, dim = len(self.shapes), self.dim
        slices = [slice(0, size) for size in self.shapes[self.index]] if where is None else list(where)
        wanted = slices[dim]
        if self.fused.alternates:
            slices[dim] = slice(num * wanted.start, num * wanted.stop)
        else:
            before = sum(part[dim] for part in self.shapes[: self.index])
            slices[dim] = slice(before + wanted.start, before + wanted.stop)
        if self.fused.is_transposed:
            slices[-2:] = reversed(slices[-2:])
        found = files.read(self.name, where=tuple(slices))
        found = found.transpose(-1, -2) if self.fused.is_transposed else found
        return found.unflatten(dim, (-1, num)).select(dim + 1, self.index) if self.fused.alternates else found

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor of the file from all parts, in our layout."""
        dim = self.dim
        if self.fused.alternates:
            whole = torch.stack(list(parts), dim=dim + 1).flatten(dim, dim + 1)
        else:
            whole = torch.cat(list(parts), dim=dim)
        return whole.transpose(-1, -2) if self.fused.is_transposed else whole


def file_part(name: str, *, shapes: Mapping[str, Shape], family: ModelFamily) -> FilePart | None:
    """The place of our tensor `name` in a fused one; None: the file has it by itself. `shapes` has all of ours."""
    if not name.startswith("layers."):
        return None
    *layer, place = name.split(".", 2)
    in_file = family.tensors[place]
    fused = family.fused.get(in_file)
    if fused is None:
        return None
    parts = tuple(shapes[".".join([*layer, part])] for part in fused.parts)
    return FilePart(
        name=f"model.{'.'.join(layer)}.{in_file}", fused=fused, index=fused.parts.index(place), shapes=parts
    )


@cache
def our_shapes(model: Model) -> Mapping[str, Shape]:
    """The shapes of all parameters and routing biases of the whole `model`, by our names."""
    built = build_model(model)
    tensors = (*built.named_parameters(), *built.named_buffers())
    return {name: tuple(tensor.shape) for name, tensor in tensors}
