"""Scaled GEMMs in Triton's interpreter against the dequantised matrices in float64."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import SIZES, assert_close, demanding, drawn, needs_interpreter

from meshwright.kernels.dispatch import KernelRouting, using
from meshwright.kernels.fp8.formats import Element, Scaling, quantize
from meshwright.kernels.fp8.gemm import reference, scaled_gemm
from meshwright.kernels.fp8.triton_gemm import fp8_gemm

SCALED = st.sampled_from([(s, s) for s in Scaling if s is not Scaling.SQUARE] + [(Scaling.BLOCK, Scaling.SQUARE)])
pytestmark = needs_interpreter


@settings(max_examples=8)
@given(m=SIZES, n=SIZES, k=st.one_of(SIZES, st.just(300)), scaled=SCALED,
       gradients=st.sampled_from([Element.E4M3, Element.E5M2]), dtype=st.sampled_from([torch.bfloat16, torch.float32]),
       seed=st.integers(0, 99))  # fmt: skip
def test_against_float64(m, n, k, scaled, gradients, dtype, seed):
    a = quantize(drawn(m, k, dtype=torch.float32, seed=seed), element=gradients, scaling=scaled[0])
    b = quantize(drawn(n, k, dtype=torch.float32, seed=seed + 1), element=Element.E4M3, scaling=scaled[1])
    with demanding(fp8_gemm="triton"):
        found = scaled_gemm(a, b, dtype=dtype)
    assert_close(found, reference(a, b, dtype=torch.float64))


def test_the_same_bits_each_time():
    a, b = (
        quantize(drawn(70, 260, dtype=torch.float32, seed=i), element=Element.E4M3, scaling=Scaling.BLOCK)
        for i in (0, 1)
    )
    with demanding(fp8_gemm="triton"):
        assert torch.equal(scaled_gemm(a, b), scaled_gemm(a, b))


def test_four_bits_go_to_the_reference_and_say_why(monkeypatch):
    from meshwright.kernels import dispatch

    monkeypatch.setattr(dispatch, "default_routes", lambda op, architecture: ("triton", "scaled_mm", "reference"))
    a, b = (
        quantize(drawn(4, 32, dtype=torch.float32, seed=i), element=Element.E2M1, scaling=Scaling.MX) for i in (0, 1)
    )
    with using(KernelRouting()) as routing:
        scaled_gemm(a, b)
    (choice,) = routing.choices.values()
    assert choice.route == "reference"
    assert [refusal.reason for _, refusal in choice.refused] == [
        "4-bit values are emulated by the reference only", "_scaled_mm multiplies on GPUs",
    ]  # fmt: skip


def test_operator_rules():
    a, b = (
        quantize(drawn(5, 40, dtype=torch.float32, seed=i), element=Element.E4M3, scaling=Scaling.BLOCK) for i in (0, 1)
    )
    given = (a.values, a.scales, "block", b.values, b.scales, "block", torch.float32)
    # the check of the schema compares inputs by arithmetic that PyTorch has not for 8 bits
    torch.library.opcheck(fp8_gemm, given, test_utils=("test_autograd_registration", "test_faketensor"))
