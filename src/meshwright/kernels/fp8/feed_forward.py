"""A gated feed-forward block in 8 bits, dense or of experts, whose hidden values are never written in 16 bits.

    forward    q(x) once for both; g = q(x) q(Wg)ᵀ, u = q(x) q(Wu)ᵀ; q(f(g) u) in one pass; y = q(f(g) u) q(Wd)ᵀ
    backward   dh = q(dy) q(Wd); q(dg), q(du) in one pass from dh, g and u; dx = q(dg) q(Wg) + q(du) q(Wu)
               dWd = q(dy)ᵀ q(f(g) u), dWg = q(dg)ᵀ q(x), dWu = q(du)ᵀ q(x)

The results equal three layers (`layer.fp8_linear`) with the activation between them, to the bit. The backward
pass keeps q(x), g, u (16 bits) and q(f(g) u); `drops_hidden` casts the last again from g and u.

Gate and up have biases for experts only, [E, F]. The pass that casts sums their gradients by 128 rows, in fp32.

M rows (P with the rows of zeros between experts), D inputs, F hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.kernels.fp8.aligned_rows import AlignedRows
from meshwright.kernels.fp8.gated_casting import SUMMED_ROWS, cast_gated, cast_gated_gradients
from meshwright.kernels.fp8.layer import GRADIENT, INPUT, Fp8State, by_columns, by_rows, keep, kept
from meshwright.kernels.operators import only_once

GATE, UP, DOWN = MATRICES = ("gate", "up", "down")


@dataclass(frozen=True, kw_only=True, eq=False)
class Fp8Block:
    """The activation (a kind of `gated_activation`), the states of `MATRICES`, and the rows of experts, if any."""

    kind: str
    states: Mapping[str, Fp8State]
    aligned: AlignedRows | None = None
    drops_hidden: bool = False

    @property
    def counts(self) -> Tensor | None:
        """Rows of each expert."""
        return None if self.aligned is None else self.aligned.counts_E


def fp8_feed_forward(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, block: Fp8Block,
    gate_bias: Tensor | None = None, up_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """down(f(gate x) up x) in the format of `x`, [..., D]. Weights are [F, D] and [D, F], of experts stacks of them."""
    for state in block.states.values():
        state.is_training = torch.is_grad_enabled()
    out_MD = _Fp8FeedForward.apply(x.reshape(-1, x.shape[-1]), gate, up, down, gate_bias, up_bias, block)
    return out_MD.view(*x.shape[:-1], out_MD.shape[-1])


class _Fp8FeedForward(Function):
    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, gate: Tensor, up: Tensor, down: Tensor, gate_bias: Tensor | None,
        up_bias: Tensor | None, block: Fp8Block,
    ) -> Tensor:  # fmt: skip
        needs, states, counts_E = _Needs(*ctx.needs_input_grad[:6]), block.states, block.counts
        x_rows, x_columns = states[GATE].cast(x_MD, of=INPUT, with_columns=needs.gate or needs.up)
        states[UP].share_input(states[GATE])
        hidden, weights = [], []
        for name, weight, bias_EF in ((GATE, gate, gate_bias), (UP, up, up_bias)):
            w_rows, w_columns = states[name].rows_of_weight(weight)
            out_MF = by_rows(x_rows, w_rows, counts_E, dtype=x_MD.dtype)
            hidden.append(out_MF if bias_EF is None else out_MF + _of_rows(bias_EF, block))
            weights.append((w_columns or weight) if needs.x else None)
        keeps_hidden = needs.down and not block.drops_hidden
        h_rows, h_columns = _cast_hidden(*hidden, block=block, with_columns=keeps_hidden)
        w_rows, w_columns = states[DOWN].rows_of_weight(down)
        weights.append((w_columns or down) if needs.hidden else None)
        ctx.block, ctx.dtypes = (block, {name: w.dtype for name, w in zip(MATRICES, (gate, up, down), strict=True)})
        keep(ctx, x_columns, *(hidden if needs.hidden or needs.down else (None, None)), h_columns, *weights)
        return by_rows(h_rows, w_rows, counts_E, dtype=x_MD.dtype)

    @staticmethod
    @only_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_columns, gate_MF, up_MF, h_columns, *weights = kept(ctx)
        needs, block = _Needs(*ctx.needs_input_grad[:6]), ctx.block
        states, counts_E, dtype = block.states, block.counts, grads[0].dtype
        found: dict[str, Tensor] = {}
        rows, columns = states[DOWN].cast(grads[0], of=GRADIENT, with_rows=needs.hidden, with_columns=needs.down)
        if needs.down:
            if h_columns is None:
                _, h_columns = _cast_hidden(gate_MF, up_MF, block=block, with_rows=False)
            found[DOWN] = by_columns(columns, h_columns, counts_E, dtype=ctx.dtypes[DOWN])
        if not needs.hidden:
            return None, None, None, found.get(DOWN), None, None, None
        grad_MF = by_rows(rows, states[DOWN].columns_of_weight(weights[2]), counts_E, dtype=dtype)
        gate, up = block.states[GATE], block.states[UP]
        form = gate.form(GRADIENT, grad_MF.device, with_rows=needs.x, with_columns=needs.gate or needs.up)
        of_gate, of_up = gate.delayed(GRADIENT), up.delayed(GRADIENT)
        amax = None if of_gate is None or of_up is None else (of_gate, of_up)
        cast = cast_gated_gradients(
            grad_MF, gate_MF, up_MF, kind=block.kind, form=form, amax=amax, with_sums=needs.biases
        )
        inputs = []
        for name, gradient, weight in zip((GATE, UP), cast, weights[:2], strict=True):
            rows, columns = gradient.both
            if needs.x:
                inputs.append(by_rows(rows, states[name].columns_of_weight(weight), counts_E, dtype=dtype))
            if getattr(needs, name):
                found[name] = by_columns(columns, x_columns, counts_E, dtype=ctx.dtypes[name])
            if gradient.sums is not None:
                found[f"{name}_bias"] = _of_experts(gradient.sums, block).to(dtype)
        return (
            inputs[0] + inputs[1] if inputs else None, found.get(GATE), found.get(UP), found.get(DOWN),
            found.get("gate_bias"), found.get("up_bias"), None,
        )  # fmt: skip


@dataclass(frozen=True)
class _Needs:
    """Inputs whose gradients are wanted."""

    x: bool
    gate: bool
    up: bool
    down: bool
    gate_bias: bool
    up_bias: bool

    @property
    def hidden(self) -> bool:
        """Return True if the gradients of gate's and up's results are wanted."""
        return self.x or self.gate or self.up or self.biases

    @property
    def biases(self) -> bool:
        return self.gate_bias or self.up_bias


def _cast_hidden(gate_MF: Tensor, up_MF: Tensor, *, block: Fp8Block, **sides: bool) -> tuple[Any, Any]:
    """f(gate) up as the input of the last matrix."""
    state = block.states[DOWN]
    form = state.form(INPUT, gate_MF.device, **sides)
    return cast_gated(gate_MF, up_MF, kind=block.kind, form=form, amax=state.delayed(INPUT))


def _of_rows(bias_EF: Tensor, block: Fp8Block) -> Tensor:
    assert block.aligned is not None
    return block.aligned.of_rows(bias_EF)


def _of_experts(sums_SF: Tensor, block: Fp8Block) -> Tensor:
    """Sums by 128 rows, added for each expert [E, F]. A GEMM with zeros and ones has a fixed order."""
    assert block.aligned is not None
    expert_S = block.aligned.expert_P[::SUMMED_ROWS]
    experts_E = torch.arange(len(block.aligned.counts_E), device=expert_S.device)
    return (expert_S == experts_E.unsqueeze(1)).to(sums_SF.dtype) @ sums_SF
