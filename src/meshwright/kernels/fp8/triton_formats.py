"""Refuse formats that the Triton kernels of this folder do not serve; the reference emulates them."""

from __future__ import annotations

from dataclasses import replace

from meshwright.kernels.fp8.formats import Element, Scaling
from meshwright.kernels.routes import KernelCall, Refusal
from meshwright.kernels.triton_route import serves_triton


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
