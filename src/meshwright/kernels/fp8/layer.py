"""The three GEMMs of a linear layer in 8 bits, and the cache of its quantised weight.

    Y = q(X) q(W)^T        dX = q(dY) q(W)        dW = q(dY)^T q(X)

Each operand is cast along the dimension that its GEMM sums over, so X, W and dY are cast twice, each by one pass over
16 bits (`triton_cast`). X is kept for the backward pass in 8 bits only.

Weights change once a step and are multiplied in each of its micro-batches. The cache casts them once a step,
for 2 bytes and their scales a weight: both orientations (`cache_bytes`). Without the cache every forward and
every backward pass casts them, and nothing is kept. `expire` begins a step; a weight that was changed in
place is cast again.

The weights of experts are a stack [E, N, K]: `fp8_grouped_linear` casts each of them as a matrix of its own, and the
rows of all experts as one. Rows and gradients of delayed scaling share a scale over all experts of a layer, as do the
matrices: its history does not depend on how experts are sharded.

A delayed scale is the same in all micro-batches of a step and in its recomputation. The step's largest
magnitudes join the history when the step is complete (`end_step`). A step that was not applied adds none
(`begin_step`). A tensor without history, or whose magnitude is not finite, is scaled by its own magnitude.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.kernels.architectures import architecture_of
from meshwright.kernels.fp8.casting import Both, cast_both
from meshwright.kernels.fp8.formats import CastForm, Element, Quantized, Scaling, group_amax, scales_shape
from meshwright.kernels.fp8.gated_casting import Amax
from meshwright.kernels.fp8.gemm import scaled_gemm
from meshwright.kernels.fp8.grouped_gemm import grouped_rows, grouped_weights
from meshwright.kernels.operators import only_once

HISTORY = 16
"""Steps whose largest magnitudes set a delayed scale (Transformer Engine: 1024 unless set)."""
INPUT, WEIGHT, GRADIENT = range(3)


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """Formats and scales of the casts. `history`: steps that a delayed scale looks back on; 0: the scale is current."""

    name: str
    scaling: Scaling
    weight_scaling: Scaling
    values: Element = Element.E4M3
    gradients: Element = Element.E4M3
    power_of_two: bool = False
    history: int = 0


def _recipe(name: str, scaling: Scaling, **changes: Any) -> Fp8Recipe:
    return replace(Fp8Recipe(name=name, scaling=scaling, weight_scaling=scaling), **changes)


RECIPES: Mapping[str, Fp8Recipe] = {
    recipe.name: recipe
    for recipe in (
        _recipe("fp8", Scaling.TENSOR, gradients=Element.E5M2),
        _recipe("fp8_delayed", Scaling.TENSOR, gradients=Element.E5M2, history=HISTORY),
        _recipe("fp8_rowwise", Scaling.ROW, power_of_two=True),
        _recipe("fp8_blockwise", Scaling.BLOCK, weight_scaling=Scaling.SQUARE),
        _recipe("mxfp8", Scaling.MX),
        _recipe("mxfp4", Scaling.MX, values=Element.E2M1, gradients=Element.E2M1),
    )
}
_FNUZ = {Element.E4M3: Element.E4M3_FNUZ, Element.E5M2: Element.E5M2_FNUZ}


class Fp8State:
    """State of a layer between calls: its cached weight, and the history of delayed scales.

    `caches_weight`: keep the cast weight until `expire`. Delayed scaling has the largest magnitudes of input,
    weight and gradient: `amax_history_3H` in the last steps, the newest first, `amax_3` in this step so far.
    """

    def __init__(self, recipe: Fp8Recipe, *, caches_weight: bool = False) -> None:
        self.recipe = recipe
        self.caches_weight = caches_weight
        self.amax_history_3H: Tensor | None = None
        self.amax_3: Tensor | None = None
        self._cached: Both | None = None
        self._key: tuple[int, int] | None = None
        self.is_training = True  # False in evaluation: its magnitudes join no history

    def expire(self) -> None:
        """Forget the cached weight: it has changed, or will."""
        self._cached = self._key = None

    def allocate(self, device: torch.device) -> None:
        """Allocate the history of delayed scales, 0: no magnitude yet. Other recipes have no history."""
        if self.recipe.history and self.amax_history_3H is None:
            self.amax_history_3H = torch.zeros(3, self.recipe.history, device=device)
            self.amax_3 = torch.zeros(3, device=device)

    def begin_step(self) -> None:
        """Forget the largest magnitudes of a step that was not applied, and a weight whose own was not counted."""
        if self.amax_3 is not None:
            self.amax_3.zero_()
            self.expire()

    def end_step(self) -> None:
        """Move the largest magnitudes of this step into the history. A magnitude that is not finite becomes 0."""
        if self.amax_3 is not None and self.amax_history_3H is not None:
            newest_3 = torch.where(torch.isfinite(self.amax_3), self.amax_3, 0.0)
            self.amax_history_3H.copy_(torch.cat([newest_3.unsqueeze(1), self.amax_history_3H[:, :-1]], dim=1))
            self.amax_3.zero_()

    @property
    def num_bytes(self) -> int:
        """Bytes that the cache holds now."""
        return sum(side.num_bytes for side in self._cached or () if side is not None)

    def fill(self, weight_NK: Tensor) -> None:
        """Cast the weight that the cache lacks: ahead of a compiled pass, which only reads it."""
        if self.caches_weight:
            self.is_training = torch.is_grad_enabled()
            self.weight(weight_NK.detach())

    def weight(self, weight_NK: Tensor) -> Both:
        """Return the cast weight and its transpose, from the cache if it is kept; experts have a stack."""
        if torch.compiler.is_compiling() and self._cached is not None:
            return self._cached  # addresses and versions are not there to be traced: see `fill`
        key = (weight_NK.data_ptr(), weight_NK._version)
        if self._cached is None or (self._key is not None and self._key[0] == key[0] and self._key != key):
            both = self.cast(weight_NK, of=WEIGHT)
            if not self.caches_weight:
                return both
            self._cached, self._key = both, key
        return self._cached

    def cast(self, x_MK: Tensor, *, of: int, with_rows: bool = True, with_columns: bool = True) -> Both:
        """Cast an input, weight or gradient as the recipe has it; a stack [E, N, K] matrix by matrix."""
        form = self.form(of, x_MK.device, with_rows=with_rows, with_columns=with_columns)
        amax = self.delayed(of)
        return cast_both(x_MK, form, amax=amax and amax(group_amax(x_MK.flatten(0, -2), Scaling.TENSOR).float()))

    def form(self, of: int, device: torch.device, *, with_rows: bool = True, with_columns: bool = True) -> CastForm:
        """The recipe's cast of an input, weight or gradient."""
        recipe = self.recipe
        return CastForm(
            element=_of_device(recipe.gradients if of == GRADIENT else recipe.values, device),
            scaling=recipe.weight_scaling if of == WEIGHT else recipe.scaling,
            power_of_two=recipe.power_of_two,
            with_rows=with_rows,
            with_columns=with_columns,
        )

    def delayed(self, of: int) -> Amax | None:
        """The choice of a delayed scale; None for recipes of current ones."""
        return partial(self._delayed_amax, of=of) if self.recipe.history else None

    @torch.no_grad()
    def _delayed_amax(self, present: Tensor, *, of: int) -> Tensor:
        """The largest magnitude of the last steps [1, 1]. Counts the present one if the pass trains."""
        self.allocate(present.device)
        assert self.amax_3 is not None
        assert self.amax_history_3H is not None
        if self.is_training:
            self.amax_3[of] = torch.maximum(self.amax_3[of], present.view(()))
        known = self.amax_history_3H[of].max().view(1, 1)
        return torch.where((known > 0) & torch.isfinite(present), known, present)

    @torch.no_grad()
    def share_input(self, other: Fp8State) -> None:
        """Count the input of `other`, which is cast once for both, as its own."""
        if other.amax_3 is not None:
            self.allocate(other.amax_3.device)
            assert self.amax_3 is not None
            self.amax_3[INPUT] = other.amax_3[INPUT]

    def rows_of_weight(self, weight_NK: Tensor) -> tuple[Any, Any]:
        """The cast weight by rows, and its transpose where that is in the cache."""
        if self.caches_weight:
            return self.weight(weight_NK)
        return self.cast(weight_NK, of=WEIGHT, with_columns=False)

    def columns_of_weight(self, kept: Any) -> Any:
        """Return the cast transposed weight, from the cache or cast from the weight."""
        if not isinstance(kept, Tensor):
            return kept
        return self.cast(kept, of=WEIGHT, with_rows=False)[1]


def cache_bytes(shape: tuple[int, int], recipe: Fp8Recipe) -> int:
    """Bytes of a cached weight of this shape: values and scales of both orientations.

    >>> cache_bytes((4096, 4096), RECIPES["fp8_blockwise"]) / 4096**2
    2.00048828125
    """
    scale = 1 if recipe.weight_scaling is Scaling.MX else 4
    total = 0
    for rows, columns in (shape, shape[::-1]):
        scales = scales_shape(recipe.weight_scaling, rows=rows, columns=columns)
        width = -(-columns // 2) if recipe.values is Element.E2M1 else columns
        total += rows * width + scale * scales[0] * scales[1]
    return total


def fp8_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, state: Fp8State) -> Tensor:
    """x Wᵀ + b by the recipe of `state`, [..., N] in the format of `x`."""
    state.is_training = torch.is_grad_enabled()
    out_MN = _Fp8Linear.apply(x.reshape(-1, x.shape[-1]), weight_NK, state, None)
    out = out_MN.view(*x.shape[:-1], out_MN.shape[-1])
    return out if bias_N is None else out + bias_N


def fp8_grouped_linear(x_PK: Tensor, weight_ENK: Tensor, counts_E: Tensor, *, state: Fp8State) -> Tensor:
    """Each row times the matrix of its expert, [P, N]; rows are aligned as `grouped_gemm` wants them."""
    state.is_training = torch.is_grad_enabled()
    return _Fp8Linear.apply(x_PK, weight_ENK, state, counts_E)


class _Fp8Linear(Function):
    """A linear layer, or the layers of experts, whose numbers of rows are `counts_E`."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, state: Fp8State, counts_E: Tensor | None) -> Tensor:
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        x_rows, x_columns = state.cast(x_MK, of=INPUT, with_columns=wants_weight)
        w_rows, w_columns = state.rows_of_weight(weight_NK)
        ctx.state, ctx.weight_dtype = state, weight_NK.dtype
        keep(ctx, counts_E, x_columns, (w_columns or weight_NK) if wants_x else None)
        return by_rows(x_rows, w_rows, counts_E, dtype=x_MK.dtype)

    @staticmethod
    @only_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        counts_E, x_columns, weight = kept(ctx)
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        state, grad_x, grad_weight = ctx.state, None, None
        rows, columns = state.cast(grads[0], of=GRADIENT, with_rows=wants_x, with_columns=wants_weight)
        if wants_x:
            grad_x = by_rows(rows, state.columns_of_weight(weight), counts_E, dtype=grads[0].dtype)
        if wants_weight:
            grad_weight = by_columns(columns, x_columns, counts_E, dtype=ctx.weight_dtype)
        return grad_x, grad_weight, None, None


def by_rows(x: Any, weight: Any, counts_E: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    """x Wᵀ, or of each row with the matrix of its expert."""
    if counts_E is None:
        return scaled_gemm(x, weight, dtype=dtype)
    return grouped_rows(x, weight, counts_E, dtype=dtype)


def by_columns(grad: Any, x: Any, counts_E: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    """The gradient of the weight, or of each expert's."""
    if counts_E is None:
        return scaled_gemm(grad, x, dtype=dtype)
    return grouped_weights(grad, x, counts_E, dtype=dtype)


def keep(ctx: Any, *items: Tensor | Quantized | None) -> None:
    """Keep tensors and quantised matrices for the backward pass, for `kept` in the same order."""
    tensors: list[Tensor | None] = []
    ctx.makers = []
    for item in items:
        if item is None or isinstance(item, Tensor):
            ctx.makers.append(None)
            tensors.append(item)
        else:
            ctx.makers.append(partial(_made, item.scales.dtype, replace(item, values=_NONE, scales=_NONE)))
            # Scales are kept as bytes: hooks that store activations in 8 bits leave those as they are. A traced pass
            # has no such hooks, and could not keep a view of the cache.
            scales = item.scales if torch.compiler.is_compiling() else item.scales.view(torch.uint8)
            tensors += [item.values, scales]
    ctx.save_for_backward(*tensors)


def kept(ctx: Any) -> list[Any]:
    """The tensors and casts that `keep` saved."""
    left = iter(ctx.saved_tensors)
    return [next(left) if make is None else make(next(left), next(left)) for make in ctx.makers]


_NONE = torch.empty(0)


def _made(dtype: torch.dtype, form: Quantized, values: Tensor, scales: Tensor) -> Any:
    return replace(form, values=values, scales=scales.view(dtype))


def _of_device(element: Element, device: torch.device) -> Element:
    """The format of the matrix units of `device`: MI300X's own one there."""
    return _FNUZ.get(element, element) if architecture_of(device) == "gfx942" else element
