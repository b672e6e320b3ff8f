"""RMSNorm with and without a residual: kernels in Triton's interpreter against float64."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import FEW, FORMATS, assert_close, counted_traffic, demanding, drawn, needs_interpreter

from meshwright.kernels import rms_norm_triton as made
from meshwright.kernels.rms_norm import add_rms_norm, rms_norm
from meshwright.kernels.sources import Tile

pytestmark = needs_interpreter


def exact(x, weight, *, epsilon, zero_centered):
    scale = (x.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    return x * scale * (weight + 1 if zero_centered else weight)


@settings(max_examples=15, deadline=None)
@given(
    rows=FEW,
    columns=st.sampled_from([1, 2, 17, 128, 1025]),
    dtype=st.sampled_from(FORMATS),
    adds=st.booleans(),
    zero_centered=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients(rows, columns, dtype, adds, zero_centered, strided, seed):
    options = {"epsilon": 1e-5, "zero_centered": zero_centered}
    x = drawn(2, rows, columns, dtype=dtype, strided=strided, seed=seed).requires_grad_()
    residual = drawn(2, rows, columns, dtype=dtype, seed=seed + 1).requires_grad_()
    weight = drawn(columns, dtype=dtype, seed=seed + 2).requires_grad_()
    grad, grad_total = (drawn(2, rows, columns, dtype=dtype, strided=strided, seed=seed + i) for i in (3, 4))
    wide_x, wide_residual, wide_weight = (t.detach().double().requires_grad_() for t in (x, residual, weight))
    with demanding(rms_norm="triton"):
        if adds:
            out, total = add_rms_norm(x, residual, weight, **options)
            torch.autograd.backward([out, total], [grad, grad_total])
            # the sum is rounded to its format before it is normed
            rounded = wide_x + wide_residual + (total.detach().double() - wide_x - wide_residual).detach()
            expected = exact(rounded, wide_weight, **options)
            torch.autograd.backward([expected, rounded], [grad.double(), grad_total.double()])
            assert_close(total, (wide_x + wide_residual).detach(), terms=x.abs() + residual.abs())
            assert_close(residual.grad, wide_residual.grad, terms=grad, factor=4.0)
        else:
            out = rms_norm(x, weight, **options)
            out.backward(grad)
            expected = exact(wide_x, wide_weight, **options)
            expected.backward(grad.double())
    assert_close(out, expected, factor=2.0)
    # the gradient is a difference that vanishes for a row of one column
    scale = (wide_x.detach().square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
    assert_close(x.grad, wide_x.grad, terms=grad.double() * (wide_weight.detach().abs() + 1) * scale, factor=8.0)
    assert_close(weight.grad, wide_weight.grad, terms=grad, factor=4.0)


def test_the_weights_gradient_of_many_rows_is_the_same_each_time(monkeypatch):
    monkeypatch.setattr(made, "NUM_PROGRAMS", 3)  # so that programs take several rows
    x, weight = drawn(8, 16, dtype=torch.float32), drawn(16, dtype=torch.float32, seed=1)
    grads = []
    for _ in range(2):
        leaf = weight.clone().requires_grad_()
        with demanding(rms_norm="triton"):
            rms_norm(x, leaf, epsilon=1e-5).square().sum().backward()
        grads.append(leaf.grad)
    wide = weight.double().requires_grad_()
    exact(x.double(), wide, epsilon=1e-5, zero_centered=False).square().sum().backward()
    assert torch.equal(*grads)
    assert_close(grads[0], wide.grad)


def test_bytes_moved_are_those_of_the_model():
    rows, columns = 4, 64
    whole = rows * columns * 4
    x, r = (drawn(rows, columns, dtype=torch.float32, seed=s).requires_grad_() for s in (0, 1))
    weight = torch.ones(columns, requires_grad=True)
    with demanding(rms_norm="triton"):
        with counted_traffic() as counted:
            out, total = add_rms_norm(x, r, weight, epsilon=1e-5)
        assert counted.moved_bytes == 4 * whole + rows * columns * 4 + rows * 4  # the weight is read from a cache
        with counted_traffic() as counted:
            torch.autograd.backward([out, total], [torch.ones_like(out)] * 2)
        parts = 2 * rows * columns * 4  # a program for each row here: its weight, and its part of the gradient
        assert counted.moved_bytes == 4 * whole + parts + rows * 4


@pytest.mark.when_touched  # test_rows_wider_than_any_tile goes through blocks
@settings(max_examples=8, deadline=None)
@given(
    rows=FEW, columns=st.sampled_from([33, 64, 101]), dtype=st.sampled_from(FORMATS), adds=st.booleans(),
    zero_centered=st.booleans(), strided=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_rows_in_blocks_have_the_values_of_whole_ones(rows, columns, dtype, adds, zero_centered, strided, seed):
    options = {"epsilon": 1e-5, "zero_centered": zero_centered}
    x = drawn(rows, columns, dtype=dtype, strided=strided, seed=seed)
    residual, weight = (drawn(rows, columns, dtype=dtype, seed=seed + 1), drawn(columns, dtype=dtype, seed=seed + 2))
    grads = [drawn(rows, columns, dtype=dtype, strided=strided, seed=seed + i) for i in (3, 4)]

    def values():
        leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
        with demanding(rms_norm="triton"):
            outs = add_rms_norm(*leaves, **options) if adds else [rms_norm(leaves[0], leaves[2], **options)]
        torch.autograd.backward(outs, grads[: len(outs)])
        return [*outs, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    whole = values()
    with pytest.MonkeyPatch.context() as patch:
        blocks = (Tile(constants={"BLOCK": 32}),)
        for name in ("TILES", "WIDE_FORWARD_TILES", "WIDE_BACKWARD_TILES"):
            patch.setattr(made, name, blocks)
        patch.setattr(made, "NUM_WIDE_PROGRAMS", 3)
        in_blocks = values()
        assert all(map(torch.equal, in_blocks, values()))
    for got, expected in zip(in_blocks, whole, strict=True):
        assert_close(got, expected.double(), factor=4.0, terms=grads[0])


def test_rows_wider_than_any_tile():
    columns = max(tile.constants["BLOCK"] for tile in made.TILES) + 1
    x, weight, grad = (drawn(*shape, dtype=torch.float32, seed=i) for i, shape in
                       enumerate(((2, columns), (columns,), (2, columns))))  # fmt: skip
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    with demanding(rms_norm="triton"):
        out = rms_norm(leaf, weight, epsilon=1e-5)
    out.backward(grad)
    expected = exact(wide, weight.double(), epsilon=1e-5, zero_centered=False)
    expected.backward(grad.double())
    assert_close(out, expected, factor=2.0)
    assert_close(leaf.grad, wide.grad, factor=8.0)


def test_operator_rules():
    x, weight = (drawn(3, 8, dtype=torch.float32).requires_grad_(), drawn(8, dtype=torch.float32).requires_grad_())
    torch.library.opcheck(made.norm, (x, weight, 1e-5, False))
    given = (torch.ones(3, 8), None, x.detach(), weight.detach(), torch.ones(3), False)
    torch.library.opcheck(made.norm_backward, given)
    torch.library.opcheck(made.norm_of_sum, (x, drawn(3, 8, dtype=torch.float32, seed=1), weight, 1e-5, True))
