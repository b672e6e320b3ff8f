"""Number formats: the definitions of OCP and torchao's implementation of them."""

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import SIZES, drawn

from meshwright.kernels.fp8.formats import (
    DTYPES,
    FP4_VALUES,
    LARGEST,
    MANTISSA_BITS,
    Element,
    Scaling,
    decode_e8m0,
    pack_fp4,
    quantize,
    scales_shape,
    unpack_fp4,
)

HALF_STEPS = {e: 2.0 ** -(bits + 1) for e, bits in MANTISSA_BITS.items() if e is not Element.E2M1}
MX_ELEMENTS = (Element.E4M3, Element.E5M2, Element.E2M1)


@settings(max_examples=30)
@given(rows=SIZES, columns=SIZES, element=st.sampled_from(tuple(HALF_STEPS)), scaling=st.sampled_from(Scaling),
       power_of_two=st.booleans(), seed=st.integers(0, 99))  # fmt: skip
def test_values_are_within_half_a_step(rows, columns, element, scaling, power_of_two, seed):
    if scaling is Scaling.MX and element not in MX_ELEMENTS:
        return
    x = drawn(rows, columns, dtype=torch.float32, seed=seed, scale=10.0 ** (seed % 9 - 4))
    found = quantize(x, element=element, scaling=scaling, power_of_two=power_of_two)
    assert found.scales.shape == scales_shape(scaling, rows=rows, columns=columns)
    scale = decode_e8m0(found.scales) if scaling is Scaling.MX else found.scales
    largest = x.abs().amax() if x.numel() else torch.tensor(0.0)
    step = float(torch.finfo(DTYPES[element]).smallest_normal) * 2 ** -MANTISSA_BITS[element]
    # MX saturates: its scale leaves magnitudes between the format's largest value and 2^(exponent + 1)
    relative = HALF_STEPS[element] if scaling is not Scaling.MX else 0.125 + HALF_STEPS[element]
    bound = relative * x.abs() + (0.5 * step * scale.amax() if scale.numel() else 0)
    assert (found.dequantized() - x).abs().le(bound * 1.00001).all()
    assert found.dequantized().abs().le(largest * (1 + HALF_STEPS[element])).all()


@pytest.mark.parametrize("element", MX_ELEMENTS)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30], ids=["normal", "tiny", "huge"])
def test_mx_equals_torchao_bit_for_bit(element, scale):
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    x = drawn(17, 96, dtype=torch.float32) * scale
    x[0, :32] = 0
    dtype = torch.float4_e2m1fn_x2 if element is Element.E2M1 else DTYPES[element]
    scales, values = to_mx(x, dtype, 32)
    found = quantize(x, element=element, scaling=Scaling.MX)
    assert torch.equal(found.scales, scales.view(torch.uint8).reshape(found.scales.shape))
    assert torch.equal(found.values.view(torch.uint8), values.view(torch.uint8).reshape(found.values.shape))


def test_scales_of_mx_are_those_of_the_standard():
    """OCP MX v1.0, section 6.3: the largest power of two in the block over that of the format."""
    x = torch.zeros(5, 32)
    x[:, 0] = torch.tensor([448.0, 449.0, 511.0, 512.0, 2.0**-140])
    found = quantize(x, element=Element.E4M3, scaling=Scaling.MX)
    assert decode_e8m0(found.scales).flatten().tolist() == [1.0, 1.0, 1.0, 2.0, 2.0**-127]
    assert found.values[:, 0].float().tolist()[:4] == [448.0, 448.0, 448.0, 256.0]


def test_fp4_rounds_ties_to_even():
    values = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.75, -0.2, 0.2500001]])
    assert unpack_fp4(pack_fp4(values))[0, :11].tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -1, 0, 0.5]
    exact = torch.tensor([[*FP4_VALUES, *(-v for v in FP4_VALUES)]])
    assert torch.equal(unpack_fp4(pack_fp4(exact)), exact)


@pytest.mark.parametrize("scaling", Scaling)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_what_is_not_finite_makes_nan_of_its_group_only(scaling, wrong):
    x = torch.ones(130, 260)
    x[0, 0] = wrong
    bad = quantize(x, element=Element.E4M3, scaling=scaling).dequantized().isnan()
    sizes = {Scaling.TENSOR: (130, 260), Scaling.ROW: (1, 260), Scaling.BLOCK: (1, 128), Scaling.SQUARE: (128, 128),
             Scaling.MX: (1, 32)}  # fmt: skip
    height, width = sizes[scaling]
    assert bad[:height, :width].all()
    assert int(bad.sum()) == height * width


def test_given_magnitudes_saturate():
    x = torch.tensor([[1.0, 8.0, -8.0]])
    found = quantize(x, element=Element.E4M3, scaling=Scaling.TENSOR, amax=torch.full((1, 1), 2.0))
    assert found.dequantized().tolist() == [[1.0, 2.0, -2.0]]
    assert found.values.float().abs().max() == LARGEST[Element.E4M3]
