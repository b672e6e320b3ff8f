"""AdamW (Loshchilov and Hutter 2019) in one pass over a tensor, with optimizer states in fp32, bf16 or 8 bits.

    g = s × gradient                                      s: scale of clipping, on the device
    m = β1 m + (1 - β1) g        v = β2 v + (1 - β2) g²
    p = p (1 - η λ) - η / (1 - β1^t) × m / (√(v / (1 - β2^t)) + ε)

`gradient_squares` reads every gradient once. The scale of clipping goes into the update: no pass of its own.

Narrow states are decoded, updated in fp32 and encoded in registers. bf16: m is rounded to the nearest, v
stochastically. 8 bits: a byte is an index of a rising table, times the scale of its block; the roots of v are kept;
both are rounded stochastically. `training.optimizer_states` has the formats and the same update in chunks of PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.kernels.dispatch import choose
from meshwright.kernels.routes import KernelCall, Refusal, Route
from meshwright.kernels.triton_route import serves_triton

BLOCK = 256
"""Values that share a scale in 8 bits (`specs.precision.STATE_BLOCK`)."""

SMALLEST = 2.0**-38
"""The least scale of a block. Below it the square of the table's smallest value would not be a normal fp32 number,
and a state would not survive a checkpoint unchanged."""


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """Settings of one step; `number` counts from 1. `noise` is a number from which the rounding's noise follows."""

    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    number: int = 1
    noise: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ByteTables:
    """Tables of a state in 8 bits: the scale of each block, the values of codes, and for each upper 16
    bits of a fp32 number the code at or below the least number that has them."""

    scales: Tensor
    values: Tensor
    first: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AdamStates:
    """Both states of a tensor, flat. States in 8 bits have `tables`. `start` is the tensor's place among
    tensors that share a space: the noise of a value follows from its place."""

    first: Tensor
    second: Tensor
    tables: tuple[ByteTables, ByteTables] | None = None
    start: int = 0


def adamw(
    parameter: Tensor, gradient: Tensor, states: AdamStates, step: AdamWStep, *, scale: Tensor | None = None
) -> None:
    """Update `parameter` (fp32) and `states` in place. `scale` is a scalar on the device; None: 1.

    A route may leave the scaled gradient in `gradient`.
    """
    sizes = (gradient.numel(), states.first.numel(), states.second.numel())
    if any(size != parameter.numel() for size in sizes):
        raise InputError("adamw: gradient or states belong to another tensor", got=sizes, allowed=parameter.numel())
    route = choose("adamw", parameter, gradient, states.first)
    ROUTES["adamw"][route].function(parameter, gradient, states, step, scale)


def reference(parameter: Tensor, gradient: Tensor, states: AdamStates, step: AdamWStep, scale: Tensor | None) -> None:
    """The specification. Narrow states are rounded to the nearest."""
    beta1, beta2 = step.betas
    gradient = gradient.float().flatten() * (1.0 if scale is None else scale)
    if states.tables is None:
        first, second = states.first.float(), states.second.float()
    else:
        first = _decoded(states.first, states.tables[0])
        second = _decoded(states.second, states.tables[1]).square()
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient.square()
    denominator = (second / (1 - beta2**step.number)).sqrt() + step.epsilon
    moved = step.learning_rate / (1 - beta1**step.number) * first / denominator
    kept = parameter.flatten() * (1 - step.learning_rate * step.weight_decay)
    parameter.copy_((kept - moved).view_as(parameter))
    if states.tables is None:
        states.first.copy_(first)
        states.second.copy_(second)
    else:
        _encode(states.first, first, states.tables[0])
        _encode(states.second, second.sqrt(), states.tables[1])


def _decoded(codes: Tensor, tables: ByteTables) -> Tensor:
    return tables.values[codes.long()] * tables.scales.repeat_interleave(BLOCK)[: len(codes)]


def _encode(codes: Tensor, values: Tensor, tables: ByteTables) -> None:
    """Nearest codes of `values`, with the largest of each block as its scale. A positive root gets no code of 0."""
    padded = torch.zeros(len(tables.scales) * BLOCK, device=values.device)
    padded[: len(values)] = values
    tables.scales.copy_(padded.view(-1, BLOCK).abs().amax(dim=1).clamp(min=SMALLEST))
    ratios = values / tables.scales.repeat_interleave(BLOCK)[: len(values)]
    found = torch.searchsorted((tables.values[1:] + tables.values[:-1]) / 2, ratios)
    if tables.values[0] == 0:
        found = torch.maximum(found, (values > 0).long())
    codes.copy_(found)


def _fused(parameter: Tensor, gradient: Tensor, states: AdamStates, step: AdamWStep, scale: Tensor | None) -> None:
    number = torch.tensor(float(step.number), device=parameter.device)
    both = [states.first.view_as(parameter)], [states.second.view_as(parameter)]
    fused_adamw([parameter], [gradient], *both, [number], step, scale=scale)


def fused_adamw(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    numbers: list[Tensor],
    step: AdamWStep,
    *,
    scale: Tensor | None,
) -> None:
    """Update all `parameters` and their states, fp32, in place: the kernel behind `torch.optim.AdamW(fused=True)`.

    `numbers` are the steps of each, fp32 scalars on the device, in place of `step.number`. The kernel divides the
    gradients by the reciprocal of `scale`, and leaves them divided.
    """
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        parameters, gradients, first, second, [], numbers,
        lr=step.learning_rate, beta1=step.betas[0], beta2=step.betas[1], weight_decay=step.weight_decay,
        eps=step.epsilon, amsgrad=False, maximize=False, grad_scale=None if scale is None else scale.reciprocal(),
    )  # fmt: skip


def _triton(parameter: Tensor, gradient: Tensor, states: AdamStates, step: AdamWStep, scale: Tensor | None) -> None:
    from meshwright.kernels.adamw_triton import update

    update(parameter, gradient, states, step, scale)


def _fused_serves(call: KernelCall) -> Refusal | None:
    if not call.shapes:
        return Refusal(reason="PyTorch cannot trace its update in place")
    if call.has_shapes and set(call.dtypes) != {"float32"}:
        return Refusal(reason="PyTorch's fused AdamW has states in fp32 alone")
    return None


def _triton_serves(call: KernelCall) -> Refusal | None:
    if call.has_shapes and call.dtypes[0] != "float32":
        return Refusal(reason="masters are fp32")
    return serves_triton(call)


def gradient_squares(gradients: Sequence[Tensor], *, copies: Sequence[int]) -> Tensor:
    """Σ ‖g‖² / copies of g, fp32 scalar on their device; PyTorch reads all gradients in one kernel.

    `copies` are processes that hold the same gradient: over all of them the sum is ‖all gradients‖².
    """
    if not gradients:
        return torch.zeros(())
    norms: Any = torch._foreach_norm(list(gradients))  # pyright: ignore[reportPrivateImportUsage]
    squares = torch.stack(norms).float().square()
    if any(count != 1 for count in copies):
        squares = squares / torch.tensor(copies, device=squares.device)
    return squares.sum()


def clip_scale(norm: float, limit: float | None) -> float | None:
    """The scale that makes a gradient of `norm` no longer than `limit`; None where it is not longer.

    >>> round(clip_scale(4.0, 1.0), 6), clip_scale(0.5, 1.0), clip_scale(4.0, None)
    (0.25, None, None)
    """
    return limit / (norm + 1e-6) if limit is not None and norm > limit else None


ROUTES = {
    "adamw": {
        "reference": Route(reference),
        "fused": Route(_fused, serves=_fused_serves),
        "triton": Route(_triton, serves=_triton_serves),
    }
}
