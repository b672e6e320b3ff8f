"""Stacks of matrices in 8 or 4 bits: the weights of experts, each a matrix with scales of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.kernels.fp8.formats import Element, Quantized, ScaledValues, Scaling


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedStack(ScaledValues):
    """E matrices of `shape`: values and scales of each along a first dimension of E."""

    element: Element
    scaling: Scaling
    shape: tuple[int, int]

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
"""A stack [E, N, K] and the stack of transposed matrices [E, K, N]; an unwanted stack is None."""


def stacked(matrices: Sequence[Quantized]) -> QuantizedStack:
    """Return the stack of matrices of one form."""
    first = matrices[0]
    return QuantizedStack(
        values=torch.stack([m.values for m in matrices]),
        scales=torch.stack([m.scales for m in matrices]),
        element=first.element,
        scaling=first.scaling,
        shape=first.shape,
    )
