"""Stacks of matrices in 8 or 4 bits: the weights of experts, each a matrix with scales of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.kernels.fp8.casting import cast_both
from meshwright.kernels.fp8.formats import Element, Quantized, Scaling


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedStack:
    """Values and scales of E matrices of `shape`, each along a first dimension of E."""

    values: Tensor
    scales: Tensor
    element: Element
    scaling: Scaling
    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def matrix(self, index: int) -> Quantized:
        """One of the matrices."""
        return Quantized(
            values=self.values[index],
            scales=self.scales[index],
            element=self.element,
            scaling=self.scaling,
            shape=self.shape,
        )


BothStacks = tuple[QuantizedStack | None, QuantizedStack | None]
"""A stack [E, N, K] and that of the transposed matrices [E, K, N]; None for the one that is not wanted."""


def cast_stack(
    weight_ENK: Tensor,
    *,
    element: Element,
    scaling: Scaling,
    power_of_two: bool = False,
    amax: Tensor | None = None,
    with_rows: bool = True,
    with_columns: bool = True,
) -> BothStacks:
    """Quantise each matrix and its transpose, as `casting.cast_both` does one."""
    matrices = [
        cast_both(
            weight_NK,
            element=element,
            scaling=scaling,
            power_of_two=power_of_two,
            amax=amax,
            with_rows=with_rows,
            with_columns=with_columns,
        )
        for weight_NK in weight_ENK.unbind()
    ]
    rows, columns = zip(*matrices, strict=True)
    return _stacked(rows), _stacked(columns)


def _stacked(matrices: tuple[Quantized | None, ...]) -> QuantizedStack | None:
    found = [matrix for matrix in matrices if matrix is not None]
    if not found:
        return None
    first = found[0]
    return QuantizedStack(
        values=torch.stack([m.values for m in found]),
        scales=torch.stack([m.scales for m in found]),
        element=first.element,
        scaling=first.scaling,
        shape=first.shape,
    )
