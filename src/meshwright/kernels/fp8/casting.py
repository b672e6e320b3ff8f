"""Cast of a matrix, or of each one of a stack, and of its transpose to 8 bits: the routes of operation `fp8_cast`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshwright.kernels.dispatch import choose
from meshwright.kernels.fp8.formats import Element, Quantized, Scaling, quantize
from meshwright.kernels.fp8.stacks import BothStacks, QuantizedStack, stacked
from meshwright.kernels.fp8.triton_formats import serves_cast
from meshwright.kernels.routes import Route

Both = tuple[Quantized | None, Quantized | None]
"""A matrix [M, K] and its transpose [K, M]; an unwanted one is None."""
_Cast = Quantized | QuantizedStack


def cast_both(
    x_MK: Tensor,
    *,
    element: Element,
    scaling: Scaling,
    power_of_two: bool = False,
    amax: Tensor | None = None,
    with_rows: bool = True,
    with_columns: bool = True,
) -> Both:
    """Quantise `x_MK` and its transpose, each along its own rows.

    `amax`, of scaling by tensors only: the largest magnitude to scale by [1, 1] (delayed scaling).
    """
    route = _route(x_MK, element, scaling)
    return route(x_MK, element, scaling, power_of_two, amax, with_rows, with_columns)


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
    """Quantise each matrix and its transpose, as `cast_both` does one. `amax` is shared by all of them."""
    route = _route(weight_ENK, element, scaling)
    return route(weight_ENK, element, scaling, power_of_two, amax, with_rows, with_columns)


def _route(x: Tensor, element: Element, scaling: Scaling) -> Callable[..., Any]:
    flags = frozenset({f"element:{element}", f"scaling:{scaling}"})
    return ROUTES["fp8_cast"][choose("fp8_cast", x, flags=flags)].function


def reference(
    x: Tensor,
    element: Element,
    scaling: Scaling,
    power_of_two: bool,
    amax: Tensor | None,
    with_rows: bool,
    with_columns: bool,
) -> tuple[_Cast | None, _Cast | None]:
    """The specification: `formats.quantize` of both orientations."""

    def one(x_MK: Tensor) -> Quantized:
        return quantize(x_MK, element=element, scaling=scaling, amax=amax, power_of_two=power_of_two)

    def each(x: Tensor) -> _Cast:
        return one(x) if x.dim() == 2 else stacked([one(x_MK) for x_MK in x.unbind()])

    return each(x) if with_rows else None, each(x.mT) if with_columns else None


def _triton(
    x: Tensor, element: Element, scaling: Scaling, power_of_two: bool, amax: Tensor | None, *sides: bool
) -> tuple[_Cast | None, _Cast | None]:
    from meshwright.kernels.fp8.triton_cast import fp8_cast

    found = fp8_cast(x, element, scaling, power_of_two, amax, *sides)
    kind = QuantizedStack if x.dim() == 3 else Quantized
    rows, columns = x.shape[-2:]
    shapes = ((rows, columns), (columns, rows))
    by_rows, by_columns = (
        kind(values=values, scales=scales, element=element, scaling=scaling, shape=shape) if is_wanted else None
        for values, scales, shape, is_wanted in zip(found[::2], found[1::2], shapes, sides, strict=True)
    )
    return by_rows, by_columns


ROUTES = {
    "fp8_cast": {
        "reference": Route(name="reference", kind="reference", function=reference),
        "triton": Route(name="triton", kind="triton", function=_triton, serves=serves_cast),
    }
}
