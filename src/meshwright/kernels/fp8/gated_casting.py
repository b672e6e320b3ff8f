"""A gated activation cast to 8 bits, and its gradients: the routes of `fp8_gated_cast` and `fp8_gated_gradients`.

    y = f(gate) up                                  cast in both orientations, for the GEMM behind it
    d gate = dy f'(gate) up, d up = dy f(gate)      cast in both orientations, for the GEMMs before it

Every route rounds y and the gradients to the format of gate before it casts them: the results equal the
activation followed by `casting.cast_both`. Fusing them saves memory traffic, as no 16-bit tensor is written
in between.

M rows, K columns. `gated_activation` lists the kinds of f.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.kernels import gated_activation
from meshwright.kernels.dispatch import choose
from meshwright.kernels.fp8 import casting
from meshwright.kernels.fp8.casting import Both, both_of, serves_gated_cast
from meshwright.kernels.fp8.formats import CastForm, Scaling, group_amax
from meshwright.kernels.routes import Route
from meshwright.kernels.shapes import require_alike

SUMMED_ROWS = 128
"""Rows of a sum of gradients. They belong to one expert, whose rows are a multiple of this (`grouped_gemm`)."""

Amax = Callable[[Tensor], Tensor]
"""Function from a tensor's largest magnitude to the magnitude that scales it, both [1, 1] (delayed scaling)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CastGradient:
    """A gradient in both orientations, and its sums over `SUMMED_ROWS` rows each [ceil(M / 128), K] in fp32."""

    both: Both
    sums: Tensor | None


def cast_gated(gate_MK: Tensor, up_MK: Tensor, *, kind: str, form: CastForm, amax: Amax | None = None) -> Both:
    """Quantise f(gate) up and its transpose, each along its own rows. `amax` is for scales of tensors only."""
    require_alike("fp8_gated_cast", gate=gate_MK, up=up_MK)
    route = choose("fp8_gated_cast", gate_MK, up_MK, flags=_flags(kind, form))
    return ROUTES["fp8_gated_cast"][route].function(gate_MK, up_MK, kind=kind, form=form, amax=amax)


def cast_gated_gradients(
    grad_MK: Tensor,
    gate_MK: Tensor,
    up_MK: Tensor,
    *,
    kind: str,
    form: CastForm,
    amax: tuple[Amax, Amax] | None = None,
    with_sums: bool = False,
) -> tuple[CastGradient, CastGradient]:
    """Quantise the gradients of gate and up, as `cast_gated` quantises f(gate) up, whose gradient is `grad_MK`."""
    require_alike("fp8_gated_gradients", grad=grad_MK, gate=gate_MK, up=up_MK)
    route = choose("fp8_gated_gradients", grad_MK, gate_MK, up_MK, flags=_flags(kind, form))
    return ROUTES["fp8_gated_gradients"][route].function(
        grad_MK, gate_MK, up_MK, kind=kind, form=form, amax=amax, with_sums=with_sums
    )


def _flags(kind: str, form: CastForm) -> frozenset[str]:
    return frozenset({kind, f"element:{form.element}", f"scaling:{form.scaling}"})


def reference(gate_MK: Tensor, up_MK: Tensor, *, kind: str, form: CastForm, amax: Amax | None) -> Both:
    """The specification."""
    return _cast(gated_activation.reference(gate_MK, up_MK, kind=kind), form, amax)


def gradients_reference(
    grad_MK: Tensor,
    gate_MK: Tensor,
    up_MK: Tensor,
    *,
    kind: str,
    form: CastForm,
    amax: tuple[Amax, Amax] | None,
    with_sums: bool,
) -> tuple[CastGradient, CastGradient]:
    """The specification."""
    found = _gradients(grad_MK, gate_MK, up_MK, kind)
    gate, up = (
        CastGradient(both=_cast(x_MK, form, chosen), sums=_summed(x_MK) if with_sums else None)
        for x_MK, chosen in zip(found, amax or (None, None), strict=True)
    )
    return gate, up


def _gradients(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, with autograd's bits. Autograd itself cannot be traced by `torch.compile` here."""
    if kind == "silu":
        return torch.ops.aten.silu_backward(grad * up, gate), grad * functional.silu(gate)
    if kind in ("gelu", "gelu_tanh"):
        how = "tanh" if kind == "gelu_tanh" else "none"
        backward = torch.ops.aten.gelu_backward(grad * up, gate, approximate=how)
        return backward, grad * functional.gelu(gate, approximate=how)
    limit, sharpness = gated_activation.CLAMP, gated_activation.SHARPNESS
    low, near = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    sigmoid = torch.sigmoid(sharpness * low)
    inner = grad * (near + 1)
    outer = inner * sigmoid + torch.ops.aten.sigmoid_backward(inner * low, sigmoid) * sharpness
    return outer.where(gate <= limit, 0.0), (grad * (low * sigmoid)).where(up.abs() <= limit, 0.0)


def _cast(x_MK: Tensor, form: CastForm, amax: Amax | None) -> Both:
    return casting.reference(x_MK, form, amax and amax(group_amax(x_MK, Scaling.TENSOR).float()))


def _summed(x_MK: Tensor, *, num_rows: int = SUMMED_ROWS) -> Tensor:
    """Sums over `num_rows` rows each."""
    padded = functional.pad(x_MK.float(), (0, 0, 0, -len(x_MK) % num_rows))
    return padded.unflatten(0, (-1, num_rows)).sum(dim=1)


def _triton(gate_MK: Tensor, up_MK: Tensor, *, kind: str, form: CastForm, amax: Amax | None) -> Both:
    from meshwright.kernels.fp8 import triton_gated_cast as kernels
    from meshwright.kernels.fp8.triton_cast import largest_of

    scaled_by = amax and amax(largest_of(kernels.fp8_gated_amax(gate_MK, up_MK, kind)))
    how = (kind, form.element, form.scaling, form.power_of_two)
    return both_of(kernels.fp8_gated_cast(gate_MK, up_MK, *how, scaled_by, *form.sides), gate_MK, form)


def _gradients_triton(
    grad_MK: Tensor,
    gate_MK: Tensor,
    up_MK: Tensor,
    *,
    kind: str,
    form: CastForm,
    amax: tuple[Amax, Amax] | None,
    with_sums: bool,
) -> tuple[CastGradient, CastGradient]:
    from meshwright.kernels.fp8 import triton_gated_cast as kernels
    from meshwright.kernels.fp8.triton_cast import largest_of

    scaled_by: list[Tensor] = []
    if amax is not None:
        largest = kernels.fp8_gated_gradients_amax(grad_MK, gate_MK, up_MK, kind)
        scaled_by = [chosen(largest_of(own)) for chosen, own in zip(amax, (largest[:2], largest[2:]), strict=True)]
    how = (kind, form.element, form.scaling, form.power_of_two)
    found = kernels.fp8_gated_gradients(grad_MK, gate_MK, up_MK, *how, scaled_by, *form.sides, with_sums)
    rows_summed = kernels.tile_of(form.scaling).constants["R"]
    gate, up = (
        CastGradient(
            both=both_of(own[:4], gate_MK, form),
            sums=_summed(own[4], num_rows=SUMMED_ROWS // rows_summed) if with_sums else None,
        )
        for own in (found[:5], found[5:])
    )
    return gate, up


ROUTES = {
    "fp8_gated_cast": {"reference": Route(reference), "triton": Route(_triton, serves=serves_gated_cast)},
    "fp8_gated_gradients": {
        "reference": Route(gradients_reference),
        "triton": Route(_gradients_triton, serves=serves_gated_cast),
    },
}
