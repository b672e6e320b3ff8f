import os
import shutil

import pytest

torch = pytest.importorskip("torch")
from tests.processors import pretend
from tests.rounding import difference, unit_roundoff
from torch.nn import functional

from meshwright.kernels import linear as linear_module
from meshwright.kernels import processor
from meshwright.kernels.processor import Multiplies


def with_gradients(linear, x, weight, bias, grad):
    out = linear(x, weight, bias)
    return out.detach(), *torch.autograd.grad(out, [t for t in (x, weight, bias) if t.requires_grad], grad)


def inputs(*, frozen=False):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 9, 40), (24, 40), (24,))
    x, weight, bias = (torch.randn(*s, generator=generator).requires_grad_() for s in shapes)
    return x, weight.requires_grad_(not frozen), bias, torch.randn(2, 9, 24, generator=generator)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_linear_layer_is_exact_to_fp32(frozen):
    given = inputs(frozen=frozen)
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    expected = with_gradients(functional.linear, *exact)
    for got, right in zip(with_gradients(linear_module.linear, *given), expected, strict=True):
        assert got.shape == right.shape
        assert (got - right).norm() < difference(40) * right.norm()


@pytest.mark.when_touched  # test_operator_rules traces the operation, whose GEMMs are above
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what PyTorch's own compiler imports
def test_a_compiled_layer_is_one_graph_of_the_same_gemms():
    given = inputs()
    expected = with_gradients(linear_module.linear, *given)
    found = with_gradients(torch.compile(linear_module.linear, fullgraph=True), *given)
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right)


def test_the_layer_takes_one_vector_and_other_formats():
    layer = linear_module.Linear(40, 24)
    x = torch.randn(40)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        y = x.to(dtype)
        got, right = layer.to(dtype)(y), functional.linear(y, layer.weight, layer.bias)
        assert got.dtype == dtype
        # summed in fp32 at least; the product, the sum with the bias, and PyTorch's own result are rounded
        limit = difference(40, torch.promote_types(dtype, torch.float32)) + 3 * unit_roundoff(dtype)
        assert (got - right).norm() <= limit * ((layer.weight @ y).norm() + layer.bias.norm())


def test_a_processor_without_bf16_gemms_widens_and_one_with_amx_takes_pytorchs(monkeypatch):
    x = torch.randn(3, 40).bfloat16()
    pretend(monkeypatch, Multiplies.FP32)
    assert linear_module.default_route(x.dtype) is linear_module.GemmRoute.WIDENED
    assert linear_module.GemmRoute.ONEDNN not in linear_module.routes_of(x.dtype)
    assert linear_module.has_own_route(x)
    assert linear_module.widens(x)
    pretend(monkeypatch, Multiplies.AMX)
    assert linear_module.default_route(x.dtype) is linear_module.GemmRoute.TORCH
    assert linear_module.GemmRoute.WIDENED not in linear_module.routes_of(x.dtype)
    assert not linear_module.has_own_route(x)


def test_a_large_gemm_is_widened_in_blocks_of_rows_with_the_same_result(monkeypatch):
    pretend(monkeypatch, Multiplies.FP32)
    shapes = ((700, 40), (90, 40), (700, 90))
    x, weight, grad = (torch.randint(-3, 4, shape).bfloat16() for shape in shapes)  # whose sums are exact in any order
    gemms = ((x, weight), (grad, weight.T), (grad.T, x.T))  # forward, input gradient, weight gradient
    whole = [linear_module.matmul_nt(*factors) for factors in gemms]
    fp32 = linear_module.default_route(torch.float32)
    multiply, widened = linear_module.BY_ROUTE[fp32], []

    def counting(rows, other):
        widened.append(max(rows.numel(), len(rows) * len(other)))
        return multiply(rows, other)

    monkeypatch.setitem(linear_module.BY_ROUTE, fp32, counting)
    monkeypatch.setattr(linear_module, "WIDENED_NUMBERS", 64 * 700)
    assert all(
        torch.equal(linear_module.matmul_nt(*factors), right) for factors, right in zip(gemms, whole, strict=True)
    )
    assert len(widened) > len(gemms)
    assert max(widened) <= 64 * 700


def test_only_plain_fp32_tensors_of_a_cpu_suit():
    x = torch.randn(3, 4)
    assert linear_module.has_own_route(x, x) == processor.HERE.is_better_with_onednn
    assert not linear_module.has_own_route(x, x.bfloat16())
    assert not linear_module.has_own_route(x, x.to("meta"))


@pytest.mark.skipif(not processor.HERE.is_better_with_onednn, reason="MKL serves this processor")
def test_onednn_multiplies_where_it_suits():
    x = torch.randn(4, 8)
    with torch.profiler.profile(acc_events=True) as profile:
        linear_module.matmul_nt(x, torch.randn(5, 8))
    assert any("mkldnn" in event.key for event in profile.key_averages())


def test_operator_rules():
    x_MK, w_NK = torch.randn(3, 5), torch.randn(4, 5)
    torch.library.opcheck(linear_module._opaque, (x_MK, w_NK))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("onednn", [Multiplies.FP32, Multiplies.AVX512], ids=str)
def test_rows_may_be_none(monkeypatch, dtype, onednn):
    """An expert without tokens, on processors of either kind."""
    if processor.HERE.has_onednn:
        pretend(monkeypatch, onednn, is_intel=False)
    x, weight = (torch.ones(0, 8, dtype=dtype, requires_grad=True), torch.ones(4, 8, dtype=dtype, requires_grad=True))
    out = linear_module.linear(x, weight)
    out.sum().backward()
    assert out.shape == (0, 4)
    assert x.grad.shape == (0, 8)
    assert not weight.grad.any()
