"""Cast of a matrix, or of each one of a stack, and of its transpose to 8 bits: the routes of operation `fp8_cast`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from meshwright.kernels.dispatch import choose
from meshwright.kernels.fp8.formats import CastForm, Element, Quantized, Scaling, quantize, stacked
from meshwright.kernels.routes import KernelCall, Refusal, Route
from meshwright.kernels.triton_route import serves_triton

Both = tuple[Quantized | None, Quantized | None]
"""A matrix [M, K] and its transpose [K, M], or stacks of both; an unwanted one is None."""


def cast_both(x: Tensor, form: CastForm, *, amax: Tensor | None = None) -> Both:
    """Quantise a matrix [M, K], or each one of a stack [E, M, K], and its transpose, each along its own rows.

    `amax`, of scaling by tensors only: the largest magnitude to scale by [1, 1] (delayed scaling), of all matrices.
    """
    flags = frozenset({f"element:{form.element}", f"scaling:{form.scaling}"})
    return ROUTES["fp8_cast"][choose("fp8_cast", x, flags=flags)].function(x, form, amax)


def reference(x: Tensor, form: CastForm, amax: Tensor | None) -> Both:
    """The specification: `formats.quantize` of both orientations."""

    def one(x_MK: Tensor) -> Quantized:
        return quantize(x_MK, element=form.element, scaling=form.scaling, amax=amax, power_of_two=form.power_of_two)

    def each(x: Tensor) -> Quantized:
        return one(x) if x.dim() == 2 else stacked([one(x_MK) for x_MK in x.unbind()])

    return each(x) if form.with_rows else None, each(x.mT) if form.with_columns else None


def _triton(x: Tensor, form: CastForm, amax: Tensor | None) -> Both:
    from meshwright.kernels.fp8.triton_cast import fp8_cast

    return both_of(fp8_cast(x, form.element, form.scaling, form.power_of_two, amax, *form.sides), x, form)


def both_of(found: Sequence[Tensor], x: Tensor, form: CastForm) -> Both:
    """Return the wanted sides of `x`, of their values and scales."""
    (rows, columns), how = x.shape[-2:], {"element": form.element, "scaling": form.scaling}
    of_rows = Quantized(values=found[0], scales=found[1], shape=(rows, columns), **how)
    of_columns = Quantized(values=found[2], scales=found[3], shape=(columns, rows), **how)
    return of_rows if form.with_rows else None, of_columns if form.with_columns else None


def serves_cast(call: KernelCall) -> Refusal | None:
    """Refuse 4-bit values, and calls that `serves_triton` refuses."""
    if f"element:{Element.E2M1}" in call.flags:
        return Refusal(reason="4-bit values are emulated by the reference only")
    return serves_triton(call)


def serves_gated_cast(call: KernelCall) -> Refusal | None:
    """Refuse scales of squares too."""
    if f"scaling:{Scaling.SQUARE}" in call.flags:
        return Refusal(reason="only weights have scales of squares")
    return serves_cast(call)


def serves_gemm(call: KernelCall) -> Refusal | None:
    """As `serves_cast`, of operands in 8 bits."""
    return serves_cast(replace(call, dtypes=()))


ROUTES = {"fp8_cast": {"reference": Route(reference), "triton": Route(_triton, serves=serves_cast)}}
