"""Cast and transpose in Triton's interpreter: the same bits as the specification."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import FORMATS, SIZES, demanding, drawn, needs_interpreter

from meshwright.kernels.fp8.casting import cast_both
from meshwright.kernels.fp8.formats import Element, Scaling, quantize
from meshwright.kernels.fp8.triton_cast import fp8_cast

pytestmark = needs_interpreter
EIGHT_BITS = (Element.E4M3, Element.E5M2, Element.E4M3_FNUZ, Element.E5M2_FNUZ)


def assert_same(found, x, **options):
    want = quantize(x, **options)
    assert torch.equal(found.scales, want.scales)
    assert torch.equal(found.values.view(torch.uint8), want.values.view(torch.uint8))
    assert found.shape == want.shape == x.shape


@settings(max_examples=8)
@given(
    rows=SIZES,
    columns=SIZES,
    dtype=st.sampled_from(FORMATS),
    scaling=st.sampled_from(Scaling),
    element=st.sampled_from(EIGHT_BITS),
    power_of_two=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
def test_both_orientations(rows, columns, dtype, scaling, element, power_of_two, strided, seed):
    if scaling is Scaling.MX:
        element = Element.E4M3 if element is Element.E4M3_FNUZ else Element.E5M2
    x = drawn(rows, columns, dtype=dtype, strided=strided, seed=seed, scale=10.0 ** (seed % 5 - 2))
    options = {"element": element, "scaling": scaling, "power_of_two": power_of_two}
    with demanding(fp8_cast="triton"):
        by_rows, by_columns = cast_both(x, **options)
    assert_same(by_rows, x, **options)
    assert_same(by_columns, x.T, **options)


def test_a_transposed_view_and_one_side():
    x = drawn(70, 40, dtype=torch.bfloat16).T
    with demanding(fp8_cast="triton"):
        none, by_columns = cast_both(x, element=Element.E4M3, scaling=Scaling.ROW, with_rows=False)
    assert none is None
    assert_same(by_columns, x.T, element=Element.E4M3, scaling=Scaling.ROW)


def test_a_delayed_scale():
    x, amax = drawn(5, 7, dtype=torch.float32), torch.full((1, 1), 0.5)
    with demanding(fp8_cast="triton"):
        found, _ = cast_both(x, element=Element.E4M3, scaling=Scaling.TENSOR, amax=amax)
    assert_same(found, x, element=Element.E4M3, scaling=Scaling.TENSOR, amax=amax)


@pytest.mark.parametrize("scaling", Scaling)
def test_what_is_not_finite(scaling):
    x = drawn(3, 130, dtype=torch.float32)
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    with demanding(fp8_cast="triton"):
        found, _ = cast_both(x, element=Element.E4M3, scaling=scaling)
    want = quantize(x, element=Element.E4M3, scaling=scaling)
    assert torch.equal(found.dequantized().isnan(), want.dequantized().isnan())


@pytest.mark.parametrize("scaling", [Scaling.ROW, Scaling.MX])
def test_operator_rules(scaling):
    torch.library.opcheck(
        fp8_cast, (drawn(3, 5, dtype=torch.float32), "e4m3", scaling.value, False, None, True, False)
    )
