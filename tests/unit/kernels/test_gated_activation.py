"""Gated activations: kernels in Triton's interpreter against float64."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import FEW, FORMATS, SIZES, assert_close, demanding, drawn, needs_interpreter

from meshwright.kernels.gated_activation import KINDS, gated_activation, reference
from meshwright.kernels.gated_activation_triton import gated, gated_backward

pytestmark = [needs_interpreter, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]


@settings(max_examples=20, deadline=None)
@given(
    rows=FEW,
    columns=st.one_of(SIZES, st.just(1100)),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(FORMATS),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients(rows, columns, kind, dtype, strided, seed):
    gate = drawn(rows, columns, dtype=dtype, strided=strided, seed=seed, scale=3.0).requires_grad_()
    up = drawn(rows, columns, dtype=dtype, seed=seed + 1, scale=5.0).requires_grad_()
    grad = drawn(rows, columns, dtype=dtype, strided=strided, seed=seed + 2)
    with demanding(swiglu="triton"):
        out = gated_activation(gate, up, kind=kind)
    out.backward(grad)
    exact_gate, exact_up = (t.detach().double().requires_grad_() for t in (gate, up))
    exact = reference(exact_gate, exact_up, kind=kind)
    exact.backward(grad.double())
    assert (out.shape, out.dtype) == (gate.shape, dtype)
    # GELU of a large negative gate is a difference of two numbers near one, as in PyTorch
    assert_close(out, exact, terms=gate * up)
    assert_close(gate.grad, exact_gate.grad, terms=grad * up)
    assert_close(up.grad, exact_up.grad, terms=grad * gate)


def test_large_gates_stay_finite():
    gate = torch.tensor([[-1e4, -90.0, 90.0, 1e4]], requires_grad=True)
    with demanding(swiglu="triton"):
        for kind in KINDS:
            out = gated_activation(gate, torch.ones_like(gate), kind=kind)
            (grad,) = torch.autograd.grad(out.sum(), gate)
            assert torch.isfinite(out).all()
            assert torch.isfinite(grad).all()


@pytest.mark.parametrize("op", [gated, gated_backward], ids=["forward", "backward"])
def test_operator_rules(op):
    tensors = [drawn(2, 5, dtype=torch.float32, seed=i) for i in range(3 if op is gated_backward else 2)]
    if op is gated:
        tensors = [t.requires_grad_() for t in tensors]
    torch.library.opcheck(op, (*tensors, "silu"))
