"""Seconds of one module's passes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshwright.arrays import Array


def total_of(seconds: Iterable[Array]) -> Array:
    """Sum of times. Those that are the number zero for all plans cost no pass over a column."""
    return sum(s for s in seconds if not (isinstance(s, float) and s == 0.0))


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of one module in the forward pass and in the two parts of the backward pass."""

    forward_s: Array
    input_s: Array  # gradient of the inputs
    weight_s: Array  # gradient of the weights

    def __add__(self, other: PassTimes) -> PassTimes:
        return PassTimes(
            forward_s=self.forward_s + other.forward_s,
            input_s=self.input_s + other.input_s,
            weight_s=self.weight_s + other.weight_s,
        )

    def times(self, factor: Array) -> PassTimes:
        """`factor` of them one after the other."""
        return PassTimes(
            forward_s=self.forward_s * factor, input_s=self.input_s * factor, weight_s=self.weight_s * factor
        )

    def where(self, mask: Array, other: PassTimes) -> PassTimes:
        """Return these times where `mask` is above zero, else `other`."""
        is_here = np.asarray(mask) > 0
        return PassTimes(
            forward_s=np.where(is_here, self.forward_s, other.forward_s),
            input_s=np.where(is_here, self.input_s, other.input_s),
            weight_s=np.where(is_here, self.weight_s, other.weight_s),
        )

    @property
    def total_s(self) -> Array:
        return total_of((self.forward_s, self.input_s, self.weight_s))


NO_PASSES = PassTimes(forward_s=0.0, input_s=0.0, weight_s=0.0)
"""Times of a module that no model of a table has."""
