"""Rotary position embedding of queries and keys: the kernel in Triton's interpreter against float64."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import FORMATS, assert_close, counted_traffic, demanding, drawn, needs_interpreter

from meshwright.kernels.rotary import reference, rotate
from meshwright.kernels.rotary_triton import rotated_pair

pytestmark = needs_interpreter


def angles(batch, tokens, pairs, *, shared=False):
    position = torch.arange(tokens, dtype=torch.float32).expand(1 if shared else batch, -1)
    angle = position[..., None, None] * torch.logspace(0, -2, pairs)
    return angle.cos(), angle.sin()


@settings(max_examples=15, deadline=None)
@given(
    batch=st.sampled_from([0, 1, 2]),
    tokens=st.sampled_from([0, 1, 3]),
    heads=st.sampled_from([(1, 1), (3, 1), (9, 2)]),
    pairs=st.sampled_from([1, 3, 8]),
    plain=st.sampled_from([0, 5]),
    dtype=st.sampled_from(FORMATS),
    is_interleaved=st.booleans(),
    strided=st.booleans(),
    shared=st.booleans(),
)
def test_values_and_gradients(batch, tokens, heads, pairs, plain, dtype, is_interleaved, strided, shared):
    width = 2 * pairs + plain
    q, k = (drawn(batch, tokens, num, width, dtype=dtype, strided=strided, seed=num).requires_grad_() for num in heads)
    cos, sin = angles(batch, tokens, pairs, shared=shared)
    with demanding(rotary="triton"):
        out = rotate(q, k, cos, sin, is_interleaved=is_interleaved)
    grads = [drawn(*o.shape, dtype=dtype, strided=strided, seed=i) for i, o in enumerate(out)]
    torch.autograd.backward(out, grads)
    wide_q, wide_k = (t.detach().double().requires_grad_() for t in (q, k))
    expected = reference(wide_q, wide_k, cos.double(), sin.double(), is_interleaved)
    torch.autograd.backward(expected, [g.double() for g in grads])
    for got, wanted in zip((*out, q.grad, k.grad), (*expected, wide_q.grad, wide_k.grad), strict=True):
        assert_close(got, wanted)


def test_bytes_moved_are_those_of_the_model():
    q, k = (drawn(1, 2, num, 8, dtype=torch.bfloat16, seed=num) for num in (4, 2))
    with demanding(rotary="triton"), counted_traffic() as counted:
        rotate(q, k, *angles(1, 2, 4))
    assert counted.moved_bytes == 2 * (2 * 2 * 6 * 8 + 2 * 4 * 4)


def test_operator_rules():
    q, k = (drawn(1, 2, num, 6, dtype=torch.float32, seed=num).requires_grad_() for num in (3, 1))
    torch.library.opcheck(rotated_pair, (q, k, *angles(1, 2, 2), True, False))
