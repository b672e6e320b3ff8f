"""Calls of training kernels with the shapes of a model, which `bench kernels` times, and their work.

N tokens of one sequence, D hidden, F feed-forward hidden, H query heads, G key/value heads, K width of a head, V
vocabulary, E experts, C choices of a token, M = N C rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.adamw import AdamStates, AdamWStep, adamw
from meshwright.kernels.attention.operation import attention
from meshwright.kernels.cross_entropy import cross_entropy
from meshwright.kernels.experts.grouped_gemm import grouped_gemm
from meshwright.kernels.experts.permutation import permute, unpermute
from meshwright.kernels.experts.router import route_tokens
from meshwright.kernels.fp8.casting import cast_both
from meshwright.kernels.fp8.formats import Element, Quantized, Scaling
from meshwright.kernels.fp8.gated_casting import CastForm, cast_gated, cast_gated_gradients
from meshwright.kernels.fp8.gemm import scaled_gemm
from meshwright.kernels.fp8.grouped_gemm import ALIGNMENT, grouped_rows
from meshwright.kernels.gated_activation import gated_activation
from meshwright.kernels.linear_cross_entropy import linear_cross_entropy
from meshwright.kernels.rms_norm import add_rms_norm, rms_norm
from meshwright.kernels.rotary import rotate
from meshwright.records.points import ELEMENT_BYTES, Point, PointFamily
from meshwright.specs.model import AttentionKind, Model
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


def cases_of(op: str, model: Model, *, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    """The calls of `op` in a layer of `model`; none where it has no such layer."""
    maker = MAKERS.get(op)
    if maker is not None:
        yield from maker(model, tokens, format, device)


def _random(*shape: int, format: str, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=DTYPES[format], device=device)


def _attention(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    a, make = model.attention, partial(_random, format=format, device=device)
    value_dim, groups = a.v_dim, a.num_heads if a.kind is AttentionKind.MLA else a.num_kv_heads
    q, k = make(1, tokens, a.num_heads, a.head_dim), make(1, tokens, groups, a.head_dim)
    tensors = (q, k, make(1, tokens, groups, value_dim))
    keys = (tokens + 1) / 2
    common: dict[str, Any] = {
        "format": format,
        "sequences": 1,
        "heads": a.num_heads,
        "kv_heads": groups,
        "seq_len": tokens,
    }
    point = Point(family=PointFamily.ATTENTION, kernel="forward", head_dim=a.head_dim, **common)
    yield KernelCase(
        op="attention", model=model.name, shape=f"{tokens} tokens, {a.num_heads}/{groups} heads of {a.head_dim}",
        tensors=tensors, run=partial(attention, scale=a.head_dim**-0.5), num_trained=3, backward=2.5,
        flops=2.0 * tokens * keys * a.num_heads * (a.head_dim + value_dim),
        bytes=float(sum(t.nbytes for t in tensors) + tensors[0].nbytes * value_dim // a.head_dim),
        point=point if value_dim == a.head_dim else None,
    )  # fmt: skip


def _swiglu(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    width = _feed_forward_width(model)
    tensors = tuple(_random(tokens, width, format=format, device=device) for _ in range(2))
    yield KernelCase(
        op="swiglu", model=model.name, shape=f"{tokens} x {width}", tensors=tensors, run=gated_activation,
        num_trained=2, flops=0.0, bytes=3.0 * tensors[0].nbytes, backward=5 / 3,
        point=Point(family=PointFamily.ELEMENTWISE, kernel="swiglu", format=format, m=tokens, n=width),
    )  # fmt: skip


def _rms_norm(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    x, residual = (_random(tokens, model.hidden, format=format, device=device) for _ in range(2))
    weight = torch.ones(model.hidden, dtype=x.dtype, device=device)
    options = {"epsilon": model.norm_epsilon}
    common: dict[str, Any] = {"op": "rms_norm", "model": model.name, "flops": 0.0}
    yield KernelCase(
        shape=f"{tokens} x {model.hidden}", tensors=(x, weight), run=partial(rms_norm, **options), num_trained=2,
        bytes=2.0 * x.nbytes, backward=1.5,
        point=Point(family=PointFamily.ELEMENTWISE, kernel="rms_norm", format=format, m=tokens, n=model.hidden),
        **common,
    )  # fmt: skip
    yield KernelCase(
        shape=f"{tokens} x {model.hidden}, with the addition before it", tensors=(x, residual, weight),
        run=partial(add_rms_norm, **options), num_trained=3, bytes=4.0 * x.nbytes, backward=1.0, **common,
    )  # fmt: skip


def _rotary(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    a = model.attention
    width, groups = (a.rope_head_dim, 1) if a.kind is AttentionKind.MLA else (a.head_dim, a.num_kv_heads)
    make = partial(_random, format=format, device=device)
    q, k = make(1, tokens, a.num_heads, width), make(1, tokens, groups, width)
    angles = torch.rand(1, tokens, 1, width // 2, device=device)
    yield KernelCase(
        op="rotary", model=model.name, shape=f"{tokens} tokens, {a.num_heads} and {groups} heads of {width}",
        tensors=(q, k, angles.cos(), angles.sin()), run=rotate, num_trained=2, flops=0.0,
        bytes=2.0 * (q.nbytes + k.nbytes), backward=1.0,
    )  # fmt: skip


def _adamw(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    """Yield a clipped step of one matrix; `format` is the format of its states."""
    shape = (_feed_forward_width(model), model.hidden)
    make = partial(_random, *shape, device=device)
    parameter, gradient = make(format="fp32"), make(format="fp32")
    first, second = (make(format=format).abs().flatten() for _ in range(2))
    step = AdamWStep(learning_rate=1e-6, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1, number=9)

    def run(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, scale: Tensor) -> Tensor:
        adamw(parameter, gradient, AdamStates(first=first, second=second), step, scale=scale)
        return parameter

    yield KernelCase(
        op="adamw", model=model.name, shape=f"{shape[0]} x {shape[1]}, states in {format}", run=run,
        tensors=(parameter, gradient, first, second, torch.ones((), device=device)), flops=0.0,
        bytes=float(2 * parameter.nbytes + gradient.nbytes + 2 * (first.nbytes + second.nbytes)), is_checked=False,
    )  # fmt: skip


def _feed_forward_width(model: Model) -> int:
    return model.ffn_hidden or (model.experts.ffn_hidden if model.experts else model.hidden)


def _linear_cross_entropy(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    h = _random(tokens, model.hidden, format=format, device=device)
    weight = _random(model.vocab, model.hidden, format=format, device=device) * model.hidden**-0.5
    labels = torch.randint(model.vocab, (tokens,), device=device)
    yield KernelCase(
        op="linear_cross_entropy", model=model.name, shape=f"{tokens} x {model.hidden}, vocabulary {model.vocab}",
        tensors=(h, weight, labels), run=linear_cross_entropy, num_trained=2,
        flops=2.0 * tokens * model.hidden * model.vocab, bytes=float(h.nbytes + weight.nbytes),
    )  # fmt: skip


def _cross_entropy(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    logits = _random(tokens, model.vocab, format=format, device=device)
    labels = torch.randint(model.vocab, (tokens,), device=device)

    def run(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.clone(), labels)  # the gradient overwrites logits

    yield KernelCase(
        op="cross_entropy", model=model.name, shape=f"{tokens} x {model.vocab}", tensors=(logits, labels), run=run,
        num_trained=1, flops=0.0, bytes=float(logits.nbytes), backward=2.0,
    )  # fmt: skip


def _routed(model: Model, tokens: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Order of the rows of a balanced router, and the rows of each expert."""
    spec = model.experts
    if spec is None:
        return None
    chosen_NC = torch.rand(tokens, spec.num_experts, device=device).topk(spec.top_k, dim=1).indices
    flat_M = chosen_NC.flatten()
    return flat_M.argsort(stable=True), torch.bincount(flat_M, minlength=spec.num_experts)


def _grouped_gemm(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    routed, spec = _routed(model, tokens, device), model.experts
    if routed is None or spec is None:
        return
    rows = tokens * spec.top_k
    for n, k in ((spec.ffn_hidden, model.hidden), (model.hidden, spec.ffn_hidden)):
        x = _random(rows, k, format=format, device=device)
        weight = _random(spec.num_experts, n, k, format=format, device=device)
        yield KernelCase(
            op="grouped_gemm", model=model.name, shape=f"{rows} x {k} by {spec.num_experts} of {n}",
            tensors=(x, weight, routed[1]), run=grouped_gemm, num_trained=2, flops=2.0 * rows * n * k,
            bytes=float(x.nbytes + weight.nbytes + x.nbytes * n // k),
        )  # fmt: skip


def _fp8_grouped_gemm(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    routed, spec = _routed(model, tokens, device), model.experts
    if routed is None or spec is None:
        return
    counts = (routed[1] + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    how: dict[str, Any] = {"element": Element.E4M3, "scaling": Scaling.ROW, "with_columns": False}
    rows = int(counts.sum())
    for n, k in ((spec.ffn_hidden, model.hidden), (model.hidden, spec.ffn_hidden)):
        x, _ = cast_both(_random(rows, k, format=format, device=device), **how)
        weight, _ = cast_both(_random(spec.num_experts, n, k, format=format, device=device), **how)
        assert x is not None
        assert weight is not None

        def run(a: Tensor, b: Tensor, x: Quantized = x, weight: Quantized = weight) -> Tensor:
            operands = replace(x, values=a), replace(weight, values=b)
            return grouped_rows(*operands, counts, dtype=torch.bfloat16)

        yield KernelCase(
            op="fp8_grouped_gemm", model=model.name,
            shape=f"{rows} x {k} by {spec.num_experts} of {n}, scales of row",
            tensors=(x.values, weight.values), run=run, flops=2.0 * rows * n * k,
            bytes=float(x.num_bytes + weight.num_bytes + ELEMENT_BYTES["bf16"] * rows * n), is_checked=False,
        )  # fmt: skip


def _router(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    spec = model.experts
    if spec is None:
        return
    form = router_form(spec)
    logits = _random(tokens, spec.num_experts, format="fp32", device=device)
    bias = torch.zeros(spec.num_experts, device=device) if form.is_sigmoid else None

    def run(logits: Tensor) -> tuple[Tensor, ...]:
        routed = route_tokens(logits, bias, form=form)
        return routed.weights_NC, routed.scores_NE, routed.logsumexp_N

    yield KernelCase(
        op="router", model=model.name, shape=f"{tokens} x {spec.num_experts}, {spec.top_k} choices",
        tensors=(logits,), run=run, num_trained=1, flops=0.0, bytes=2.0 * logits.nbytes, backward=1.5, is_checked=False,
    )  # fmt: skip


def _permute(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    routed, spec = _routed(model, tokens, device), model.experts
    if routed is None or spec is None:
        return
    x = _random(tokens, model.hidden, format=format, device=device)
    yield KernelCase(
        op="permute", model=model.name, shape=f"{tokens} x {model.hidden}, {spec.top_k} choices",
        tensors=(x, routed[0]), run=partial(permute, top_k=spec.top_k), num_trained=1, flops=0.0,
        bytes=float(x.nbytes * (1 + spec.top_k)), backward=1.0,
    )  # fmt: skip


def _unpermute(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    routed, spec = _routed(model, tokens, device), model.experts
    if routed is None or spec is None:
        return
    rows = _random(tokens * spec.top_k, model.hidden, format=format, device=device)
    weights = torch.rand(tokens, spec.top_k, device=device)

    def run(rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        return unpermute(rows, order, weights)

    yield KernelCase(
        op="unpermute", model=model.name, shape=f"{tokens} x {model.hidden}, {spec.top_k} choices",
        tensors=(rows, weights, routed[0]), run=run, num_trained=2, flops=0.0,
        bytes=float(rows.nbytes * (1 + 1 / spec.top_k)), backward=2.0,
    )  # fmt: skip


def _fp8_cast(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    x = _random(tokens, model.hidden, format=format, device=device)
    for scaling in (Scaling.TENSOR, Scaling.ROW, Scaling.BLOCK):

        def run(x: Tensor, scaling: Scaling = scaling) -> Tensor:
            rows, _ = cast_both(x, element=Element.E4M3, scaling=scaling)
            assert rows is not None
            return rows.dequantized(torch.float64) if x.dtype == torch.float64 else rows.values

        yield KernelCase(
            op="fp8_cast", model=model.name, shape=f"{tokens} x {model.hidden}, scales of {scaling}",
            tensors=(x,), run=run, flops=0.0, bytes=float(x.nbytes + 2 * x.numel()), is_checked=False,
        )  # fmt: skip
    yield from _fp8_cast_of_experts(model, format, device)


def _fp8_cast_of_experts(model: Model, format: str, device: torch.device) -> Iterator[KernelCase]:
    """One of the stacks of weights of a layer, in one launch. Blocks of 128 x 128 are the scales of weights."""
    spec = model.experts
    if spec is None:
        return
    shape = (spec.num_experts, spec.ffn_hidden, model.hidden)
    weight = _random(*shape, format=format, device=device)
    for scaling in (Scaling.TENSOR, Scaling.ROW, Scaling.SQUARE):

        def run(weight: Tensor, scaling: Scaling = scaling) -> tuple[Tensor, ...]:
            sides = cast_both(weight, element=Element.E4M3, scaling=scaling)
            return tuple(side.values for side in sides if side is not None)

        yield KernelCase(
            op="fp8_cast", model=model.name, shape="{} experts of {} x {}, scales of ".format(*shape) + scaling,
            tensors=(weight,), run=run, flops=0.0, bytes=float(weight.nbytes + 2 * weight.numel()), is_checked=False,
        )  # fmt: skip


def _fp8_gated_cast(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    """The activation in the format of a GEMM's input, both orientations."""
    width = _feed_forward_width(model)
    tensors = tuple(_random(tokens, width, format=format, device=device) for _ in range(2))
    for scaling in (Scaling.TENSOR, Scaling.ROW, Scaling.BLOCK):
        how: dict[str, Any] = {
            "kind": ACTIVATION_KINDS[model.activation],
            "form": CastForm(element=Element.E4M3, scaling=scaling),
        }

        def run(gate: Tensor, up: Tensor, how: dict[str, Any] = how) -> tuple[Tensor, ...]:
            return tuple(side.values for side in cast_gated(gate, up, **how) if side is not None)

        yield KernelCase(
            op="fp8_gated_cast", model=model.name, shape=f"{tokens} x {width}, scales of {scaling}", tensors=tensors,
            run=run, flops=0.0, bytes=float(2 * tensors[0].nbytes + 2 * tensors[0].numel()), is_checked=False,
        )  # fmt: skip


def _fp8_gated_gradients(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    """The gradients of gate and up in the format of gradients, both orientations; sums where experts have biases."""
    width = _feed_forward_width(model)
    tensors = tuple(_random(tokens, width, format=format, device=device) for _ in range(3))
    for scaling in (Scaling.TENSOR, Scaling.ROW, Scaling.BLOCK):
        how: dict[str, Any] = {
            "kind": ACTIVATION_KINDS[model.activation],
            "form": CastForm(element=Element.E5M2, scaling=scaling),
            "with_sums": model.experts is not None and model.experts.bias,
        }

        def run(grad: Tensor, gate: Tensor, up: Tensor, how: dict[str, Any] = how) -> tuple[Tensor, ...]:
            found = cast_gated_gradients(grad, gate, up, **how)
            return tuple(side.values for one in found for side in one.both if side is not None)

        yield KernelCase(
            op="fp8_gated_gradients", model=model.name, shape=f"{tokens} x {width}, scales of {scaling}",
            tensors=tensors, run=run, flops=0.0,
            bytes=float(3 * tensors[0].nbytes + 4 * tensors[0].numel()), is_checked=False,
        )  # fmt: skip


def _fp8_gemm(model: Model, tokens: int, format: str, device: torch.device) -> Iterator[KernelCase]:
    width = model.ffn_hidden or model.hidden
    a, b = (
        cast_both(
            _random(rows, model.hidden, format=format, device=device),
            element=Element.E4M3, scaling=Scaling.ROW, with_columns=False,
        )[0]
        for rows in (tokens, width)
    )  # fmt: skip
    assert a is not None
    assert b is not None
    scales, shapes = (a.scales, b.scales), (a.shape, b.shape)

    def run(a: Tensor, b: Tensor) -> Tensor:
        q = [
            Quantized(values=v, scales=s, element=Element.E4M3, scaling=Scaling.ROW, shape=shape)
            for v, s, shape in zip((a, b), scales, shapes, strict=True)
        ]
        return scaled_gemm(q[0], q[1])

    yield KernelCase(
        op="fp8_gemm", model=model.name, shape=f"{tokens} x {model.hidden} by {width}, scales of row",
        tensors=(a.values, b.values), run=run, flops=2.0 * tokens * width * model.hidden,
        bytes=float(a.num_bytes + b.num_bytes + ELEMENT_BYTES["bf16"] * tokens * width), is_checked=False,
    )  # fmt: skip


MAKERS: Mapping[str, Callable[[Model, int, str, torch.device], Iterator[KernelCase]]] = {
    "linear_cross_entropy": _linear_cross_entropy,
    "cross_entropy": _cross_entropy,
    "swiglu": _swiglu,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "adamw": _adamw,
    "attention": _attention,
    "grouped_gemm": _grouped_gemm,
    "router": _router,
    "permute": _permute,
    "unpermute": _unpermute,
    "fp8_cast": _fp8_cast,
    "fp8_gated_cast": _fp8_gated_cast,
    "fp8_gated_gradients": _fp8_gated_gradients,
    "fp8_gemm": _fp8_gemm,
    "fp8_grouped_gemm": _fp8_grouped_gemm,
}
"""The calls of each operation that is timed."""
EIGHT_BITS = ("fp8_cast", "fp8_gated_cast", "fp8_gated_gradients", "fp8_gemm", "fp8_grouped_gemm")
"""Operations that a CPU only emulates: they are timed there when they are asked for."""
