"""Calls of training kernels with the shapes of a model, which `bench kernels` times, and their work.

N tokens of one sequence, D hidden, F feed-forward hidden, H query heads, G key/value heads, K width of a head, V
vocabulary, E experts, C choices of a token, M = N C rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.adamw import AdamStates, AdamWStep, adamw
from meshwright.kernels.attention.operation import attention
from meshwright.kernels.experts.grouped_gemm import grouped_gemm
from meshwright.kernels.experts.permutation import permute, unpermute
from meshwright.kernels.experts.router import route_tokens
from meshwright.kernels.fp8.casting import Both, cast_both
from meshwright.kernels.fp8.formats import CastForm, Element, Quantized, Scaling
from meshwright.kernels.fp8.gated_casting import cast_gated, cast_gated_gradients
from meshwright.kernels.fp8.gemm import scaled_gemm
from meshwright.kernels.fp8.grouped_gemm import ALIGNMENT, grouped_rows
from meshwright.kernels.gated_activation import gated_activation
from meshwright.kernels.linear_cross_entropy import linear_cross_entropy
from meshwright.kernels.rms_norm import add_rms_norm, rms_norm
from meshwright.kernels.rotary import rotate
from meshwright.records.points import ELEMENT_BYTES, Point, PointFamily
from meshwright.specs.model import AttentionKind, Experts, Model
from meshwright.training.models.experts import router_form
from meshwright.training.models.feed_forward import ACTIVATION_KINDS

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelCase:
    """One call: `run` takes `tensors`, the first `num_trained` of which have gradients (0: it has no backward pass).

    FLOPs and bytes are the least of the forward pass; a backward pass has `backward` times as many. `point`
    is the shape in records of devices; None: they have no such shape. `is_checked`: the error against float64
    is measured. It is not measured for operations on 8 bits (their format sets the error), for updates in
    place (they compute in fp32) and for the router (it may choose another expert in float64).
    """

    op: str
    model: str
    shape: str
    tensors: tuple[Tensor, ...]
    run: Callable[..., Tensor | tuple[Tensor, ...]]
    flops: float
    bytes: float
    num_trained: int = 0
    backward: float = 2.0
    point: Point | None = None
    is_checked: bool = True


@dataclass(frozen=True, kw_only=True)
class _Question:
    """The operation and the layer whose calls are wanted."""

    op: str
    model: Model
    tokens: int
    format: str
    device: torch.device

    @property
    def width(self) -> int:
        """Columns of the feed-forward block, or of an expert."""
        experts = self.model.experts
        return self.model.ffn_hidden or (experts.ffn_hidden if experts else self.model.hidden)

    @property
    def experts(self) -> Experts:
        """The experts of a model that has some: see `OF_EXPERTS`."""
        assert self.model.experts is not None
        return self.model.experts

    def random(self, *shape: int, format: str | None = None) -> Tensor:
        return torch.randn(*shape, dtype=DTYPES[format or self.format], device=self.device)

    def routed(self) -> tuple[Tensor, Tensor]:
        """Order of the rows of a balanced router, and the rows of each expert."""
        num_experts, top_k = self.experts.num_experts, self.experts.top_k
        flat_M = torch.rand(self.tokens, num_experts, device=self.device).topk(top_k, dim=1).indices.flatten()
        return flat_M.argsort(stable=True), torch.bincount(flat_M, minlength=num_experts)

    def case(self, shape: str, tensors: Sequence[Tensor], run: Callable[..., Any], **others: Any) -> KernelCase:
        """The call `run`; `others` are fields of the case, in which FLOPs that are not given are none."""
        common: dict[str, Any] = {"op": self.op, "model": self.model.name, "shape": shape, "flops": 0.0}
        return KernelCase(tensors=tuple(tensors), run=run, **common | others)


def cases_of(op: str, model: Model, *, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    """The calls of `op` in a layer of `model`; none where it has no such layer."""
    if op in MAKERS and not (op in OF_EXPERTS and model.experts is None):
        yield from MAKERS[op](_Question(op=op, model=model, tokens=tokens, format=format, device=device))


def _attention(q: _Question) -> Iterator[KernelCase]:
    a, tokens = q.model.attention, q.tokens
    value_dim, groups = a.v_dim, a.num_heads if a.kind is AttentionKind.MLA else a.num_kv_heads
    sizes = ((a.num_heads, a.head_dim), (groups, a.head_dim), (groups, value_dim))
    tensors = [q.random(1, tokens, heads, width) for heads, width in sizes]
    keys = (tokens + 1) / 2
    point = Point(
        family=PointFamily.ATTENTION, kernel="forward", head_dim=a.head_dim, format=q.format, sequences=1,
        heads=a.num_heads, kv_heads=groups, seq_len=tokens,
    )  # fmt: skip
    yield q.case(
        f"{tokens} tokens, {a.num_heads}/{groups} heads of {a.head_dim}",
        tensors, partial(attention, scale=a.head_dim**-0.5), num_trained=3, backward=2.5,
        flops=2.0 * tokens * keys * a.num_heads * (a.head_dim + value_dim),
        bytes=float(sum(t.nbytes for t in tensors) + tensors[0].nbytes * value_dim // a.head_dim),
        point=point if value_dim == a.head_dim else None,
    )  # fmt: skip


def _swiglu(q: _Question) -> Iterator[KernelCase]:
    tensors = [q.random(q.tokens, q.width) for _ in range(2)]
    point = Point(family=PointFamily.ELEMENTWISE, kernel="swiglu", format=q.format, m=q.tokens, n=q.width)
    yield q.case(
        f"{q.tokens} x {q.width}", tensors, gated_activation, num_trained=2, bytes=3.0 * tensors[0].nbytes,
        backward=5 / 3, point=point,
    )  # fmt: skip


def _rms_norm(q: _Question) -> Iterator[KernelCase]:
    hidden, options = q.model.hidden, {"epsilon": q.model.norm_epsilon}
    x, residual = (q.random(q.tokens, hidden) for _ in range(2))
    weight = torch.ones(hidden, dtype=x.dtype, device=q.device)
    shape = f"{q.tokens} x {hidden}"
    point = Point(family=PointFamily.ELEMENTWISE, kernel="rms_norm", format=q.format, m=q.tokens, n=hidden)
    yield q.case(
        shape, (x, weight), partial(rms_norm, **options), num_trained=2, bytes=2.0 * x.nbytes, backward=1.5, point=point
    )
    yield q.case(
        f"{shape}, with the addition before it", (x, residual, weight), partial(add_rms_norm, **options),
        num_trained=3, bytes=4.0 * x.nbytes, backward=1.0,
    )  # fmt: skip


def _rotary(q: _Question) -> Iterator[KernelCase]:
    a = q.model.attention
    width, groups = (a.rope_head_dim, 1) if a.kind is AttentionKind.MLA else (a.head_dim, a.num_kv_heads)
    queries, keys = (q.random(1, q.tokens, heads, width) for heads in (a.num_heads, groups))
    angles = torch.rand(1, q.tokens, 1, width // 2, device=q.device)
    yield q.case(
        f"{q.tokens} tokens, {a.num_heads} and {groups} heads of {width}",
        (queries, keys, angles.cos(), angles.sin()), rotate, num_trained=2,
        bytes=2.0 * (queries.nbytes + keys.nbytes), backward=1.0,
    )  # fmt: skip


def _adamw(q: _Question) -> Iterator[KernelCase]:
    """Yield a clipped step of one matrix; `format` is the format of its states."""
    shape = (q.width, q.model.hidden)
    parameter, gradient = (q.random(*shape, format="fp32") for _ in range(2))
    first, second = (q.random(*shape).abs().flatten() for _ in range(2))
    step = AdamWStep(learning_rate=1e-6, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1, number=9)

    def run(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, scale: Tensor) -> Tensor:
        adamw(parameter, gradient, AdamStates(first=first, second=second), step, scale=scale)
        return parameter

    yield q.case(
        f"{shape[0]} x {shape[1]}, states in {q.format}",
        (parameter, gradient, first, second, torch.ones((), device=q.device)), run,
        bytes=float(2 * parameter.nbytes + gradient.nbytes + 2 * (first.nbytes + second.nbytes)), is_checked=False,
    )  # fmt: skip


def _linear_cross_entropy(q: _Question) -> Iterator[KernelCase]:
    hidden, vocab = q.model.hidden, q.model.vocab
    h, weight = q.random(q.tokens, hidden), q.random(vocab, hidden) * hidden**-0.5
    labels = torch.randint(vocab, (q.tokens,), device=q.device)
    yield q.case(
        f"{q.tokens} x {hidden}, vocabulary {vocab}", (h, weight, labels), linear_cross_entropy, num_trained=2,
        flops=2.0 * q.tokens * hidden * vocab, bytes=float(h.nbytes + weight.nbytes),
    )  # fmt: skip


def _sizes_of_experts(q: _Question) -> tuple[tuple[int, int], ...]:
    """Rows and columns of the matrices of an expert: into it, and out of it."""
    return (q.experts.ffn_hidden, q.model.hidden), (q.model.hidden, q.experts.ffn_hidden)


def _grouped_gemm(q: _Question) -> Iterator[KernelCase]:
    spec, rows, counts = q.experts, q.tokens * q.experts.top_k, q.routed()[1]
    for n, k in _sizes_of_experts(q):
        x, weight = q.random(rows, k), q.random(spec.num_experts, n, k)
        yield q.case(
            f"{rows} x {k} by {spec.num_experts} of {n}", (x, weight, counts), grouped_gemm, num_trained=2,
            flops=2.0 * rows * n * k, bytes=float(x.nbytes + weight.nbytes + x.nbytes * n // k),
        )  # fmt: skip


def _in_rows(x: Tensor) -> Quantized:
    """`x` in E4M3 with scales of rows."""
    found, _ = cast_both(x, CastForm(element=Element.E4M3, scaling=Scaling.ROW, with_columns=False))
    assert found is not None
    return found


def _multiplied(
    q: _Question, shape: str, multiply: Callable[..., Tensor], *operands: Quantized, rows: int, n: int, k: int
) -> KernelCase:
    """The GEMM of two operands in 8 bits."""

    def run(*values: Tensor) -> Tensor:
        return multiply(*(replace(operand, values=own) for operand, own in zip(operands, values, strict=True)))

    num_bytes = sum(operand.num_bytes for operand in operands)
    return q.case(
        f"{shape}, scales of row", [operand.values for operand in operands], run, flops=2.0 * rows * n * k,
        bytes=float(num_bytes + ELEMENT_BYTES["bf16"] * rows * n), is_checked=False,
    )  # fmt: skip


def _fp8_grouped_gemm(q: _Question) -> Iterator[KernelCase]:
    counts = (q.routed()[1] + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    rows, num_experts = int(counts.sum()), q.experts.num_experts
    multiply = partial(grouped_rows, counts_E=counts, dtype=torch.bfloat16)
    for n, k in _sizes_of_experts(q):
        operands = _in_rows(q.random(rows, k)), _in_rows(q.random(num_experts, n, k))
        yield _multiplied(q, f"{rows} x {k} by {num_experts} of {n}", multiply, *operands, rows=rows, n=n, k=k)


def _router(q: _Question) -> Iterator[KernelCase]:
    spec, form = q.experts, router_form(q.experts)
    logits = q.random(q.tokens, spec.num_experts, format="fp32")
    bias = torch.zeros(spec.num_experts, device=q.device) if form.is_sigmoid else None

    def run(logits: Tensor) -> tuple[Tensor, ...]:
        routed = route_tokens(logits, bias, form=form)
        return routed.weights_NC, routed.scores_NE, routed.logsumexp_N

    yield q.case(
        f"{q.tokens} x {spec.num_experts}, {spec.top_k} choices", (logits,), run, num_trained=1,
        bytes=2.0 * logits.nbytes, backward=1.5, is_checked=False,
    )  # fmt: skip


def _permute(q: _Question) -> Iterator[KernelCase]:
    top_k, (order, _) = q.experts.top_k, q.routed()
    x = q.random(q.tokens, q.model.hidden)
    yield q.case(
        f"{q.tokens} x {q.model.hidden}, {top_k} choices", (x, order), partial(permute, top_k=top_k), num_trained=1,
        bytes=float(x.nbytes * (1 + top_k)), backward=1.0,
    )  # fmt: skip


def _unpermute(q: _Question) -> Iterator[KernelCase]:
    top_k, (order, _) = q.experts.top_k, q.routed()
    rows = q.random(q.tokens * top_k, q.model.hidden)
    weights = torch.rand(q.tokens, top_k, device=q.device)

    def run(rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        return unpermute(rows, order, weights)

    yield q.case(
        f"{q.tokens} x {q.model.hidden}, {top_k} choices", (rows, weights, order), run, num_trained=2,
        bytes=float(rows.nbytes * (1 + 1 / top_k)), backward=2.0,
    )  # fmt: skip


def _casts(
    q: _Question, shape: str, tensors: Sequence[Tensor], cast: Callable[..., Iterable[Quantized | None]], *,
    num_bytes: int, last: Scaling = Scaling.BLOCK,
) -> Iterator[KernelCase]:  # fmt: skip
    """The calls of `cast(*tensors, scaling)` with each kind of scales, the `last` of which has groups.

    `num_bytes` are the bytes that are written.
    """
    for scaling in (Scaling.TENSOR, Scaling.ROW, last):

        def run(*given: Tensor, scaling: Scaling = scaling) -> tuple[Tensor, ...]:
            return tuple(side.values for side in cast(*given, scaling) if side is not None)

        yield q.case(
            f"{shape}, scales of {scaling}", tensors, run, is_checked=False,
            bytes=float(sum(t.nbytes for t in tensors) + num_bytes),
        )  # fmt: skip


def _fp8_cast(q: _Question) -> Iterator[KernelCase]:
    """The input of a layer, and one of its stacks of weights of experts, in one launch.

    Blocks of 128 x 128 are the scales of weights.
    """

    def cast(x: Tensor, scaling: Scaling) -> Both:
        return cast_both(x, CastForm(element=Element.E4M3, scaling=scaling))

    x = q.random(q.tokens, q.model.hidden)
    yield from _casts(q, f"{q.tokens} x {q.model.hidden}", (x,), cast, num_bytes=2 * x.numel())
    if q.model.experts is not None:
        sizes = q.experts.num_experts, q.experts.ffn_hidden, q.model.hidden
        weight, shape = q.random(*sizes), "{} experts of {} x {}".format(*sizes)
        yield from _casts(q, shape, (weight,), cast, num_bytes=2 * weight.numel(), last=Scaling.SQUARE)


def _fp8_gated_cast(q: _Question) -> Iterator[KernelCase]:
    """The activation in the format of a GEMM's input, both orientations."""
    tensors, kind = [q.random(q.tokens, q.width) for _ in range(2)], ACTIVATION_KINDS[q.model.activation]

    def cast(gate: Tensor, up: Tensor, scaling: Scaling) -> Both:
        return cast_gated(gate, up, kind=kind, form=CastForm(element=Element.E4M3, scaling=scaling))

    yield from _casts(q, f"{q.tokens} x {q.width}", tensors, cast, num_bytes=2 * tensors[0].numel())


def _fp8_gated_gradients(q: _Question) -> Iterator[KernelCase]:
    """The gradients of gate and up in the format of gradients, both orientations; sums where experts have biases."""
    tensors, kind = [q.random(q.tokens, q.width) for _ in range(3)], ACTIVATION_KINDS[q.model.activation]
    with_sums = q.model.experts is not None and q.model.experts.bias

    def cast(grad: Tensor, gate: Tensor, up: Tensor, scaling: Scaling) -> list[Quantized | None]:
        form = CastForm(element=Element.E5M2, scaling=scaling)
        found = cast_gated_gradients(grad, gate, up, kind=kind, form=form, with_sums=with_sums)
        return [side for one in found for side in one.both]

    yield from _casts(q, f"{q.tokens} x {q.width}", tensors, cast, num_bytes=4 * tensors[0].numel())


def _fp8_gemm(q: _Question) -> Iterator[KernelCase]:
    hidden, width = q.model.hidden, q.model.ffn_hidden or q.model.hidden
    a, b = (_in_rows(q.random(rows, hidden)) for rows in (q.tokens, width))
    yield _multiplied(q, f"{q.tokens} x {hidden} by {width}", scaled_gemm, a, b, rows=q.tokens, n=width, k=hidden)


MAKERS = {
    make.__name__.removeprefix("_"): make
    for make in (
        _linear_cross_entropy, _swiglu, _rms_norm, _rotary, _adamw, _attention, _grouped_gemm, _router, _permute,
        _unpermute, _fp8_cast, _fp8_gated_cast, _fp8_gated_gradients, _fp8_gemm, _fp8_grouped_gemm,
    )
}  # fmt: skip
"""The calls of each operation that is timed."""
OF_EXPERTS = ("grouped_gemm", "router", "permute", "unpermute", "fp8_grouped_gemm")
"""Operations that only a mixture of experts has."""
EIGHT_BITS = ("fp8_cast", "fp8_gated_cast", "fp8_gated_gradients", "fp8_gemm", "fp8_grouped_gemm")
"""Operations that a CPU only emulates: they are timed there when they are asked for."""
