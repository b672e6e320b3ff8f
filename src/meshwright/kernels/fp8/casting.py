"""Cast of a matrix, or of each one of a stack, and of its transpose to 8 bits: the routes of operation `fp8_cast`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from meshwright.kernels.dispatch import choose
from meshwright.kernels.fp8.formats import Element, Quantized, Scaling, quantize, stacked
from meshwright.kernels.fp8.triton_formats import serves_cast
from meshwright.kernels.routes import Route

Both = tuple[Quantized | None, Quantized | None]
"""A matrix [M, K] and its transpose [K, M], or stacks of both; an unwanted one is None."""


def cast_both(
    x: Tensor,
    *,
    element: Element,
    scaling: Scaling,
    power_of_two: bool = False,
    amax: Tensor | None = None,
    with_rows: bool = True,
    with_columns: bool = True,
) -> Both:
    """Quantise a matrix [M, K], or each one of a stack [E, M, K], and its transpose, each along its own rows.

    `amax`, of scaling by tensors only: the largest magnitude to scale by [1, 1] (delayed scaling), of all matrices.
    """
    flags = frozenset({f"element:{element}", f"scaling:{scaling}"})
    route = ROUTES["fp8_cast"][choose("fp8_cast", x, flags=flags)].function
    return route(x, element, scaling, power_of_two, amax, with_rows, with_columns)


def reference(
    x: Tensor,
    element: Element,
    scaling: Scaling,
    power_of_two: bool,
    amax: Tensor | None,
    with_rows: bool,
    with_columns: bool,
) -> Both:
    """The specification: `formats.quantize` of both orientations."""

    def one(x_MK: Tensor) -> Quantized:
        return quantize(x_MK, element=element, scaling=scaling, amax=amax, power_of_two=power_of_two)

    def each(x: Tensor) -> Quantized:
        return one(x) if x.dim() == 2 else stacked([one(x_MK) for x_MK in x.unbind()])

    return each(x) if with_rows else None, each(x.mT) if with_columns else None


def _triton(
    x: Tensor, element: Element, scaling: Scaling, power_of_two: bool, amax: Tensor | None, *sides: bool
) -> Both:
    from meshwright.kernels.fp8.triton_cast import fp8_cast

    found = fp8_cast(x, element, scaling, power_of_two, amax, *sides)
    return both_of(found, x, element=element, scaling=scaling, sides=sides)


def both_of(found: Sequence[Tensor], x: Tensor, *, element: Element, scaling: Scaling, sides: Sequence[bool]) -> Both:
    """Return the wanted `sides` of `x`, of their values and scales."""
    rows, columns = x.shape[-2:]
    by_rows, by_columns = (
        Quantized(values=values, scales=scales, element=element, scaling=scaling, shape=shape) if is_wanted else None
        for values, scales, shape, is_wanted in zip(
            found[::2], found[1::2], ((rows, columns), (columns, rows)), sides, strict=True
        )
    )
    return by_rows, by_columns


ROUTES = {"fp8_cast": {"reference": Route(reference), "triton": Route(_triton, serves=serves_cast)}}
