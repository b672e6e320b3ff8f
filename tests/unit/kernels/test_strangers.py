"""Calls that no engine makes: tensors that do not fit, second derivatives, forward mode, labels outside the vocabulary.

Whatever a route does not compute is refused: no number is wrong in silence.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest

torch = pytest.importorskip("torch")
from tests.kernel_cases import demanding, drawn, needs_interpreter
from tests.processors import without_amx

from meshwright.errors import InputError
from meshwright.kernels.adamw import AdamStates, AdamWStep, adamw
from meshwright.kernels.attention.key_ranges import key_ranges
from meshwright.kernels.attention.operation import attention
from meshwright.kernels.dispatch import KernelRouting, using
from meshwright.kernels.experts.grouped_gemm import grouped_gemm
from meshwright.kernels.experts.permutation import permute, unpermute
from meshwright.kernels.experts.router import RouterForm, route_tokens
from meshwright.kernels.fp8.casting import cast_both
from meshwright.kernels.fp8.formats import CastForm, Element, Scaling, stacked
from meshwright.kernels.fp8.gated_casting import cast_gated
from meshwright.kernels.fp8.gemm import scaled_gemm
from meshwright.kernels.fp8.grouped_gemm import grouped_rows
from meshwright.kernels.fp8.layer import RECIPES, Fp8State, fp8_linear
from meshwright.kernels.gated_activation import gated_activation
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.kernels.linear_cross_entropy import linear_cross_entropy
from meshwright.kernels.rms_norm import add_rms_norm, rms_norm
from meshwright.kernels.rotary import rotate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forward mode, in PyTorch
TRITON = pytest.param("triton", marks=needs_interpreter)


def x(*shape, dtype=torch.float32):
    return drawn(*shape, dtype=dtype)


def quantized(*shape, scaling=Scaling.ROW):
    return cast_both(x(*shape), CastForm(element=Element.E4M3, scaling=scaling))[0]


Q, K, ANGLES = (2, 6, 4, 16), (2, 6, 2, 16), (1, 6, 1, 8)
LABELS = torch.arange(6)
STEP = AdamWStep(learning_rate=1e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1, number=1)
UNFIT = {
    "up would be repeated": lambda: gated_activation(x(6, 16), x(1, 16)),
    "up of another format": lambda: gated_activation(x(6, 16), x(6, 16, dtype=torch.bfloat16)),
    "weight of another width": lambda: rms_norm(x(6, 16), x(8), epsilon=1e-5),
    "residual of another length": lambda: add_rms_norm(x(6, 16), x(5, 16), x(16), epsilon=1e-5),
    "keys of other positions": lambda: rotate(x(*Q), x(2, 5, 2, 16), x(*ANGLES), x(*ANGLES)),
    "angles of fewer tokens": lambda: rotate(x(*Q), x(*K), x(1, 5, 1, 8), x(1, 5, 1, 8)),
    "more angles than pairs": lambda: rotate(x(*Q), x(*K), x(1, 6, 1, 9), x(1, 6, 1, 9)),
    "heads that no group divides": lambda: attention(x(*Q), x(2, 6, 3, 16), x(2, 6, 3, 16), scale=1.0),
    "keys of another width": lambda: attention(x(*Q), x(2, 6, 2, 8), x(*K), scale=1.0),
    "sinks of other heads": lambda: attention(x(*Q), x(*K), x(*K), scale=1.0, sinks_H=x(2)),
    "ranges of other queries": lambda: attention(
        x(*Q), x(*K), x(*K), scale=1.0, ranges=key_ranges(torch.zeros(2, 5))
    ),
    "head of another width": lambda: linear_cross_entropy(x(6, 16), x(40, 8), LABELS),
    "fewer labels than tokens": lambda: linear_cross_entropy(x(6, 16), x(40, 16), LABELS[:5]),
    "labels that are no numbers of words": lambda: linear_cross_entropy(x(6, 16), x(40, 16), LABELS.float()),
    "fewer weights than rows": lambda: linear_cross_entropy(x(6, 16), x(40, 16), LABELS, weights_N=x(5)),
    "rows of another width": lambda: grouped_gemm(x(6, 16), x(2, 5, 8), torch.tensor([4, 2])),
    "counts of more experts": lambda: grouped_gemm(x(6, 16), x(2, 5, 16), torch.tensor([3, 2, 1])),
    "bias of other experts": lambda: route_tokens(x(6, 8), x(7), form=RouterForm(top_k=2)),
    "order of other rows": lambda: unpermute(x(6, 16), LABELS[:5], x(3, 2)),
    "gradient of another tensor": lambda: adamw(
        x(8), x(7), AdamStates(first=x(8), second=x(8)), STEP
    ),
    "factors that sum over other widths": lambda: scaled_gemm(quantized(16, 32), quantized(16, 16)),
    **{
        f"factors scaled by {a} and {b}": partial(
            lambda a, b: scaled_gemm(quantized(256, 192, scaling=a), quantized(192, 192, scaling=b)), a, b
        )
        for a, b in product(Scaling, Scaling)
        if (a, b) != (Scaling.BLOCK, Scaling.SQUARE) and (a != b or a is Scaling.SQUARE)
    },
    "rows of experts scaled by squares": lambda: grouped_rows(
        quantized(256, 192, scaling=Scaling.SQUARE),
        stacked([quantized(192, 192, scaling=Scaling.SQUARE)] * 2),
        torch.tensor([128, 128]),
        dtype=torch.float32,
    ),
    "gate and up to be cast": lambda: cast_gated(
        x(16, 32), x(16, 16), kind="silu", form=CastForm(element=Element.E4M3, scaling=Scaling.ROW)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_tensors_that_do_not_fit_together_are_refused(name):
    """Before a route is chosen: a kernel would read past the end of the smaller one."""
    with pytest.raises(InputError):
        UNFIT[name]()


CALLS = {
    "swiglu": (gated_activation, (x(6, 16), x(6, 16))),
    "rms_norm": (partial(rms_norm, epsilon=1e-5), (x(6, 16), x(16))),
    "attention": (partial(attention, scale=0.25), (x(*Q), x(*K), x(*K))),
    "linear_cross_entropy": (partial(linear_cross_entropy, labels_N=LABELS), (x(6, 16), x(40, 16))),
    "permute": (partial(permute, order_P=LABELS, top_k=1), (x(6, 16),)),
    "grouped_gemm": (partial(grouped_gemm, counts_E=torch.tensor([4, 2])), (x(6, 16), x(2, 5, 16))),
    "fp8_cast": (lambda a, b: fp8_linear(a, b, state=Fp8State(RECIPES["fp8"])), (x(16, 32), x(16, 32))),
}
ONCE = [
    ("linear_cross_entropy", "cached"), ("attention", "blockwise"),
    ("fp8_cast", "reference"),
    *(pytest.param(op, "triton", marks=needs_interpreter) for op in CALLS),
]  # fmt: skip


@pytest.mark.parametrize(("op", "route"), ONCE)
def test_a_second_derivative_is_refused(op, route, monkeypatch):
    """It would be that of a constant."""
    without_amx(monkeypatch)  # for attention's own blocks
    run, given = CALLS[op]
    leaves = [t.clone().requires_grad_() for t in given]
    with demanding(**{op: route}):
        out = run(*leaves)
    gradients = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate twice|no autograd formula was registered"):
        sum(g.square().sum() for g in gradients).backward()


@needs_interpreter
@pytest.mark.parametrize("op", ["swiglu", "rms_norm", "attention"])
def test_in_forward_mode_kernels_leave_the_call_to_others(op):
    """PyTorch takes derivatives of kernels that it does not know as zero."""
    run, (first, *others) = CALLS[op]

    direction = first.roll(1, -1)

    def change():
        return torch.func.jvp(lambda value: run(value, *others), (first,), (direction,))[1]

    with using(KernelRouting(demanded={op: "reference"})):
        expected = change()
    assert expected.abs().sum() > 1e-3
    with demanding(**{op: "triton"}), pytest.raises(InputError, match="no derivatives in forward mode"):
        change()
    with torch.no_grad():
        near = (run(first + 1e-2 * direction, *others) - run(first - 1e-2 * direction, *others)) / 2e-2
    torch.testing.assert_close(expected, near, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("route", ["reference", "cached", TRITON])
@pytest.mark.parametrize("outside", [-1, 40, 10**9])
def test_a_label_outside_the_vocabulary_has_no_loss(outside, route, reduction):
    """No wait for the device, no memory of others: its loss is no number, and those of other tokens stay."""
    labels_N = LABELS.int().clone()
    labels_N[3], labels_N[4] = outside, IGNORED_LABEL
    with demanding(linear_cross_entropy=route):
        losses = [
            linear_cross_entropy(x(6, 16), x(40, 16), labels_N, weights_N=weights_N, reduction=reduction)
            for weights_N in (None, torch.full((6,), 0.5))
        ]
    for loss in losses:
        assert loss.isnan().sum() == 1
        assert reduction == "sum" or loss.isnan()[3]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias_E", [None, torch.linspace(-0.3, 0.4, 8)], ids=["", "bias"])
@pytest.mark.parametrize("num_groups", [0, 2])
@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize("route", ["reference", TRITON])
def test_a_logit_that_is_no_number_chooses_no_expert_twice(route, is_sigmoid, num_groups, bias_E, dtype):
    """Two rows of a token for one expert would be added in an order that is not defined."""
    logits_NE = x(6, 8, dtype=dtype).clone()
    logits_NE[1, 3], logits_NE[2] = torch.nan, torch.nan
    logits_NE[3, 5] = -torch.tensor(torch.nan)  # as x86 makes it of inf - inf
    logits_NE[4, 2:4], logits_NE[5, :6] = torch.inf, -torch.inf
    form = RouterForm(top_k=3, is_sigmoid=is_sigmoid, num_groups=num_groups, groups_per_token=min(num_groups, 1))
    with demanding(router=route):
        found = route_tokens(logits_NE, bias_E, form=form)
    assert [len(set(experts)) for experts in found.experts_NC.tolist()] == [3] * 6
    if dtype is torch.float32:  # the reference rounds scores to bf16, where more of them are equal
        with demanding(router="reference"):
            assert found.experts_NC.tolist() == route_tokens(logits_NE, bias_E, form=form).experts_NC.tolist()
    assert found.weights_NC[2].isnan().all()
