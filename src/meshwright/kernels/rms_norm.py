"""RMSNorm (Zhang and Sennrich 2019), with the addition to the residual stream before it.

    s = x + r                      where a residual r is given, rounded to the format of x
    y = w s / rms(s)               or (1 + w) s / rms(s) where norms are centered at zero;  rms(s) = √(mean s² + ε)

    x̂ = s / rms(s)      g = w dy      d s = (g - x̂ mean(x̂ g)) / rms(s) + (d s from behind)      d w = Σ_n dy x̂

N rows, D columns.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from meshwright.errors import InputError
from meshwright.kernels import liger
from meshwright.kernels.dispatch import choose
from meshwright.kernels.routes import KernelCall, Refusal, Route
from meshwright.kernels.shapes import require_alike
from meshwright.kernels.triton_route import serves_triton

LIGER_WIDEST = 65536

_FLAGS = {False: frozenset(), True: frozenset({"zero_centered"})}


def rms_norm(x: Tensor, weight_D: Tensor, *, epsilon: float, zero_centered: bool = False) -> Tensor:
    """The norm over the last dimension, as `x`."""
    _require_width(x, weight_D)
    route = choose("rms_norm", x, weight_D, flags=_FLAGS[zero_centered])
    return ROUTES["rms_norm"][route].function(x, weight_D, None, epsilon, zero_centered)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight_D: Tensor, *, epsilon: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and x + residual."""
    _require_width(x, weight_D)
    require_alike("rms_norm", x=x, residual=residual)
    route = choose("rms_norm", x, residual, weight_D, flags=_FLAGS[zero_centered])
    return ROUTES["rms_norm"][route].function(x, weight_D, residual, epsilon, zero_centered)


def _require_width(x: Tensor, weight_D: Tensor) -> None:
    if x.shape[-1:] != weight_D.shape:
        raise InputError("rms_norm: a weight of another width", got=tuple(weight_D.shape), allowed=tuple(x.shape[-1:]))


def reference(
    x: Tensor, weight_D: Tensor, residual: Tensor | None, epsilon: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """The specification."""
    total = x if residual is None else x + residual
    if not zero_centered:
        return functional.rms_norm(total, weight_D.shape, weight_D, epsilon), total
    weight_D = 1 + weight_D.float()  # in bf16 the sum would lose what training changes
    return functional.rms_norm(total.float(), weight_D.shape, weight_D, epsilon).to(total.dtype), total


def _triton(
    x: Tensor, weight_D: Tensor, residual: Tensor | None, epsilon: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    from meshwright.kernels.rms_norm_triton import norm, norm_of_sum

    if residual is None:
        return norm(x, weight_D, epsilon, zero_centered)[0], x
    normed, total, _ = norm_of_sum(x, residual, weight_D, epsilon, zero_centered)
    return normed, total


def _serves_liger(call: KernelCall) -> Refusal | None:
    if call.has_shapes and call.shapes[-1][0] > LIGER_WIDEST:
        return Refusal(reason=f"rows of more than {LIGER_WIDEST:,} columns")
    return liger.serves(call)


ROUTES = {
    "rms_norm": {
        "reference": Route(reference),
        "triton": Route(_triton, serves=serves_triton),
        "liger": Route(liger.rms_norm, serves=_serves_liger),
    }
}
