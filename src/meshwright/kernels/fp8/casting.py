"""Cast of a matrix and of its transpose to 8 bits: the routes of operation `fp8_cast`."""

from __future__ import annotations

from torch import Tensor

from meshwright.kernels.dispatch import choose
from meshwright.kernels.fp8.formats import Element, Quantized, Scaling, quantize
from meshwright.kernels.routes import KernelCall, Refusal, Route
from meshwright.kernels.triton_route import serves_triton

Both = tuple[Quantized | None, Quantized | None]
"""A matrix [M, K] and its transpose [K, M]; None for the one that is not wanted."""


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
    flags = frozenset({f"element:{element}", f"scaling:{scaling}"})
    route = choose("fp8_cast", x_MK, flags=flags)
    return ROUTES["fp8_cast"][route].function(
        x_MK,
        element=element,
        scaling=scaling,
        power_of_two=power_of_two,
        amax=amax,
        with_rows=with_rows,
        with_columns=with_columns,
    )


def reference(
    x_MK: Tensor,
    *,
    element: Element,
    scaling: Scaling,
    power_of_two: bool,
    amax: Tensor | None,
    with_rows: bool,
    with_columns: bool,
) -> Both:
    """The specification: `formats.quantize` of both orientations."""

    def one(x: Tensor) -> Quantized:
        return quantize(x, element=element, scaling=scaling, amax=amax, power_of_two=power_of_two)

    return one(x_MK) if with_rows else None, one(x_MK.T) if with_columns else None


def _triton(
    x_MK: Tensor, *, element: Element, scaling: Scaling, amax: Tensor | None, **options: bool
) -> Both:
    from meshwright.kernels.fp8.triton_cast import fp8_cast

    sides = (options["with_rows"], options["with_columns"])
    found = fp8_cast(x_MK, element, scaling, options["power_of_two"], amax, *sides)
    rows, columns = x_MK.shape
    shapes = ((rows, columns), (columns, rows))
    by_rows, by_columns = (
        Quantized(values=values, scales=scales, element=element, scaling=scaling, shape=shape)
        if is_wanted
        else None
        for values, scales, shape, is_wanted in zip(found[::2], found[1::2], shapes, sides, strict=True)
    )
    return by_rows, by_columns


def _triton_serves(call: KernelCall) -> Refusal | None:
    if f"element:{Element.E2M1}" in call.flags:
        return Refusal(reason="4-bit values are emulated by the reference only")
    return serves_triton(call)


ROUTES = {
    "fp8_cast": {
        "reference": Route(name="reference", kind="reference", function=reference),
        "triton": Route(name="triton", kind="triton", function=_triton, serves=_triton_serves),
    }
}
